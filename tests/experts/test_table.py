"""The slot table keeps its law through any history, and no plausible mistake in it would go unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from strata_mlx.experts.eviction import EVICTIONS, Eviction, make_eviction
from strata_mlx.experts.table import Leaving, SlotTable

EXPERTS = 12
experts = st.sets(st.integers(0, EXPERTS - 1))


class Histories(RuleBasedStateMachine):
    """Reservations that end well or do not, against a dictionary."""

    @initialize(slots=st.integers(1, EXPERTS), pinned=experts, policy=st.sampled_from(["lru", "frequency"]))
    def begin(self, slots: int, pinned: set[int], policy: str) -> None:
        self.pinned = set(sorted(pinned)[: slots - 1])
        self.table = SlotTable(EXPERTS, slots, make_eviction(policy, EXPERTS), self.pinned)
        self.slots, self.held = slots, dict[int, int]()  # by expert
        self.version, self.before = self.table.version, dict[int, int]()

    @rule(ids=st.lists(st.permutations(range(EXPERTS)).map(lambda row: row[:3]), min_size=1, max_size=3))
    def use(self, ids: list[list[int]]) -> None:
        self.table.used(np.array(ids))

    @rule(wanted=experts, keep=experts, fate=st.sampled_from(["good", "good", "bad", "half"]), early=st.booleans())
    def fetch(self, wanted: set[int], keep: set[int], fate: str, early: bool) -> None:
        if early:
            self.table.rank()
        table, new = self.table, sorted(wanted - self.held.keys())
        can_go = self.held.keys() - keep - self.pinned
        free = self.slots - len(self.held)
        assert table.room(np.array(sorted(keep), np.intp)) == free + len(can_go)
        if len(new) > free + len(can_go):
            with pytest.raises(ValueError, match="would have to go"):
                table.reserve(new, np.array(sorted(keep), np.intp))
            assert table.version == self.version
            return
        pairs = table.reserve(new, np.array(sorted(keep), np.intp))
        left = {expert for expert in self.held if table.slot_of[expert] < 0}
        assert left <= can_go, "an expert left that is kept or pinned"
        assert len(left) == max(0, len(new) - free), "more experts left than had to"
        for expert in left:
            del self.held[expert]
        self.check_law()  # before the reads end, none of the new ones is resident
        assert [expert for expert, _ in pairs] == new
        assert not {slot for _, slot in pairs} & set(self.held.values()), "a slot was given out twice"
        done = {"good": pairs, "bad": [], "half": pairs[: len(pairs) // 2]}[fate]
        if done:
            table.commit(done)
        if fate != "good":
            table.recover()
        self.held |= dict(done)

    @invariant()
    def check_law(self) -> None:
        if not hasattr(self, "table"):
            return
        table = self.table
        found = {int(expert): int(table.slot_of[expert]) for expert in np.flatnonzero(table.slot_of >= 0)}
        assert found == self.held
        assert len(set(found.values())) == len(found), "two experts in one slot"
        assert all(0 <= slot < self.slots for slot in found.values())
        assert (table.resident == (table.slot_of >= 0)).all()
        changed = self.before != found
        assert table.version > self.version or not changed, "the version did not grow"
        self.version, self.before = table.version, found

    @invariant()
    def no_slot_is_lost(self) -> None:
        if hasattr(self, "table"):
            assert self.table.free == self.slots - len(self.held)


QUICK = settings(
    max_examples=100,
    stateful_step_count=20,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # the first failure will do
    report_multiple_bugs=False,
)
TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=30, stateful_step_count=20)


def room_whatever_is_kept(original: Callable[..., Any], self: Leaving, keep: Any) -> Any:
    return original(self, keep[:0])


def leaves_whatever_is_kept(original: Callable[..., Any], self: Leaving, count: int, keep: Any) -> Any:
    return original(self, count, keep[:0])


def kept_ones_are_forgotten(original: Callable[..., Any], self: Leaving, count: int, keep: Any) -> Any:
    found = original(self, count, keep)
    self._heap = [entry for entry in self._heap if entry[1] not in keep]
    return found


def pinned_may_leave(original: Callable[..., Any], self: SlotTable, pairs: Any) -> Any:
    original(self, pairs)
    for expert, _ in pairs:
        if expert in self._pinned:
            self._leaving.add(expert)


def resident_before_the_read(original: Callable[..., Any], self: SlotTable, wanted: Any, keep: Any) -> Any:
    pairs = original(self, wanted, keep)
    for expert, slot in pairs:
        self.slot_of[expert], self.resident[expert] = slot, True
    return pairs


def evicts_for_every_expert(original: Callable[..., Any], self: SlotTable, wanted: Any, keep: Any) -> Any:
    free, self._free = self._free, []
    pairs = original(self, wanted, keep)
    self._free += free
    return pairs


def evicted_but_still_listed(original: Callable[..., Any], self: SlotTable, wanted: Any, keep: Any) -> Any:
    before = self.resident.copy()
    pairs = original(self, wanted, keep)
    self.resident |= before
    return pairs


def reservations_are_forgotten(original: Callable[..., Any], self: SlotTable) -> Any:
    free = list(self._free)
    original(self)
    self._free = free


def version_stands_still(original: Callable[..., Any], self: SlotTable, pairs: Any) -> Any:
    original(self, pairs)
    self.version -= 1


MUTANTS: dict[Callable[..., Any], tuple[type, str]] = {
    room_whatever_is_kept: (Leaving, "candidates"),
    leaves_whatever_is_kept: (Leaving, "take"),
    kept_ones_are_forgotten: (Leaving, "take"),
    pinned_may_leave: (SlotTable, "commit"),
    resident_before_the_read: (SlotTable, "reserve"),
    evicts_for_every_expert: (SlotTable, "reserve"),
    evicted_but_still_listed: (SlotTable, "reserve"),
    reservations_are_forgotten: (SlotTable, "recover"),
    version_stands_still: (SlotTable, "commit"),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_die(mutant: Callable[..., Any], record_property: Callable[[str, object], None]) -> None:
    owner, name = MUTANTS[mutant]
    original = getattr(owner, name)

    def broken(self: Any, *args: Any) -> Any:
        return mutant(original, self, *args)

    dead = (AssertionError, ValueError, pytest.fail.Exception)
    with patch.object(owner, name, broken), pytest.raises(dead) as killer:
        run_state_machine_as_test(Histories, settings=QUICK)
    record_property("killed_by", str(killer.value).splitlines()[0][:80])


def first_to_leave(eviction: Eviction, experts: list[int], keep: list[int], count: int) -> list[int]:
    return eviction.victims([expert for expert in sorted(experts) if expert not in keep], count)


def check_order(policy: str) -> None:
    """Those leave that the policy puts first of all, whatever was used since they were looked at last."""
    table, rng = SlotTable(40, 24, make_eviction(policy, 40)), np.random.default_rng(0)
    left = 0
    for number in range(500):
        rows = 4 if number % 40 == 39 else 1
        ids = np.stack([rng.choice(40, 3, replace=False, p=CHANCES) for _ in range(rows)])
        if number % 3:
            table.rank()
        needed = np.unique(ids).tolist()
        missing = [expert for expert in needed if table.slot_of[expert] < 0]
        before = set(table.resident.nonzero()[0].tolist())
        lacking = max(0, len(missing) - table.free)
        expected = first_to_leave(table.eviction, list(before), needed, lacking)
        table.commit(table.reserve(missing, needed))
        assert before - set(table.resident.nonzero()[0].tolist()) == set(expected)
        left += len(expected)
        table.used(ids if number % 2 else ids.tolist())
    assert left > 100


CHANCES = np.arange(1, 41) / sum(range(1, 41))


@pytest.mark.parametrize("policy", EVICTIONS)
def test_the_policy_says_who_leaves(policy: str) -> None:
    check_order(policy)


def the_first_seen_counts(self: Leaving, count: int, keep: Any) -> list[int]:
    found = [expert for _, expert in sorted(self._heap) if expert not in keep][:count]
    self._heap = [(self._eviction.score[e] if s < 0 else s, e) for s, e in self._heap if e not in found]
    return found


@pytest.mark.parametrize(("name", "mutant"), [("take", the_first_seen_counts), ("rank", lambda _: None)])
def test_a_wrong_order_would_be_noticed(name: str, mutant: Any) -> None:
    with patch.object(Leaving, name, mutant), pytest.raises(AssertionError):
        check_order("frequency")


@pytest.mark.parametrize("policy", EVICTIONS)
def test_evictions_go_by_what_was_wanted_and_counts_by_what_was_used(policy: str) -> None:
    biased, wanted = (SlotTable(EXPERTS, 4, make_eviction(policy, EXPERTS)) for _ in range(2))
    biased.wanted = np.array([[[4, 5], [5, 6]]], np.uint32)
    biased.used(np.array([[0, 1], [0, 2]]))
    wanted.used(np.array([[4, 5], [5, 6]]))
    assert biased.eviction.to_dict() == wanted.eviction.to_dict()
    assert biased.counts.nonzero()[0].tolist() == [0, 1, 2]
    for table in (biased, wanted):
        table.used(np.array([[3, 1]]))  # nobody said that anything else was wanted
    assert biased.eviction.to_dict() == wanted.eviction.to_dict()


def test_a_window_of_hits_alone_changes_who_leaves_first() -> None:
    table = SlotTable(EXPERTS, 2, make_eviction("lru", EXPERTS))
    for ids in (np.array([[0]]), np.array([[1]]), np.array([[0]])):
        table.rank()
        if missing := ids[0][table.slot_of[ids[0]] < 0].tolist():
            table.commit(table.reserve(missing, ids[0]))
        table.used(ids)
    table.rank()
    table.commit(table.reserve([2], np.array([2])))
    assert table.resident.nonzero()[0].tolist() == [0, 2]
