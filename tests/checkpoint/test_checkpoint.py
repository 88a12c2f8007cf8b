"""Opening a folder: what is read, what overrides what, and that tensors come out with their values."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_config

from strata_mlx.checkpoint import Checkpoint, read_json
from strata_mlx.errors import CheckpointError, Fault
from tests.errors import refuses
from tests.tiny import make_checkpoint, read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", mtp="separate", shards=3)


def test_every_tensor_of_every_shard_is_known_with_its_place(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    stored = {name: file for file in folder.glob("*.safetensors") for name in read(file)}
    assert {name: entry.file for name, entry in checkpoint.tensors.items()} == stored


def test_tensors_are_read_with_their_values(folder: Path) -> None:
    reader = Checkpoint.open(folder).reader()
    for file in folder.glob("*.safetensors"):
        for name, array in read(file).items():
            assert np.array_equal(np.array(reader(name)), np.array(array))


def test_a_head_in_a_file_of_its_own_belongs_to_the_checkpoint(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", layout="stacked", mtp="stacked")
    assert Checkpoint.open(folder).tensors["mtp.fc.weight"].file.name == "mtp.safetensors"


def test_files_that_the_index_does_not_name_are_left_alone(folder: Path) -> None:
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"an old download")
    (folder / "consolidated.safetensors").write_bytes(b"another format")
    assert len(Checkpoint.open(folder).tensors) > 100


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(1, None, 1), (1, 2, 2), (None, [2, 3], [2, 3]), (1, 0, 0), ([1, 2], None, [1, 2])],
)
def test_end_of_sequence_ids_come_from_the_generation_config_if_it_has_them(
    folder: Path, config: object, generation: object, expected: object
) -> None:
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps({**read_json(folder / name), "eos_token_id": value}))
    assert Checkpoint.open(folder).config["eos_token_id"] == expected
    if generation != 0:  # mlx_lm takes 0 for none
        assert load_config(folder)["eos_token_id"] == expected


def test_a_generation_config_is_not_needed(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert Checkpoint.open(folder).config == read_json(folder / "config.json")


def test_links_as_in_the_cache_of_hugging_face_are_followed(tmp_path: Path, folder: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, file in enumerate(folder.iterdir()):
        (snapshot / file.name).symlink_to(file.rename(tmp_path / f"blob{number}"))
    checkpoint = Checkpoint.open(snapshot)
    mx.eval(checkpoint.reader()("model.norm.weight"))


@pytest.mark.parametrize("weight_map", [None, [], "model.safetensors", {"a": 1}, {"a": ["b"]}])
def test_an_index_without_a_map_is_refused(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with refuses(CheckpointError, folder / "model.safetensors.index.json", "weight_map"):
        Checkpoint.open(folder)


def test_an_empty_folder_and_a_missing_one_lack_a_configuration(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with refuses(CheckpointError, path / "config.json", "missing"):
            Checkpoint.open(path)


def test_a_shard_that_vanishes_after_opening_is_a_fault(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with refuses(Fault, folder, "cannot be loaded"):
        checkpoint.reader()("model.norm.weight")
