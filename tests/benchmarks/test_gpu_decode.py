"""benchmarks/gpu_decode.py, in small on the CPU: what it measures and how it counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from benchmarks import gpu_decode
from benchmarks.gpu_decode import Side
from benchmarks.make_synthetic import SHAPES
from strata_mlx import load
from strata_mlx.prefill import make_cache
from tests.tiny import make_checkpoint, text_config

SMALL = (
    *("--pairs", "1", "--tokens", "4", "--steps", "2", "--prefill", "8", "20", "--chunk", "16"),
    *("--layers", "2", "--bandwidth", "1e9"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "tiny", layout="stacked")


def test_everything_is_measured_of_every_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = text_config("qwen3_next") | {"moe_intermediate_size": 64, "hidden_size": 128}
    monkeypatch.setitem(SHAPES, "qwen3-next-80b", config)
    options = ["--json", "--model", str(folder), "--synthetic", "qwen3-next-80b", *SMALL]
    monkeypatch.setattr(sys, "argv", [gpu_decode.__file__, *options])
    gpu_decode.main()
    result = json.loads(capsys.readouterr().out)
    assert [model["model"] for model in result["models"]] == ["tiny", "qwen3-next-80b, 2 layers"]
    assert result["floors"]["bandwidth"] == 1e9
    for model in result["models"]:
        assert model["decode"]["speedup"] > 0
        assert [prompt["tokens"] for prompt in model["prefill"]] == [8, 20]
        first = model["first_token"]
        assert 0 < first["after_load_s"] < first["process_s"]
        assert first["warmup"]["device"] == "cpu"
        for step in model["steps"]:
            assert step["launches"] > 0
            assert step["read_floor_us"] == pytest.approx(step["bytes"] / 1e3)
            assert step["step_us"] == pytest.approx(step["build_us"] + step["encode_us"] + step["wait_us"])


class Counted(nn.Module):
    """Logits of four operations, and views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.ones(5)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:  # noqa: ARG002
        x = tokens.astype(mx.float32)[..., None] * self.weight
        return mx.exp(mx.sin(x)).reshape(1, 1, -1, 5)[:, 0]


def test_launches_are_operations_that_are_no_views() -> None:
    side = Side(Counted(), lambda _: [])
    assert gpu_decode.launches(side, mx.array([3])) == 5  # the four, and what finds the likeliest token


def test_a_token_reads_its_experts_and_one_row_of_the_embedding(folder: Path) -> None:
    model, _ = load(folder)
    read = gpu_decode.bytes_per_token(Side(model, make_cache), mx.arange(4))
    weights = 0
    for name, array in tree_flatten(model.parameters()):
        share = 2 / 8 if ".switch_mlp." in name else 1 / 259 if ".embed_tokens." in name else 1
        weights += round(array.nbytes * share)
    recurrent = 2 * 32 * 32 * 4 + 3 * (2 * 32 + 2 * 32) * 4
    keys_and_values = 2 * 4 * 32 * 4
    assert read == weights + 2 * recurrent + keys_and_values
