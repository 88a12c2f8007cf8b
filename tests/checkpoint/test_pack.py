"""The packed layout: any reader of safetensors can open it, and it holds the same model."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors import safe_open

from strata_mlx.checkpoint import Checkpoint
from strata_mlx.checkpoint.convert import Conversion, convert
from strata_mlx.checkpoint.pack import PADDING, PAGE, padding
from strata_mlx.checkpoint.precision import DEFAULTS, ROUTER, Precision, PrecisionPlan
from strata_mlx.errors import CheckpointError, InputError
from strata_mlx.loading import load, load_model
from strata_mlx.models.plan import plan_model
from strata_mlx.models.report import describe
from tests.errors import refuses
from tests.tiny import make_checkpoint

Q4 = PrecisionPlan(Precision.make(), {"router": ROUTER})
LAYOUTS = [
    ("qwen3_next", "separate", "separate"), ("qwen3_next", "stacked", "stacked"), ("qwen3_next", "stacked", "separate"),
    ("qwen3_5_moe", "fused", "separate"), ("qwen3_moe", "separate", None), ("glm4_moe", "separate", "separate"),
    ("deepseek_v3", "separate", "stacked"), ("mimo_v2_flash", "separate", "separate"),
]  # fmt: skip


def write(folder: Path, name: str, **options: Any) -> Path:
    job = Conversion(plan_model(Checkpoint.open(folder)), **options)
    return convert(job, folder.with_name(name), progress=False)


def parameters(folder: Path) -> dict[str, mx.array]:
    return dict(tree_flatten(load_model(plan_model(Checkpoint.open(folder)), "float32").parameters()))


def assert_same_model(one: Path, other: Path) -> None:
    a, b = parameters(one), parameters(other)
    assert a.keys() == b.keys()
    assert all(np.array_equal(np.array(a[name]), np.array(b[name])) for name in a)


@pytest.mark.parametrize(("family", "layout", "mtp"), LAYOUTS)
@pytest.mark.parametrize("precision", [None, Q4, PrecisionPlan(Precision.make(mode="mxfp4"))], ids=str)
def test_a_packed_model_is_the_converted_one(
    tmp_path: Path, family: str, layout: str, mtp: str | None, precision: PrecisionPlan | None
) -> None:
    folder = make_checkpoint(tmp_path / "model", family, layout, mtp=mtp, dtype=mx.bfloat16)
    stacked, packed = (write(folder, str(pack), precision=precision, pack=pack) for pack in (False, True))
    assert_same_model(stacked, packed)
    assert_same_model(stacked, write(packed, "unpacked"))
    assert_same_model(stacked, write(packed, "packed again", pack=True))
    assert_same_model(stacked, write(stacked, "packed later", pack=True))


@pytest.mark.parametrize("mode", [None, *DEFAULTS])
def test_every_expert_is_one_record_at_the_start_of_a_page(tmp_path: Path, mode: str | None) -> None:
    folder = make_checkpoint(tmp_path / "model", mtp="separate", dtype=mx.bfloat16)
    precision = PrecisionPlan(Precision.make(mode=mode)) if mode else None
    tensors = Checkpoint.open(write(folder, "packed", precision=precision, pack=True)).tensors
    records: dict[str, list[tuple[int, int]]] = {}
    for name, entry in tensors.items():
        moe, switch, rest = name.partition(".switch_mlp.")
        if switch:
            records.setdefault(f"{moe} {rest.partition('.')[0]}", []).append((entry.start, entry.stop))
            assert entry.start % (entry.nbytes // entry.size) == 0
    assert len(records) == 3 * 8
    for ranges in map(sorted, records.values()):
        assert ranges[0][0] % PAGE == 0
        assert all(one[1] == other[0] for one, other in pairwise(ranges))
    gaps = [entry.nbytes for name, entry in tensors.items() if name.startswith(PADDING)]
    record = sum(stop - start for start, stop in next(iter(records.values())))
    assert gaps == [padding(record)] * 24


def test_other_readers_of_safetensors_open_it(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    weight = parameters(folder)["model.layers.0.mlp.switch_mlp.up_proj.weight"]
    packed = write(folder, "packed", pack=True)
    file = Checkpoint.open(packed).tensors["model.layers.0.mlp.switch_mlp.3.up_proj.weight"].file
    with safe_open(file, "np") as tensors:
        assert np.array_equal(tensors.get_tensor("model.layers.0.mlp.switch_mlp.3.up_proj.weight"), np.array(weight[3]))
        assert tensors.metadata() == {"format": "mlx"}


def test_load_and_inspect_know_it(tmp_path: Path) -> None:
    packed = write(make_checkpoint(tmp_path / "model", mtp="separate"), "packed", pack=True)
    model, _ = load(packed, mtp=True)
    assert model(mx.array([[1, 2, 3]])).shape == (1, 3, 259)
    assert describe(plan_model(Checkpoint.open(packed)), 100)["layout"] == "packed"


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    packed = write(make_checkpoint(tmp_path / "model"), "packed", pack=True)
    for file in packed.glob("*.safetensors"):
        file.write_bytes(file.read_bytes().replace(b"layers.1.mlp.switch_mlp.5.up", b"layers.1.mlp.switch_mlp.9.up"))
    index = packed / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("layers.1.mlp.switch_mlp.5.up", "layers.1.mlp.switch_mlp.9.up"))
    with refuses(CheckpointError, "model.layers.1.mlp.switch_mlp.5.up_proj.weight"):
        plan_model(Checkpoint.open(packed))


def test_a_single_expert_is_not_packed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", layout="stacked", num_experts=1, num_experts_per_tok=1)
    with refuses(InputError, folder, "nothing to pack"):
        write(folder, "packed", pack=True)
