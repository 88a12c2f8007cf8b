"""Which part of a model gets how many bits, and how many bytes that takes."""

from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx.checkpoint import Checkpoint
from strata_mlx.checkpoint.precision import (
    AFFINE_BITS,
    AFFINE_GROUP_SIZES,
    DEFAULTS,
    Precision,
    PrecisionPlan,
    parse_part,
    part_of,
)
from strata_mlx.errors import InputError
from strata_mlx.models.plan import plan_model
from tests.errors import may_refuse, refuses
from tests.tiny import make_checkpoint

EVERY_PRECISION = [Precision(bits, group) for bits in AFFINE_BITS for group in AFFINE_GROUP_SIZES] + [
    Precision.make(mode=mode) for mode in DEFAULTS if mode != "affine"
]
EXPERTS = {"experts.down_proj", "experts.gate_proj", "experts.up_proj"}
ATTENTION = {f"attention.{name}_proj" for name in "qkvo"}
SHARED_EXPERT = {"shared_expert.down_proj", "shared_expert.gate_proj", "shared_expert.up_proj"}
PARTS = {
    "qwen3_moe": EXPERTS | ATTENTION | {"embedding", "lm_head", "norms", "router"},
    "qwen3_next": EXPERTS
    | ATTENTION
    | SHARED_EXPERT
    | {"embedding", "lm_head", "norms", "router", "linear_attention", "linear_attention.out_proj"},
}
PARTS["qwen3_5_moe"] = PARTS["qwen3_next"]
MTP_PARTS = EXPERTS | ATTENTION | SHARED_EXPERT | {"router", "norms", "fc"}


@pytest.mark.parametrize("precision", EVERY_PRECISION, ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_the_announced_bytes_are_those_that_mlx_needs(precision: Precision, dtype: mx.Dtype) -> None:
    weight = mx.random.normal((3, 4, 256), key=mx.random.key(0)).astype(dtype)
    made = mx.quantize(weight, precision.group_size, precision.bits, mode=precision.mode)
    assert precision.nbytes(weight.size, dtype.size) == sum(array.nbytes for array in made)


@pytest.mark.parametrize("family", PARTS)
def test_every_parameter_belongs_to_the_part_that_its_name_says(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family, mtp=None if family == "qwen3_moe" else "separate")
    parts = {part_of(name) for name in plan_model(Checkpoint.open(folder)).recipes}
    head = set() if family == "qwen3_moe" else {f"mtp.{part}" for part in MTP_PARTS}
    assert parts == PARTS[family] | head


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("model.layers.3.mlp.switch_mlp.down_proj", "experts.down_proj"),
        ("language_model.model.layers.3.mlp.switch_mlp.down_proj.weight", "experts.down_proj"),
        ("model.layers.3.mlp.gate", "router"),
        ("model.layers.3.mlp.gate_proj", "mlp.gate_proj"),
        ("model.layers.3.mlp.shared_expert_gate", "router"),
        ("model.layers.3.mlp.shared_expert.up_proj", "shared_expert.up_proj"),
        ("model.layers.3.linear_attn.norm.weight", "norms"),
        ("model.layers.3.self_attn.q_norm", "norms"),
        ("model.embed_tokens", "embedding"),
        ("lm_head", "lm_head"),
        ("mtp.fc", "mtp.fc"),
        ("mtp.norm", "mtp.norms"),
        ("mtp.layers.0.mlp.switch_mlp.up_proj", "mtp.experts.up_proj"),
    ],
)
def test_parts_are_named_after_what_they_do(path: str, part: str) -> None:
    assert part_of(path) == part


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "experts=4": ("experts", Precision(4, 64)),
        "experts=4:32": ("experts", Precision(4, 32)),
        "experts.down_proj=5:128": ("experts.down_proj", Precision(5, 128)),
        "linear_attention=none": ("linear_attention", None),
        "mtp=8": ("mtp", Precision(8, 64)),
        "mtp.experts=2:32": ("mtp.experts", Precision(2, 32)),
        "mtp.experts.up_proj=none": ("mtp.experts.up_proj", None),
    }.items(),
)
def test_a_part_is_read_as_it_is_written(text: str, expected: tuple[str, Precision | None]) -> None:
    assert parse_part(text) == expected


def test_a_part_takes_mode_and_group_size_of_the_command() -> None:
    assert parse_part("experts=4", "mxfp4") == ("experts", Precision(4, 32, "mxfp4"))
    assert parse_part("experts=6", group_size=32) == ("experts", Precision(6, 32))
    assert parse_part("experts=6:128", group_size=32) == ("experts", Precision(6, 128))


@pytest.mark.parametrize(
    "text",
    [
        "", "experts", "experts=", "=4", "experts=7", "experts=1", "experts=0", "experts=4:16", "experts=4:0",
        "experts=4:", "experts=4.5", "experts=-4", "experts= 4", "router=8\n", "exprts=4", "norms=8",
        "mtp.exprts=4", "mtp.=4", ".experts=4", "experts=NONE", "experts=4:32:64",
        "experts=" + "9" * 5000,
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with refuses(InputError):
        parse_part(text)


@given(st.text(st.sampled_from("experts.mtp=0123456789:none_\n ٣"), max_size=20))
def test_no_text_makes_reading_a_part_fail_otherwise(text: str) -> None:
    with may_refuse():
        parse_part(text)


def test_the_most_specific_part_decides() -> None:
    one, two, three, four = (Precision(bits, 32) for bits in (2, 3, 4, 5))
    plan = PrecisionPlan(one, {"experts": two, "experts.down_proj": three, "mtp": four, "router": None})
    assert plan.of("model.layers.0.mlp.switch_mlp.up_proj", 64) == two
    assert plan.of("model.layers.0.mlp.switch_mlp.down_proj", 64) == three
    assert plan.of("mtp.layers.0.mlp.switch_mlp.down_proj", 64) == four
    assert plan.of("model.layers.0.mlp.gate", 64) is None
    assert plan.of("lm_head", 64) == one


def test_a_part_of_the_head_follows_the_trunk_unless_told_otherwise() -> None:
    plan = PrecisionPlan(None, {"experts": Precision(4, 32)})
    assert plan.of("mtp.layers.0.mlp.switch_mlp.down_proj", 64) == Precision(4, 32)


@pytest.mark.parametrize(
    ("bits", "group", "mode"), [(7, 64, "affine"), (4, 16, "affine"), (8, 32, "mxfp4"), (4, 64, "x")]
)
def test_precisions_that_mlx_lacks_are_refused(bits: int, group: int, mode: str) -> None:
    with refuses(InputError):
        Precision(bits, group, mode)


def test_groups_that_do_not_divide_say_what_to_do() -> None:
    with refuses(InputError, "groups of 64", "96 inputs of lm_head", "--q-part lm_head=BITS:GROUP_SIZE"):
        PrecisionPlan(Precision(4, 64)).of("lm_head", 96)
