"""Slots that become fewer while a model runs, and slots that are filled before it does: the output never changes."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx import load
from strata_mlx.engine import generate_step
from strata_mlx.errors import Fault
from strata_mlx.experts import slots as pools
from strata_mlx.experts.eviction import EVICTIONS, make_eviction
from strata_mlx.experts.slots import UnifiedSlots
from strata_mlx.experts.store import ExpertStore
from strata_mlx.experts.table import SlotTable
from tests.experts.staged import STAGED
from tests.experts.streamed import made_by
from tests.tiny import make_checkpoint

PROMPT = mx.array([5, 250, 17, 99, 3])
NONE = np.zeros(0, np.intp)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("shrink") / "model", "qwen3_next", "stacked", num_experts=16)


def logprobs(model: object, shrinking: Callable[[int], None], tokens: int = 12) -> list[np.ndarray]:
    result = []
    for count, (_, values) in enumerate(generate_step(PROMPT, model, max_tokens=tokens)):
        result.append(np.array(values))
        shrinking(count)
    return result


@pytest.fixture(scope="module")
def resident(folder: Path) -> list[np.ndarray]:
    return logprobs(load(folder)[0], lambda _: None)


@pytest.mark.parametrize("pool", [UnifiedSlots, *STAGED])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_slots_may_become_fewer_between_any_two_tokens(
    folder: Path, resident: list[np.ndarray], eviction: str, pool: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata_mlx.experts.streaming.make_slots", made_by(pool))
    model, _ = load(folder, slots=14, eviction=eviction)

    def shrink(count: int) -> None:
        if count % 3 == 0 and model.streaming.slots > 2:
            model.streaming.shrink(model.streaming.slots - 3)

    assert all(np.array_equal(a, b) for a, b in zip(logprobs(model, shrink), resident, strict=True))
    assert model.streaming.slots == 2


def test_what_stays_is_in_memory_still(folder: Path) -> None:
    model, _ = load(folder, slots=12)
    logprobs(model, lambda _: None)
    model.streaming.shrink(12 - 1)
    before = model.streaming.traffic()
    for layer in model.streaming.layers.values():
        assert layer.table.resident.sum() == min(11, layer.table.counts.astype(bool).sum())
        assert set(layer.table.slot_of[layer.table.resident]) <= set(range(11))
    assert model.streaming.traffic() == before


def test_memory_really_becomes_less(folder: Path) -> None:
    model, _ = load(folder, slots=12)
    mx.set_cache_limit(0)
    before = mx.get_active_memory()
    model.streaming.shrink(4)
    assert before - mx.get_active_memory() >= 0.9 * 8 * model.streaming.slot_bytes


def lost_content(self: UnifiedSlots, count: int, moves: list[tuple[int, int]]) -> None:  # noqa: ARG001
    SHRINK(self, count, [])


def exchanged_content(self: UnifiedSlots, count: int, moves: list[tuple[int, int]]) -> None:
    SHRINK(self, count, [(old, count - 1 - new) for old, new in moves])


SHRINK = UnifiedSlots.shrink


@pytest.mark.parametrize("mutant", [lost_content, exchanged_content])
def test_a_shrink_that_mixes_experts_up_is_found(
    folder: Path,
    resident: list[np.ndarray],
    mutant: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.setattr(UnifiedSlots, "shrink", mutant)
    with pytest.raises(AssertionError):
        test_slots_may_become_fewer_between_any_two_tokens(folder, resident, "lru", UnifiedSlots, monkeypatch)
    record_property("killed_by", "test_slots_may_become_fewer_between_any_two_tokens")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_shrink_that_is_cut_short_costs_reads_and_no_token(
    folder: Path, resident: list[np.ndarray], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load(folder, slots=12)
    allocate, calls = pools._room, iter(range(100))

    def interrupted(*args: object) -> mx.array:
        if next(calls) == failing:
            raise KeyboardInterrupt
        return allocate(*args)  # type: ignore[arg-type]

    logprobs(model, lambda _: None, 3)
    monkeypatch.setattr(pools, "_room", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.streaming.shrink(6)
    monkeypatch.setattr(pools, "_room", allocate)
    assert all(np.array_equal(a, b) for a, b in zip(logprobs(model, lambda _: None), resident, strict=True))


# The table alone


@st.composite
def tables(draw: st.DrawFn) -> SlotTable:
    experts = draw(st.integers(2, 24))
    slots = draw(st.integers(1, experts))
    pinned = draw(st.sets(st.integers(0, experts - 1), max_size=slots - 1))
    table = SlotTable(experts, slots, make_eviction(draw(st.sampled_from(EVICTIONS)), experts), pinned)
    order = draw(st.permutations(sorted(set(range(experts)) - pinned)))
    chosen = [*sorted(pinned), *order][: draw(st.integers(len(pinned), slots))]
    table.commit(table.reserve(chosen, NONE))
    for expert in draw(st.lists(st.sampled_from(range(experts)), max_size=10)):
        table.used(np.array([[expert]]))
    return table


@given(tables(), st.data())
def test_as_many_as_fit_stay_and_those_that_the_policy_would_keep(table: SlotTable, data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, table.slots))
    residents, before = set(table.resident.nonzero()[0].tolist()), table.slot_of.copy()
    candidates = [expert for expert in sorted(residents) if expert not in table._pinned]
    surplus = max(0, len(residents) - slots)
    if surplus > len(candidates):
        with pytest.raises(ValueError, match="pinned"):
            table.shrink(slots)
        assert np.array_equal(table.slot_of, before)
        return
    gone = set(table.eviction.victims(candidates, surplus)) if surplus else set()
    moving = table.shrink(slots)
    assert set(moving) == residents - gone
    assert all(before[expert] == slot for expert, slot in moving.items())
    assert (table.slots, table.free) == (slots, slots)
    assert not table.resident.any()
    table.commit(table.reserve(list(moving), NONE))
    assert set(table.resident.nonzero()[0].tolist()) == set(moving)


@given(st.lists(st.lists(st.permutations(range(8)).map(lambda order: order[:2]), min_size=1, max_size=4), max_size=6))
def test_selections_are_counted(windows: list[list[list[int]]]) -> None:
    table = SlotTable(8, 4, make_eviction("lru", 8))
    for window in windows:
        table.used(np.array(window))
    picks = [expert for window in windows for row in window for expert in row]
    assert table.counts.tolist() == [picks.count(expert) for expert in range(8)]


# Filling slots


def test_the_most_wanted_come_first_and_that_is_no_traffic(folder: Path, resident: list[np.ndarray]) -> None:
    model, _ = load(folder, slots=3)
    read: list[int] = []
    model.streaming.warm({0: [9, 4, 11, 5], 1: [7]}, read.append)
    first, second = (layer.table.resident.nonzero()[0].tolist() for layer in model.streaming.layers.values())
    assert (first, second) == ([4, 9, 11], [7])
    assert sum(read) == 3 * model.streaming.expert_bytes(0) + model.streaming.expert_bytes(1)
    assert model.streaming.traffic().misses == model.streaming.traffic().bytes == 0
    model.streaming.warm({0: [1, 2]})
    assert not model.streaming.tables[0].resident[[1, 2]].any()
    assert all(np.array_equal(a, b) for a, b in zip(logprobs(model, lambda _: None), resident, strict=True))


def test_a_fault_while_filling_leaves_nothing_that_is_not_there(
    folder: Path, resident: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load(folder, slots=5)
    broken = ExpertStore._read

    def read(self: ExpertStore, layer: int, expert: int, into: object) -> int:
        if expert == 4:
            raise Fault("the disk is broken")
        return broken(self, layer, expert, into)  # type: ignore[arg-type]

    monkeypatch.setattr(ExpertStore, "_read", read)
    with pytest.raises(Fault, match="broken"):
        model.streaming.warm({0: [9, 4, 11]})
    monkeypatch.undo()
    assert not model.streaming.tables[0].resident.any()
    assert all(np.array_equal(a, b) for a, b in zip(logprobs(model, lambda _: None), resident, strict=True))
