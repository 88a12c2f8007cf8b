"""Slots in memory: what is written is what computes, and nothing that still computes is written over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU

from strata_mlx.experts.files import PAGE
from strata_mlx.experts.ranges import Field
from strata_mlx.experts.slots import Readers, SlotPool, UnifiedSlots
from strata_mlx.experts.staged import Staging, make_slots
from tests.experts.staged import STAGED

EXPERTS, SLOTS, WIDTH = 6, 3, 64
KINDS = (UnifiedSlots, *STAGED)
PRECISIONS = ("float32", "4 bits", "4 bits, bfloat16", "mxfp4")


def resident(precision: str, seed: int = 0) -> nn.Module:
    """All experts in memory."""
    mx.random.seed(seed)
    experts = SwitchGLU(WIDTH, 64, EXPERTS)
    if precision != "float32":
        mode = {"mode": "mxfp4", "group_size": 32} if precision == "mxfp4" else {"group_size": 32}
        nn.quantize(experts, bits=4, **mode)
    if "bfloat16" in precision:
        experts.set_dtype(mx.bfloat16)
    mx.eval(experts.parameters())
    return experts


def fields_of(experts: nn.Module) -> list[Field]:
    flat = tree_flatten(experts.parameters())
    return [Field(name, array.shape[1:], array.dtype, array[0].nbytes) for name, array in flat]


def host(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def put(pool: SlotPool, experts: nn.Module, pairs: Sequence[tuple[int, int]]) -> None:
    """Bring experts into slots, pairs of (expert, slot)."""
    parameters = [array for _, array in tree_flatten(experts.parameters())]
    for (expert, _), targets in zip(pairs, pool.write([slot for _, slot in pairs]), strict=True):
        for target, array in zip(targets, parameters, strict=True):
            target[...] = host(array[expert])
    pool.land()


def window(tokens: int = 4, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal((1, tokens, WIDTH), key=mx.random.key(tokens)).astype(dtype)


def slots(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_slots_compute_what_resident_ones_do(kind: Callable[..., SlotPool], precision: str) -> None:
    whole = resident(precision)
    x = window(dtype=mx.bfloat16 if "bfloat16" in precision else mx.float32)
    pool = kind(resident(precision, seed=1), fields_of(whole), SLOTS)
    put(pool, whole, [(4, 0), (1, 1)])
    put(pool, whole, [(5, 2)])
    ids = np.array([[[4, 1], [5, 4], [1, 5], [4, 5]]])
    where = np.vectorize({4: 0, 1: 1, 5: 2}.get)(ids).astype(np.int32)
    assert mx.array_equal(pool(x, where), whole(x, mx.array(ids)))
    put(pool, whole, [(0, 1)])
    where[ids == 1] = 1
    assert mx.array_equal(pool(x, where), whole(x, mx.array(np.where(ids == 1, 0, ids))))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_dealt_out_where_a_pool_says_so(kind: Callable[..., SlotPool]) -> None:
    """Pairs of a window that is long enough to be sorted, and of one that is not, and pairs one by one."""
    for precision in ("float32", "4 bits"):
        whole = resident(precision)
        pool = kind(resident(precision), fields_of(whole), EXPERTS)
        assert not pool.pads
        put(pool, whole, [(expert, expert) for expert in range(EXPERTS)])
        x = window(48)
        ids = np.array([[np.random.default_rng(i).permutation(EXPERTS)[:2] for i in range(48)]])
        expected = whole(x, mx.array(ids))
        for i in range(48):
            one = x[:, i : i + 1]
            assert mx.array_equal(pool(one, ids[:, i : i + 1].astype(np.int32)), expected[:, i : i + 1])
            alone = pool(x[0, i : i + 1], ids[0, i : i + 1, 1:].astype(np.int32))
            assert mx.array_equal(alone, expected[0, i : i + 1, 1:])


def overwritten_before_read(kind: Callable[..., SlotPool], use: Callable[[SlotPool, mx.array], mx.array]) -> bool:
    """Whether a result that waits to be computed sees what is written to its slot later."""
    whole = resident("4 bits")
    pool = kind(resident("4 bits"), fields_of(whole), SLOTS)
    put(pool, whole, [(0, 0), (1, 1), (2, 2)])
    x = window(1)
    waiting = use(pool, x)
    put(pool, whole, [(3, 0)])
    return not mx.array_equal(waiting, whole(x, mx.array([[[0, 1]]])))


def call(pool: SlotPool, x: mx.array) -> mx.array:
    return pool(x, slots(0, 1)[None, None])


def call_on_its_way(pool: SlotPool, x: mx.array) -> mx.array:
    mx.async_eval(result := call(pool, x))
    return result


def fulfilled_promise(pool: SlotPool, x: mx.array) -> mx.array:
    promise = pool.promise(x, (1, 1, 2))
    if promise is None:
        return call(pool, x)
    promise.fulfil(slots(0, 1)[None, None])
    return promise.outputs


@pytest.mark.parametrize("use", [call, call_on_its_way, fulfilled_promise])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_that_something_still_reads_is_not_overwritten(kind: Any, use: Any) -> None:
    assert not overwritten_before_read(kind, use)


def test_readers_that_are_not_waited_for_would_be_noticed(record_property: Callable[[str, object], None]) -> None:
    def forgets(self: Readers, slots: Any = None) -> None:
        del slots
        self._pending = []

    def waits_for_others(self: Readers, slots: Any = None, original: Any = Readers.settle) -> None:
        original(self, None if slots is None else [slot + 1 for slot in slots if slot + 1 > 1])

    for mutant in (forgets, waits_for_others):
        with patch.object(Readers, "settle", mutant):
            assert overwritten_before_read(UnifiedSlots, call)
    record_property("killed_by", "a pending result computes with the expert that came later")


def test_only_readers_of_the_slots_are_waited_for() -> None:
    readers = Readers()
    never = mx.array([1.0]) + 1
    readers.add(never, [0])
    with patch("strata_mlx.experts.slots.evaluate") as evaluate:
        readers.settle([1, 2])
        assert not evaluate.called
        readers.settle([2, 0])
        assert evaluate.call_args.args[0] == [never]
        readers.settle()
        assert evaluate.call_count == 1


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("place", [0, 56, 4088])
def test_unified_slots_are_written_in_place_and_begin_at_their_places(precision: str, place: int) -> None:
    whole = resident(precision)
    fields = [replace(field, place=(place + 4 * i) % PAGE) for i, field in enumerate(fields_of(whole))]
    pool = UnifiedSlots(resident(precision), fields, SLOTS)
    first = [target.__array_interface__["data"][0] for target in pool.write([0])[0]]
    assert [address % PAGE for address in first] == [field.place for field in fields]
    put(pool, whole, [(0, 0)])
    x = window(1)
    assert mx.array_equal(pool(x, slots(0)[None, None]), whole(x, mx.array(slots(0)[None, None]))).item()
    assert [target.__array_interface__["data"][0] for target in pool.write([0])[0]] == first


def test_on_the_cpu_slots_are_unified() -> None:
    whole = resident("4 bits")
    assert isinstance(make_slots(whole, fields_of(whole), SLOTS, Staging()), UnifiedSlots)
