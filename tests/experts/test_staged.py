"""Experts on their way to a GPU's slots: none is lost, and none is told another one's place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from strata_mlx.errors import InputError
from strata_mlx.experts import staged
from strata_mlx.experts.ranges import Field
from strata_mlx.experts.slots import SlotPool
from strata_mlx.experts.staged import EXPERTS, PAIRS, StagedSlots, Staging, staging_bytes
from tests.errors import refuses
from tests.experts.staged import ON_HOST, STAGED, ToldLater, at_once
from tests.experts.test_slots import SLOTS, fields_of, put, resident, slots, window
from tests.host.compiler import KernelError
from tests.host.host import HostBuild

WHOLE = resident("4 bits, bfloat16")
X = window(1, mx.bfloat16)


def made(kind: Callable[..., SlotPool], staging: Staging, seed: int = 1) -> SlotPool:
    return kind(resident("4 bits, bfloat16", seed=seed), fields_of(WHOLE), SLOTS, staging)


def expected(*experts: int) -> mx.array:
    return WHOLE(X, mx.array(experts)[None, None])


def right(pool: SlotPool, *experts: int) -> bool:
    """Whether the first slots compute what ``experts`` do."""
    return bool(mx.array_equal(pool(X, slots(*range(len(experts)))[None, None]), expected(*experts)))


def told_in_turn() -> bool:
    """Whether two layers that share their way are told their own slots, though the first computes only later."""
    staging = Staging()
    first, second = made(ToldLater, staging), made(ToldLater, staging)
    outputs = []
    promises = [pool.promise(X, (1, 1, 2)) for pool in (first, second)]
    for pool, promise, pairs in zip((first, second), promises, ([(4, 0), (1, 1)], [(5, 0), (2, 1)]), strict=True):
        put(pool, WHOLE, pairs)
        assert promise
        promise.fulfil(slots(0, 1) if pool is first else slots(1, 0))
        outputs.append(promise.outputs)
    return bool(mx.array_equal(outputs[0], expected(4, 1)) and mx.array_equal(outputs[1], expected(2, 5)))


def waits_its_turn(kind: Callable[..., SlotPool]) -> bool:
    """Whether experts that are staged and not yet used are there after another layer has staged its own."""
    staging = Staging()
    first, second = made(kind, staging), made(kind, staging)
    put(first, WHOLE, [(4, 0), (1, 1)])
    put(second, WHOLE, [(5, 0)])
    put(second, WHOLE, [(3, 1)])
    return right(first, 4, 1) and right(second, 5, 3)


def test_layers_that_share_their_way_do_not_mix_up_their_orders() -> None:
    assert told_in_turn()


@pytest.mark.parametrize("kind", STAGED)
def test_no_staged_expert_is_lost(kind: Callable[..., SlotPool]) -> None:
    assert waits_its_turn(kind)


def test_what_is_not_waited_for_would_be_noticed(record_property: Callable[[str, object], None]) -> None:
    def waits_for_nothing(self: Staging) -> None:
        self.dealt = None

    with patch.object(Staging, "_wait", waits_for_nothing):
        assert not told_in_turn()
    with patch.object(Staging, "free", waits_for_nothing):
        assert not waits_its_turn(at_once)
    record_property("killed_by", "a layer computes with another one's slots, or without its experts")


def deals_out(build: HostBuild) -> bool:
    """Whether three experts come to their slots, and then one in a launch that has room for more."""
    staging = Staging()
    pool = StagedSlots(resident("4 bits, bfloat16", seed=1), fields_of(WHOLE), SLOTS, staging, build)
    put(pool, WHOLE, [(0, 2), (4, 0), (1, 1)])
    pool.deal()
    put(pool, WHOLE, [(3, 0)])
    staging.tell(7, [0], ())
    staging.told(pool._launch(7, EXPERTS, (1,)))
    pool._launch(8, EXPERTS, (1,))  # whom nothing was told
    return right(pool, 3, 1, 0)


def test_the_kernel_deals_out_what_is_there() -> None:
    assert deals_out(ON_HOST)


@pytest.mark.parametrize(
    "edit",
    [
        ("put<SIZE4>(field4, slot, word - START4", "put<SIZE4>(field4, slot, word - START3"),
        ("slot * SIZE + at", "slot * SIZE"),
        ("size_t slot = orders[HEAD + row]", "size_t slot = orders[HEAD + row - 1]"),
        ("staged[size_t(row) * WORDS + word]", "staged[word]"),
        ("mine && row < orders[1] && word", "mine && word"),
    ],
    ids=lambda edit: edit[1],
)
def test_a_broken_kernel_would_be_noticed(edit: tuple[str, str]) -> None:
    with suppress(KernelError):
        assert not deals_out(HostBuild(in_place="field", edits=(edit,)))


def computed_untold(build: HostBuild) -> bool:
    """Whether a promise that was given up, computed after all, brings nothing to any slot and reads the first one."""
    staging = Staging()
    pool, other = (
        StagedSlots(resident("4 bits, bfloat16", seed=seed), fields_of(WHOLE), SLOTS, staging, build) for seed in (1, 2)
    )
    put(pool, WHOLE, [(4, 0), (1, 1), (2, 2)])
    pool.deal()
    ticket = staging.ticket()
    put(other, WHOLE, [(5, 0), (3, 1)])
    other.deal()
    given = pool._launch(ticket, 2, (1, 1, 2))
    return right(pool, 4, 1, 2) and right(other, 5, 3) and not given.any().item()


def test_a_promise_that_is_computed_untold_harms_nobody() -> None:
    assert computed_untold(ON_HOST)
    for edit in (("orders[0] == ticket[0]", "true"), ("mine ? orders[HEAD + EXPERTS + word] : 0", "1")):
        assert not computed_untold(HostBuild(in_place="field", edits=(edit,)))


def test_a_promise_has_room_for_its_own_window_only() -> None:
    """What was staged before it is on its way when it is made."""
    pool = made(ToldLater, Staging())
    put(pool, WHOLE, [(4, 0), (1, 1), (2, 2)])
    promise = pool.promise(X, (1, 1, 2))
    assert promise
    promise.fulfil(slots(0, 1))
    assert mx.array_equal(promise.outputs, expected(4, 1))
    assert right(pool, 4, 1, 2)


@pytest.mark.parametrize("kind", STAGED)
def test_large_experts_are_staged_as_many_as_have_room(
    kind: Callable[..., SlotPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    expert = sum(field.nbytes for field in fields_of(WHOLE))
    monkeypatch.setattr(staged, "_MOST", 2 * expert + 4096)
    pool = made(kind, Staging())
    assert pool.at_a_time == 2
    put(pool, WHOLE, [(4, 0), (1, 1)])
    put(pool, WHOLE, [(2, 2)])
    assert right(pool, 4, 1, 2)
    assert len(pool.write([0, 1])) == 2
    monkeypatch.setattr(staged, "_MOST", 1)
    assert made(kind, Staging()).at_a_time == 1


@pytest.mark.parametrize("kind", STAGED)
def test_what_is_cut_short_is_done_again(kind: Callable[..., SlotPool]) -> None:
    pool = made(kind, Staging())
    put(pool, WHOLE, [(4, 0), (1, 1)])
    with patch.object(Staging, "told", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        pool(X, slots(0, 1)[None, None])
    assert right(pool, 4, 1)


def test_a_promise_that_was_given_up_is_not_kept() -> None:
    pool = made(ToldLater, Staging())
    old = pool.promise(X, (1, 1, 2))
    pool.promise(X, (1, 1, 2))
    assert old
    with pytest.raises(ValueError, match="given up"):
        old.fulfil(slots(0, 1))


def test_windows_of_more_pairs_than_orders_hold_are_promised_nothing() -> None:
    assert made(ToldLater, Staging()).promise(X, (1, PAIRS + 1)) is None


def test_the_memory_is_as_reckoned() -> None:
    staging = Staging()
    pool = made(at_once, staging)
    pool.write([0])
    taken = staging.orders.array.nbytes + staging.records.array.nbytes
    expert = sum(field.nbytes for field in fields_of(WHOLE))
    assert EXPERTS * expert <= taken <= staging_bytes(expert)


def test_experts_that_the_kernel_cannot_move_are_refused() -> None:
    def pool(*fields: Field) -> None:
        StagedSlots(resident("float32"), fields, 2, build=ON_HOST)

    with refuses(InputError, "up_proj.scales", "6 bytes per expert", "whole words"):
        pool(Field("up_proj.scales", (3,), mx.bfloat16, 6))
    with refuses(InputError, "13 tensors", "at most 12"):
        pool(*[Field(f"part{i}", (1,), mx.uint32, 4) for i in range(13)])


def test_targets_are_apart() -> None:
    """No two fields or experts share a byte on their way."""
    pool = made(at_once, Staging())
    targets = [array for target in pool.write(list(range(SLOTS))) for array in target]
    for number, array in enumerate(targets):
        array[...] = number
    assert all((array == number).all() for number, array in enumerate(targets))
    assert all(array.flags.c_contiguous and isinstance(array, np.ndarray) for array in targets)


def test_what_was_told_is_on_its_way_before_anything_else_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the window that it was for was cut short before it was computed."""
    pool, begun = made(ToldLater, Staging()), []
    promise = pool.promise(X, (1, 1, 2))
    put(pool, WHOLE, [(4, 0), (1, 1)])
    assert promise
    promise.fulfil(slots(0, 1))
    dealt = pool._staging.dealt  # type: ignore[attr-defined]
    monkeypatch.setattr(staged, "evaluate", lambda arrays, *_, **options: begun.append((arrays is dealt, options)))
    pool(X, slots(0, 1)[None, None])
    assert begun == [(True, {"wait": False})]
