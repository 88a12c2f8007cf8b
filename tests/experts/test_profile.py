"""Profiles of selected experts: what is saved warms the next start, and what is broken is found."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx import load
from strata_mlx.checkpoint import Checkpoint
from strata_mlx.engine import generate_step
from strata_mlx.errors import InputError
from strata_mlx.experts.options import save_profile
from strata_mlx.experts.profile import ExpertProfile, LayerProfile
from strata_mlx.models.plan import plan_model
from tests.errors import may_refuse, refuses
from tests.tiny import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("profile") / "model", "qwen3_next", "stacked", mtp="stacked")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "experts.json"


def run(folder: Path, file: Path, tokens: int = 8, **options: Any) -> Any:
    """Generate with a profile, as the command line does, and return the model."""
    model, _ = load(folder, slots=3, expert_profile=file, **options)
    for _ in generate_step(mx.array([1, 2, 3]), model, max_tokens=tokens):
        pass
    save_profile(model)
    return model


def test_a_run_leaves_what_it_selected_and_what_was_in_memory(folder: Path, file: Path) -> None:
    model = run(folder, file)
    record = json.loads(file.read_text())
    assert set(record["layers"]) == {"0", "1"}
    for name, layer in record["layers"].items():
        table = model.streaming.tables[int(name)]
        assert layer == {"counts": table.counts.tolist(), "resident": table.resident.nonzero()[0].tolist()}
        assert sum(layer["counts"]) >= 2 * 8
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


def test_the_next_start_has_the_hottest_in_memory_and_counts_go_on(folder: Path, file: Path) -> None:
    run(folder, file)
    before = json.loads(file.read_text())["layers"]
    model, _ = load(folder, slots=3, expert_profile=file)
    for name, layer in before.items():
        table, counts = model.streaming.tables[int(name)], layer["counts"]
        resident = table.resident.nonzero()[0]
        assert len(resident) == 3
        assert sorted(counts)[-3:] == sorted(counts[expert] for expert in resident)
    assert model.streaming.traffic().misses == 0
    again = run(folder, file)
    after = json.loads(file.read_text())["layers"]
    for name, layer in after.items():
        added = again.streaming.tables[int(name)].counts
        assert layer["counts"] == (np.array(before[name]["counts"]) + added).tolist()


def test_the_hottest_are_evicted_last(folder: Path, file: Path) -> None:
    run(folder, file)
    model, _ = load(folder, slots=3, expert_profile=file)
    for index, table in model.streaming.tables.items():
        hottest = model.expert_profile.layers[index].hottest()
        residents = table.resident.nonzero()[0].tolist()
        assert table.eviction.victims(residents, 3) == sorted(residents, key=hottest.index, reverse=True)


def test_the_output_is_that_without_a_profile(folder: Path, file: Path) -> None:
    def logprobs(**options: Any) -> list[np.ndarray]:
        model, _ = load(folder, **options)
        return [np.array(values) for _, values in generate_step(mx.array([1, 2, 3]), model, max_tokens=8)]

    run(folder, file)
    for a, b in zip(logprobs(slots=3, expert_profile=file), logprobs(), strict=True):
        assert np.array_equal(a, b)


def test_a_run_without_the_head_keeps_what_is_known_of_it(folder: Path, file: Path) -> None:
    run(folder, file, mtp=True)
    with_head = json.loads(file.read_text())["layers"]
    assert set(with_head) == {"0", "1", "2"}
    run(folder, file)
    assert json.loads(file.read_text())["layers"]["2"] == with_head["2"]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=20).map(
        lambda rows: LayerProfile(np.array([c for c, _ in rows], np.int64), np.array([r for _, r in rows], np.bool_))
    )
)
def test_hottest_first_and_among_equals_those_that_were_in_memory(layer: LayerProfile) -> None:
    order = layer.hottest()
    keys = [(layer.counts[expert], layer.resident[expert]) for expert in order]
    assert keys == sorted(keys, reverse=True)
    left = set(range(layer.counts.size)) - set(order)
    assert not any(layer.counts[expert] or layer.resident[expert] for expert in left)


# Broken, foreign and unwritable files


def record_of(folder: Path, file: Path) -> dict[str, Any]:
    if not file.exists():
        run(folder, file, tokens=1)
    record = json.loads(file.read_text())
    assert isinstance(record, dict)
    return record


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(record: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for name in parents:
            record = record[name]
        record[last] = value

    return apply


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (change("version", 2), "version 2"),
        (change("version", None), "version None"),
        (change("model", None), "another model"),
        (change("model/config", "0" * 64), "another model"),
        (change("layers", []), "not an expert profile"),
        (change("layers/x", {}), "no layer 'x'"),
        (change("layers/-1", {}), "no layer '-1'"),
        (change("layers/0", 7), "layer 0"),
        (change("layers/0/counts", [1, 2]), "layer 0"),
        (change("layers/1/counts", [-1] * 8), "layer 1"),
        (change("layers/1/counts", [1.5] * 8), "layer 1"),
        (change("layers/1/counts", [True] * 8), "layer 1"),
        (change("layers/1/counts", [10**30] * 8), "layer 1"),
        (change("layers/1/resident", [8]), "layer 1"),
        (change("layers/1/resident", "all"), "layer 1"),
    ],
)
def test_a_broken_or_foreign_file_is_named_before_weights_are_read(
    folder: Path, file: Path, broken: Callable[[dict[str, Any]], None], says: str
) -> None:
    record = record_of(folder, file)
    broken(record)
    file.write_text(json.dumps(record))
    with refuses(InputError, "--expert-profile", file, says):
        load(folder, slots=3, expert_profile=file)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100000])
def test_what_is_no_profile_is_refused(folder: Path, file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with refuses(InputError, "--expert-profile", file):
        load(folder, slots=3, expert_profile=file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    tmp = tmp_path_factory.getbasetemp()
    folder, file = tmp / "any", tmp / "any.json"
    if not folder.exists():
        make_checkpoint(folder)
    plan = plan_model(Checkpoint.open(folder), mtp=False)
    model = ExpertProfile.open(tmp / "none.json", plan)._model
    file.write_text(json.dumps({"version": 1, "model": model, "layers": value}))
    with may_refuse(file):
        ExpertProfile.open(file, plan)


def test_a_file_that_could_not_be_written_in_the_end_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    with refuses(InputError, tmp_path, "folder"):
        load(folder, slots=3, expert_profile=tmp_path)
    with refuses(InputError, tmp_path / "no", "does not exist"):
        load(folder, slots=3, expert_profile=tmp_path / "no" / "file.json")


def test_a_folder_that_cannot_be_written_to_is_refused(
    folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with refuses(InputError, file, "nothing can be written"):
        load(folder, slots=3, expert_profile=file)


@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_full_disk_costs_the_profile_and_nothing_else(
    folder: Path, file: Path, step: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = record_of(folder, file)
    capfd.readouterr()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr({"write": "pathlib.Path.write_bytes", "rename": "os.replace"}[step], full)
    run(folder, file)
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("warning: ")
    assert str(file) in err
    assert json.loads(file.read_text()) == before
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


# Pinned experts


def test_pinned_experts_are_in_memory_from_the_start_and_stay(folder: Path, tmp_path: Path) -> None:
    pins = tmp_path / "pins.json"
    pins.write_text('{"0": [5], "1": [6, 1]}')
    model, _ = load(folder, slots=4, pinned=pins)
    for token in range(40):
        for _ in generate_step(mx.array([token, 2, 3]), model, max_tokens=2):
            assert model.streaming.tables[0].resident[5]
            assert model.streaming.tables[1].resident[[6, 1]].all()
    assert model.streaming.least == 4
    model, _ = load(folder, slots=7, pinned=pins)
    model.streaming.shrink(model.streaming.least)
    assert model.streaming.tables[1].resident[[6, 1]].all()


def test_pinned_experts_must_leave_room_for_a_token(folder: Path, tmp_path: Path) -> None:
    pins = tmp_path / "pins.json"
    pins.write_text('{"1": [1, 6]}')
    with refuses(InputError, "layer 1", "3 slots", "2 pinned", "pin at most 1"):
        load(folder, slots=3, pinned=pins)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"2": [1]}', '{"0": [8]}', '{"0": 3}', '{"0": [1.5]}'], ids=lambda text: text or "nothing"
)
def test_a_broken_pin_file_is_named(folder: Path, tmp_path: Path, content: str) -> None:
    pins = tmp_path / "pins.json"
    pins.write_text(content)
    with refuses(InputError, "--pin", pins):
        load(folder, slots=4, pinned=pins)
