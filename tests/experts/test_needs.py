"""What is reckoned from a checkpoint's headers, against what loading makes of it."""

from mmap import mmap
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from strata_mlx import device, load
from strata_mlx.checkpoint import Checkpoint
from strata_mlx.device import on_cpu
from strata_mlx.errors import InputError
from strata_mlx.experts import needs, system
from strata_mlx.experts.needs import needs_of
from strata_mlx.models.plan import ModelPlan, plan_model
from tests.errors import refuses
from tests.tiny import make_checkpoint


def plan_of(folder: Path, mtp: bool = True) -> ModelPlan:
    return plan_model(Checkpoint.open(folder), mtp=mtp)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("budget") / "model", mtp="separate", dtype=mx.bfloat16)


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3_next", "separate"), ("qwen3_5_moe", "fused"), ("qwen3_moe", "stacked")]
)
def test_the_weights_are_those_that_loading_makes(tmp_path: Path, family: str, layout: str) -> None:
    path = make_checkpoint(tmp_path / "model", family, layout, mtp=None if family == "qwen3_moe" else layout)
    demand = needs_of(plan_of(path))
    arrays = dict(tree_flatten(load(path, mtp=family != "qwen3_moe")[0].parameters()))
    experts = sum(array.nbytes for name, array in arrays.items() if ".switch_mlp." in name)
    head = sum(array.nbytes for name, array in arrays.items() if name.startswith("mtp.") and ".switch_mlp." not in name)
    assert demand.per_slot * demand.experts == experts
    assert demand.fixed["mtp_head"] == head
    assert demand.fixed["weights"] == sum(array.nbytes for array in arrays.values()) - experts - head
    assert (demand.experts, demand.least) == (8, 2)
    assert demand.layers == (2 if family == "qwen3_moe" else 3)


@pytest.mark.skipif(not on_cpu(), reason="the compute type is chosen for the CPU")
def test_the_type_that_is_computed_in_counts(folder: Path) -> None:
    single = needs_of(plan_of(folder), "float32")
    half = needs_of(plan_of(folder), "bfloat16")
    assert single.per_slot == 2 * half.per_slot
    assert single.fixed["kv_cache"] == 2 * half.fixed["kv_cache"]


def test_caches_grow_with_the_context_and_the_head_adds_its_own(folder: Path) -> None:
    short, long = needs_of(plan_of(folder), context=256), needs_of(plan_of(folder), context=25600)
    assert long.fixed["kv_cache"] > 40 * short.fixed["kv_cache"]
    assert long.fixed["recurrent_state"] == short.fixed["recurrent_state"] > 0
    without = needs_of(plan_of(folder, mtp=False), context=256)
    assert without.fixed["kv_cache"] < short.fixed["kv_cache"]
    assert without.per_slot < short.per_slot


def test_sequences_have_caches_of_their_own_and_what_is_kept_comes_on_top(folder: Path) -> None:
    one, four = needs_of(plan_of(folder), context=256), needs_of(plan_of(folder), context=256, sequences=4)
    for part in ("kv_cache", "recurrent_state"):
        assert four.fixed[part] == 4 * one.fixed[part] > 0
    assert four.fixed["prefixes"] == one.fixed["prefixes"] == 0
    assert needs_of(plan_of(folder), context=256, sequences=100).window > four.window >= one.window
    kept = needs_of(plan_of(folder), context=256, prefixes=10**6)
    assert kept.fixed["prefixes"] > 10**6
    with refuses(InputError, "too small", "fewer or shorter contexts need less", "prefixes"):
        needs_of(plan_of(folder), sequences=4, prefixes=10**6).fit(10**6)


@pytest.mark.skipif(not on_cpu(), reason="on a GPU the budget is about its memory")
def test_the_process_counts_as_it_is(folder: Path) -> None:
    before = needs_of(plan_of(folder)).fixed["process"]
    with mmap(-1, 50_000_000) as ballast:  # the allocator could give memory that the process has had before
        ballast.write(b"x" * len(ballast))
        assert needs_of(plan_of(folder)).fixed["process"] >= before + 0.9 * len(ballast)


def test_a_refusal_is_one_line_that_says_where_the_memory_goes(folder: Path) -> None:
    with refuses(InputError, "1 MB", "too small", "smallest that works", "weights", "kv cache", "2 slots a layer"):
        needs_of(plan_of(folder)).fit(10**6)


def test_on_a_gpu_of_its_own_the_budget_is_about_that(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu_or_metal = needs_of(plan_of(folder))
    assert on_cpu_or_metal.fixed["staging"] == 0
    monkeypatch.setattr(system, "on_gpu_of_its_own", lambda: True)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 200)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 100)
    demand = needs_of(plan_of(folder))
    assert (demand.scope, demand.fixed["process"]) == ("GPU memory", 300)
    assert demand.per_slot == on_cpu_or_metal.per_slot
    experts = demand.per_slot // demand.layers
    assert 32 * experts < demand.fixed["staging"] < 33 * experts + 32 * 4096


def test_where_types_are_kept_a_budget_is_reckoned_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which keeps the checkpoint's types."""
    for module in (device, needs):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    assert device.compute_dtype() is None
    demand = needs_of(plan_of(folder))
    assert not demand.float32
    assert demand.fit(demand.resident).slots == demand.experts
