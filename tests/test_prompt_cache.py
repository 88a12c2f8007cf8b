"""Files that hold the state after a prompt: ours, mlx_lm's, and files that are something else."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import cache as reference

from strata_mlx import Fault, InputError, load
from strata_mlx.engine import generate_step
from strata_mlx.prefill import make_cache, prefill
from strata_mlx.prompt_cache import check_fits, load_prompt_cache, save_prompt_cache
from tests.tiny import FAMILIES, TINY, make_checkpoint

PROMPT = mx.array([72, 3, 200, 3, 15, 99, 0, 31, 72, 3, 120, 41])
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bounded": {"max_kv_size": 6},
    "quantised": {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    root = tmp_path_factory.mktemp("models")
    return {family: load(make_checkpoint(root / family, family, "stacked"))[0] for family in FAMILIES}


def make(model: nn.Module, max_kv_size: int | None = None, **options: Any) -> list[Any]:
    cache = make_cache(model, max_kv_size)
    prefill(PROMPT, model, cache, **options)
    return cache


def continuation(model: nn.Module, cache: list[Any]) -> list[int]:
    return [token for token, _ in generate_step(mx.array([7, 8, 9]), model, max_tokens=10, prompt_cache=cache)]


@pytest.mark.parametrize(
    ("family", "kind"), [(f, kind) for f in FAMILIES for kind in KINDS if kind != "quantised" or TINY[f].quantises]
)
def test_a_checked_cache_from_a_file_goes_on_like_the_one_in_memory(
    models: dict[str, nn.Module], family: str, kind: str, tmp_path: Path
) -> None:
    model, file = models[family], tmp_path / "p.safetensors"
    expected = continuation(model, make(model, **KINDS[kind]))
    save_prompt_cache(file, make(model, **KINDS[kind]), "a/model")
    cache, name = load_prompt_cache(file, None)
    check_fits(file, cache, model, make_cache(model))
    assert name == "a/model"
    assert continuation(model, cache) == expected


def test_mlx_lm_reads_what_we_write_and_we_read_what_it_writes(models: dict[str, nn.Module], tmp_path: Path) -> None:
    model = models["qwen3_next"]
    expected = continuation(model, make(model))
    save_prompt_cache(tmp_path / "ours.safetensors", make(model), "a/model")
    cache, metadata = reference.load_prompt_cache(str(tmp_path / "ours.safetensors"), return_metadata=True)
    assert metadata["model"] == "a/model"
    assert json.loads(metadata["tokenizer_config"]) == {}
    assert continuation(model, cache) == expected
    reference.save_prompt_cache(str(tmp_path / "theirs.safetensors"), make(model), {"model": "a/model"})
    cache, name = load_prompt_cache(tmp_path / "theirs.safetensors", "a/model")
    assert name == "a/model"
    assert continuation(model, cache) == expected


def test_a_cache_that_names_no_model_needs_one(models: dict[str, nn.Module], tmp_path: Path) -> None:
    file = tmp_path / "p.safetensors"
    reference.save_prompt_cache(str(file), make(models["qwen3_moe"]))
    assert load_prompt_cache(file, "a/model")[1] == "a/model"
    with pytest.raises(InputError, match="name the model"):
        load_prompt_cache(file, None)


def test_a_cache_of_the_embedded_model_is_used_with_it(models: dict[str, nn.Module], tmp_path: Path) -> None:
    file = tmp_path / "p.safetensors"
    save_prompt_cache(file, make(models["qwen3_moe"]), None)
    assert load_prompt_cache(file, None)[1] is None
    with pytest.raises(InputError, match="'embedded', not 'a/model'"):
        load_prompt_cache(file, "a/model")


def test_a_cache_of_another_model_is_refused_by_name_and_by_shape(models: dict[str, nn.Module], tmp_path: Path) -> None:
    file = tmp_path / "p.safetensors"
    other, _ = load(make_checkpoint(tmp_path / "m", "qwen3_next", "stacked", head_dim=64))
    deeper, _ = load(make_checkpoint(tmp_path / "d", "qwen3_next", "stacked", num_hidden_layers=4))
    wider, _ = load(make_checkpoint(tmp_path / "w", "qwen3_next", "stacked", linear_num_value_heads=4))
    save_prompt_cache(file, make(models["qwen3_next"]), "a/model")
    with pytest.raises(InputError, match="'a/model', not 'another/model'"):
        load_prompt_cache(file, "another/model")
    for model in (models["qwen3_moe"], other, deeper, wider):
        cache, _ = load_prompt_cache(file, "a/model")
        with pytest.raises(InputError, match="does not fit the model"):
            check_fits(file, cache, model, make_cache(model))


@pytest.mark.parametrize("name", ["p", "p.bin", "nowhere/p.safetensors", "folder.safetensors", ""])
def test_a_path_that_cannot_be_written_or_read_again_is_refused(
    models: dict[str, nn.Module], name: str, tmp_path: Path
) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(InputError):
        save_prompt_cache(tmp_path / name, make(models["qwen3_moe"]), None)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.safetensors"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    models: dict[str, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, save = tmp_path / "p.safetensors", mx.save_safetensors
    file.write_text("old")

    def cut_short(name: str, *args: Any) -> None:
        save(name, *args)
        with open(name, "r+b") as unfinished:
            unfinished.truncate(1000)

    monkeypatch.setattr(mx, "save_safetensors", cut_short)
    with pytest.raises(Fault, match="cannot be written"):
        save_prompt_cache(file, make(models["qwen3_moe"]), None)
    assert [path.name for path in tmp_path.iterdir()] == ["p.safetensors"]
    assert file.read_text() == "old"


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 64], ids=["empty", "short", "nothing in it", "noise"]
)
def test_a_file_that_is_no_prompt_cache_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"p\.safetensors"):
        load_prompt_cache(tmp_path / "p.safetensors", None)


@pytest.mark.parametrize(
    "metadata",
    [{}, {"format": "mlx"}, {"0.model": "m", "1.0": "make_prompt_cache", "2.0": ""}, {"0.model": "m", "1.0": "No"}],
    ids=lambda metadata: ",".join(metadata.values()) or "none",
)
def test_tensors_that_are_no_prompt_cache_are_refused(metadata: dict[str, str], tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "p.safetensors"), {"a": mx.zeros(3)}, metadata)
    with pytest.raises(InputError, match="not a prompt cache"):
        load_prompt_cache(tmp_path / "p.safetensors", None)
