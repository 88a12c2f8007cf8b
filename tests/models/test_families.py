"""Every family in every layout computes what mlx_lm and, for the MTP head, a float64 forward pass compute."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model as mlx_lm_load

from strata_mlx.checkpoint import Checkpoint
from strata_mlx.checkpoint.convert import Conversion, convert
from strata_mlx.checkpoint.precision import ROUTER, Precision, PrecisionPlan
from strata_mlx.errors import CheckpointError
from strata_mlx.loading import load_model
from strata_mlx.models.plan import plan_model
from tests.errors import refuses
from tests.reference import Weights, mtp_head
from tests.tiny import FAMILIES, TINY, WITH_HEAD, make_checkpoint, read, save_shards

TOKENS = mx.array([[1, 2, 3, 200, 7, 8, 9, 250, 0, 17], [5, 5, 5, 100, 0, 1, 2, 3, 4, 258]])
LAYOUTS = [(family, layout) for family, tiny in TINY.items() for layout in tiny.layouts]
# mlx_lm reads no separate experts of Qwen3.5, and takes DeepSeek's MTP layer for one of the trunk's: see below.
READ_BY_MLX_LM = [pair for pair in LAYOUTS if pair not in (("qwen3_5_moe", "separate"), ("deepseek_v3", "separate"))]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"shards": 1, "norm_topk_prob": False},
    {"tie_word_embeddings": True},
    {"num_hidden_layers": 4, "num_experts_per_tok": 4},
]


def ours(folder: Path, mtp: bool = True) -> nn.Module:
    return load_model(plan_model(Checkpoint.open(folder), mtp), "float32")


def logits(model: nn.Module) -> np.ndarray[Any, Any]:
    return np.array(model(TOKENS))


def close(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return bool(np.abs(a - b).max() <= 1e-5 and np.abs(b).max() > 0.1)


def same(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """To the last bit."""
    return bool(np.array_equal(a, b) and np.abs(b).max() > 0.1)


def head_of(family: str) -> str | None:
    return "separate" if TINY[family].heads else None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("family", "layout"), READ_BY_MLX_LM)
def test_logits_are_those_of_mlx_lm(tmp_path: Path, family: str, layout: str, options: dict[str, Any]) -> None:
    if options.get("tie_word_embeddings") and not TINY[family].ties:
        folder = make_checkpoint(tmp_path / "model", family, layout, **options)
        with refuses(CheckpointError, folder / "config.json", "tie_word_embeddings"):
            ours(folder)
        return
    folder = make_checkpoint(tmp_path / "model", family, layout, mtp=head_of(family), **options)
    assert same(logits(ours(folder)), logits(mlx_lm_load(folder)[0]))


def test_logits_of_deepseek_are_those_of_mlx_lm_without_the_mtp_layer(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "deepseek_v3")
    assert same(logits(ours(folder)), logits(mlx_lm_load(folder)[0]))


@pytest.mark.parametrize("family", ["qwen3_next", "glm4_moe"])
def test_biases_keep_the_bits_of_mlx_lm(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family, attention_bias=True)
    assert same(logits(ours(folder)), logits(mlx_lm_load(folder)[0]))


@pytest.mark.parametrize(("family", "layout"), [pair for pair in LAYOUTS if TINY[pair[0]].dense])
def test_layers_without_experts_are_those_of_mlx_lm(tmp_path: Path, family: str, layout: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family, layout, num_hidden_layers=4, **(TINY[family].dense or {}))
    model = ours(folder)
    assert any("switch_mlp" not in layer.mlp for layer in model.layers)
    assert same(logits(model), logits(mlx_lm_load(folder)[0]))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_the_layout_of_a_checkpoint_does_not_change_a_logit(
    tmp_path: Path, family: str, layout: str, dtype: mx.Dtype
) -> None:
    folder = make_checkpoint(tmp_path / "model", family, layout, mtp=head_of(family), dtype=dtype)
    stacked = make_checkpoint(tmp_path / "stacked", family, "stacked", dtype=dtype)
    assert np.array_equal(logits(ours(folder)), logits(ours(stacked)))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_weights_give_other_logits(tmp_path: Path, family: str) -> None:
    one, two = (make_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in (1, 2))
    assert not close(logits(ours(one)), logits(ours(two)))


@pytest.mark.parametrize("family", [family for family in FAMILIES if TINY[family].ties])
def test_an_output_head_that_is_stored_although_it_is_tied_is_not_used(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family, shards=1, tie_word_embeddings=True)
    expected, file = logits(ours(folder)), folder / "model.safetensors"
    tensors = read(file) | {"lm_head.weight": mx.zeros((259, 64))}
    file.unlink()
    save_shards(folder, tensors, shards=1)
    assert np.array_equal(logits(ours(folder)), expected)


def test_text_models_without_the_vision_prefix_load(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_5_moe", "fused", shards=1)
    tensors = read(folder / "model.safetensors")
    bare = make_checkpoint(tmp_path / "bare", "qwen3_5_moe", "fused", shards=1)
    renamed = {name.replace("model.language_model.", "model."): array for name, array in tensors.items()}
    (bare / "model.safetensors").unlink()
    save_shards(bare, {name: array for name, array in renamed.items() if "visual" not in name}, shards=1)
    assert np.array_equal(logits(ours(folder)), logits(ours(bare)))


@pytest.mark.parametrize("layout", ["separate", "fused", "stacked"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
@pytest.mark.parametrize("head", ["separate", "fused", "stacked"])
def test_the_mtp_head_is_that_of_a_float64_forward_pass(tmp_path: Path, family: str, layout: str, head: str) -> None:
    if family == "qwen3_next" and layout == "fused":
        layout = "separate"  # its trunks are never fused
    folder = make_checkpoint(tmp_path / "model", family, layout, mtp=head)
    model, rng = ours(folder), np.random.default_rng(3)
    embedding, hidden = rng.standard_normal((2, 2, 7, 64), dtype=np.float32)
    expected = mtp_head(Weights.of_tiny(family), embedding, hidden)
    assert close(np.array(model.mtp(mx.array(embedding), mx.array(hidden))), expected)


def test_the_head_is_left_out_when_it_is_not_wanted(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", mtp="separate")
    assert "mtp" not in ours(folder, mtp=False)
    assert np.array_equal(logits(ours(folder, mtp=False)), logits(ours(folder)))


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_mlx_lm_computes_the_same_from_what_convert_writes(
    tmp_path: Path, family: str, layout: str, bits: int | None
) -> None:
    folder = make_checkpoint(tmp_path / "model", family, layout, mtp=head_of(family))
    precision = PrecisionPlan(Precision(bits, 32), {"router": ROUTER}) if bits else None
    target = convert(Conversion(plan_model(Checkpoint.open(folder)), precision), tmp_path / "converted", False)
    theirs, _ = mlx_lm_load(target, strict=True)
    assert close(logits(ours(target)), logits(theirs))
    assert bits or np.array_equal(logits(ours(target)), logits(ours(folder)))
    assert ("mtp" in ours(target)) is ("mtp" in ours(folder))


@pytest.mark.parametrize("family", WITH_HEAD)
def test_the_converted_head_is_the_same_head(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family, mtp="separate")
    target = convert(Conversion(plan_model(Checkpoint.open(folder))), tmp_path / "converted", progress=False)
    inputs = mx.random.normal((2, 1, 5, 64), key=mx.random.key(0))
    before, after = ours(folder).mtp(*inputs), ours(target).mtp(*inputs)
    assert np.array_equal(np.array(before), np.array(after))
