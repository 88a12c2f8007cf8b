"""Weights that are kept as float32 have the bits of the quantised ones, and only what has room is kept like that."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from strata_mlx import load
from strata_mlx.checkpoint import Checkpoint
from strata_mlx.experts.budget import Needs
from strata_mlx.experts.needs import needs_of
from strata_mlx.hub import EMBEDDED
from strata_mlx.models import dequantised
from strata_mlx.models.dequantised import room_for
from strata_mlx.models.plan import plan_model
from strata_mlx.models.report import describe
from strata_mlx.models.trunk import Trunk
from strata_mlx.prefill import make_cache
from tests.budgets import CONTEXT, count_a_small_process

KINDS = (nn.QuantizedLinear, QuantizedSwitchLinear)


def quantised_modules(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, KINDS)]


def embedded(monkeypatch: pytest.MonkeyPatch, limit: int, **options: Any) -> nn.Module:
    monkeypatch.setattr(dequantised, "LIMIT", limit)
    return load(mtp=True, **options)[0]


def outputs(model: nn.Module) -> list[np.ndarray[Any, Any]]:
    """Of a prompt, of windows and of the MTP head, and what the caches then hold."""
    trunk, cache, head = Trunk(model), make_cache(model), model.mtp.layers
    tokens, start, results = mx.array(np.random.default_rng(0).integers(0, 8192, (1, 48))), 0, []
    for rows in (24, 1, 2, 4, 1, 8):
        window = tokens[:, start : start + rows]
        hidden = trunk(window, cache)
        drafted = model.mtp(trunk.embed(window), hidden.after, [None] * len(head))
        results += [trunk.logits(hidden.after), trunk.logits(drafted)]
        start += rows
    return [np.array(each) for each in (*results, *(x for _, x in tree_flatten([layer.state for layer in cache])))]


def test_the_embedded_model_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = dequantised.LIMIT
    packed, unpacked = embedded(monkeypatch, 0), embedded(monkeypatch, limit)
    assert len(quantised_modules(packed)) > 90
    assert not quantised_modules(unpacked)
    for one, other in zip(outputs(packed), outputs(unpacked), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["linear", "experts"])
@given(
    bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
    group_size=st.sampled_from([32, 64, 128]),
    groups=st.integers(1, 4),
    outputs=st.integers(1, 80),
    rows=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_product_has_the_same_bits(
    kind: str, bits: int, group_size: int, groups: int, outputs: int, rows: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    inputs = groups * group_size
    x = mx.array(random.standard_normal((rows, inputs)), mx.float32)
    parent, ids = nn.Module(), mx.array(random.integers(0, 3, rows))
    if kind == "linear":
        parent.child = nn.QuantizedLinear(inputs, outputs, False, group_size, bits)
        arguments: tuple[mx.array, ...] = (x,)
    else:
        parent.child = QuantizedSwitchLinear(inputs, outputs, 3, False, group_size, bits)
        arguments = (x[:, None], ids)
    expected = parent.child(*arguments)
    dequantised.dequantise(parent)
    assert isinstance(parent.child, nn.Linear if kind == "linear" else SwitchLinear)
    assert mx.array_equal(parent.child(*arguments), expected)


def test_experts_stay_quantised_where_they_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = embedded(monkeypatch, 32 << 20)
    left = quantised_modules(model)
    assert len(left) == 27
    assert all(".switch_mlp." in path for path in left)


def test_streamed_experts_stay_quantised_and_the_rest_does_not() -> None:
    model = load(mtp=True, slots=127)[0]
    assert not quantised_modules(model)
    assert not [path for path, module in model.named_modules() if isinstance(module, SwitchLinear)]


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> Needs:
    count_a_small_process(monkeypatch)
    monkeypatch.setattr(mx, "set_cache_limit", lambda limit: limit)
    return needs_of(plan_model(Checkpoint.open(EMBEDDED)), context=CONTEXT)


def grown(model: nn.Module, plain: nn.Module) -> int:
    """The bytes that the parameters of ``model`` take on top of those of ``plain``."""
    size, before = (sum(x.nbytes for _, x in tree_flatten(each.parameters())) for each in (model, plain))
    return size - before


def test_a_budget_has_as_many_as_it_has_room_for(needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = dequantised.LIMIT
    plain = {slots: embedded(monkeypatch, 0, slots=slots) for slots in (64, None)}
    monkeypatch.setattr(dequantised, "LIMIT", limit)
    dense, both = room_for(needs.float32, 0), room_for(needs.float32 + needs.float32_experts, 0)
    seen = []
    for budget in (needs.smallest, *(needs.resident + more for more in (-1, 0, dense, both))):
        model = load(mtp=True, memory=budget, context=CONTEXT)[0]
        room = model.fit.parts["float32"]
        more = grown(model, plain[64 if model.fit.streams else None])
        assert more <= room
        seen.append((room, more, len(quantised_modules(model))))
    assert seen[0][:2] == seen[2][:2] == (0, 0)
    assert seen[1][1] > 0  # while experts are streamed
    assert 0 < seen[3][2] <= 27  # of experts
    assert seen[4][2] == 0


@pytest.mark.parametrize("free", [0, 1 << 20, 16 << 20])
@pytest.mark.parametrize("room", [0, 1 << 20, 8 << 20, 20 << 20])
def test_what_has_no_room_is_left_out(room: int, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = dequantised.LIMIT
    model = embedded(monkeypatch, 0)
    monkeypatch.setattr(dequantised, "LIMIT", limit)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    dequantised.dequantise(model, room, free)
    assert mx.get_active_memory() - before <= room + 16_384  # MLX counts whole pages
    assert mx.get_peak_memory() - before <= room + free + 17_384  # for some scalars
    assert mx.get_active_memory() - before >= room * (free > 8 << 20) - (1 << 20)


def test_a_machine_that_rounds_otherwise_keeps_all_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantised, "_same_bits", lambda *_: False)
    assert len(quantised_modules(load(mtp=True)[0])) > 90


def test_a_bias_or_another_type_keeps_a_layer_quantised() -> None:
    parent = nn.Module()
    parent.biased = nn.QuantizedLinear(64, 8, bias=True)
    parent.half = nn.QuantizedLinear(64, 8, bias=False)
    parent.half.scales = parent.half.scales.astype(mx.float16)
    parent.bytes = nn.QuantizedLinear(64, 8, bias=False, group_size=32, bits=4, mode="mxfp4")
    assert not dequantised.dequantised_bytes(parent)
    dequantised.dequantise(parent)
    assert len(quantised_modules(parent)) == 3


def test_the_report_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_model(Checkpoint.open(EMBEDDED))
    memory = describe(plan, 256)["memory_bytes"]
    unpacked = sum(array.nbytes for _, array in tree_flatten(load(mtp=True)[0].parameters()))
    assert memory["weights"] + memory["mtp_head"] + memory["dequantised"] == unpacked
    monkeypatch.setattr(dequantised, "LIMIT", 0)
    assert "dequantised" not in describe(plan, 256)["memory_bytes"]


def test_nothing_changes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantised, "on_cpu", lambda: False)
    assert len(quantised_modules(load(mtp=True)[0])) > 90
