"""Giving memory back, with sources, pools and clocks that are made up."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx.experts import pressure, system
from strata_mlx.experts.pressure import Guard, Wish, relieve


@dataclass
class Pool:
    slots: int = 64
    least: int = 10
    slot_bytes: int = 1000
    history: list[int] = field(default_factory=list)

    def shrink(self, slots: int) -> None:
        assert self.least <= slots < self.slots
        self.slots = slots
        self.history.append(slots)


@dataclass
class Situation:
    """A guard over a pool; ``wish`` is what its only source says, ``now`` its clock."""

    pool: Pool = field(default_factory=Pool)
    wish: Wish | None = None
    now: float = 0.0
    asked: int = 0
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.guard = Guard(self.pool, [self._source], self.said.append, lambda: self.now)

    def _source(self) -> Wish | None:
        self.asked += 1
        return self.wish

    def after(self, seconds: float) -> int:
        self.now += seconds
        self.guard.check()
        return self.pool.slots


def test_a_system_that_wants_nothing_gets_nothing() -> None:
    situation = Situation()
    assert [situation.after(1) for _ in range(5)] == [64] * 5
    assert situation.asked == 5
    assert situation.said == []


def test_the_system_is_not_asked_more_than_once_per_second() -> None:
    situation = Situation()
    for _ in range(95):
        situation.after(1 / 16)
    assert situation.asked == 5


def test_bytes_are_given_back_in_whole_slots_and_it_is_said_in_one_line() -> None:
    situation = Situation(wish=Wish("too full", nbytes=4001))
    assert situation.after(1) == 59
    (line,) = situation.said
    assert "\n" not in line
    for part in ("too full", "5 KB", "59 instead of 64"):
        assert part in line


def test_a_share_is_of_what_is_there_and_the_next_one_has_to_wait() -> None:
    situation = Situation(wish=Wish("pressure", share=1 / 8))
    assert situation.after(1) == 56
    assert situation.after(1) == 56
    assert situation.after(8) == 56
    assert situation.after(1) == 49


def test_the_largest_wish_is_granted() -> None:
    pool, said, now = Pool(), list[str](), iter(range(9))
    sources = [lambda: Wish("small", nbytes=1000), lambda: None, lambda: Wish("large", share=0.5)]
    Guard(pool, sources, said.append, lambda: next(now)).check()
    assert pool.slots == 32
    assert "large" in said[0]


@given(
    st.integers(1, 600), st.integers(0, 600), st.integers(1, 10**7),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 10**10)), max_size=8),
)  # fmt: skip
def test_slots_never_grow_and_never_fall_below_the_least(
    least: int, more: int, slot_bytes: int, wishes: list[tuple[float, int]]
) -> None:
    situation = Situation(Pool(least + more, least, slot_bytes))
    for share, nbytes in wishes:
        situation.wish = Wish("more", share, nbytes)
        situation.after(100)
    assert situation.pool.history == sorted(set(situation.pool.history), reverse=True)
    assert len(situation.said) == len(situation.pool.history)


@given(st.integers(0, 10**6 - 1), st.integers(1, 10**4))  # all slots but one can go
def test_what_is_asked_for_is_given_where_there_is_that_much(nbytes: int, slot_bytes: int) -> None:
    situation = Situation(Pool(10**6, 1, slot_bytes), Wish("more", nbytes=nbytes))
    given_back = (10**6 - situation.after(1)) * slot_bytes
    assert nbytes <= given_back < nbytes + slot_bytes


def test_at_the_least_nothing_more_is_said() -> None:
    situation = Situation(Pool(slots=11), Wish("more", nbytes=10**9))
    assert [situation.after(20) for _ in range(3)] == [10] * 3
    assert len(situation.said) == 1


def test_lines_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    now = iter((0.0, 5.0))
    Guard(Pool(), [lambda: Wish("too full", nbytes=1)], clock=lambda: next(now)).check()
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("memory: too full")


def test_memory_beyond_the_budget_is_wanted_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "on_gpu_of_its_own", lambda: False)
    monkeypatch.setattr(system, "footprint", lambda: 1050)
    assert pressure.beyond(1045, "process memory")() is None
    assert pressure.beyond(1050, "process memory")() is None
    wish = pressure.beyond(1000, "process memory")()
    assert wish is not None
    assert (wish.nbytes, wish.share) == (50, 0)
    assert "process memory" in wish.reason


def test_a_model_without_a_budget_has_no_guard() -> None:
    relieve(nn.Module())


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_every_system_has_sources(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    sources: list[Callable[[], Wish | None]] = pressure.system_sources()
    assert len(sources) >= 2


def test_the_sources_of_this_system_can_be_asked() -> None:
    for source in pressure.system_sources():
        wish = source()
        assert wish is None or wish.reason
