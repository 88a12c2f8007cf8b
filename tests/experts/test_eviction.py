"""Eviction policies: who goes first, against references that remember every use."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx import InputError
from strata_mlx.experts import eviction
from strata_mlx.experts.eviction import EVICTIONS, HALF_LIVES, Eviction, make_eviction

EXPERTS, TOP_K = 9, 3
ROWS = st.lists(
    st.lists(st.integers(0, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True), min_size=1, max_size=12
)
HISTORIES = st.lists(ROWS, max_size=8)  # windows


def play(policy: Eviction, history: list[list[list[int]]]) -> Eviction:
    for rows in history:
        policy.used(np.array(rows, np.uint32))
    return policy


def order(policy: Eviction, candidates: list[int] | None = None) -> list[int]:
    """All candidates, the first to go first."""
    ids = list(range(EXPERTS)) if candidates is None else candidates
    return policy.victims(ids, len(ids))


def ages(history: list[list[list[int]]], expert: int) -> list[int]:
    """How many rows ago each use of ``expert`` was, by going through all rows."""
    rows = [row for window in history for row in window]
    return [len(rows) - 1 - number for number, row in enumerate(rows) if expert in row]


@given(HISTORIES)
def test_lru_evicts_by_the_latest_use(history: list[list[list[int]]]) -> None:
    latest = [min(ages(history, expert), default=10**6) for expert in range(EXPERTS)]
    assert order(play(make_eviction("lru", EXPERTS), history)) == sorted(range(EXPERTS), key=lambda e: -latest[e])


@given(HISTORIES, st.sampled_from(list(HALF_LIVES)))
def test_frequency_evicts_by_the_decayed_count(history: list[list[list[int]]], name: str) -> None:
    counts = [sum(2 ** (-age / HALF_LIVES[name]) for age in ages(history, expert)) for expert in range(EXPERTS)]
    evicted = [counts[expert] for expert in order(play(make_eviction(name, EXPERTS), history))]
    assert np.allclose(evicted, sorted(counts), rtol=1e-9)


@pytest.mark.parametrize("name", EVICTIONS)
@given(history=HISTORIES, candidates=st.lists(st.integers(0, EXPERTS - 1), unique=True), data=st.data())
def test_victims_are_distinct_candidates_in_order(
    name: str, history: list[list[list[int]]], candidates: list[int], data: st.DataObject
) -> None:
    policy = play(make_eviction(name, EXPERTS), history)
    count = data.draw(st.integers(0, len(candidates)))
    every = order(policy, candidates)
    assert sorted(every) == sorted(candidates)
    assert policy.victims(candidates, count) == every[:count]


@pytest.mark.parametrize("name", EVICTIONS)
@given(before=HISTORIES, after=HISTORIES)
def test_a_restored_policy_goes_on_as_the_one_that_was_saved(
    name: str, before: list[list[list[int]]], after: list[list[list[int]]]
) -> None:
    policy = play(make_eviction(name, EXPERTS), before)
    restored = make_eviction(name, EXPERTS, json.loads(json.dumps(policy.to_dict())))
    a, b = (play(each, after).to_dict() for each in (policy, restored))
    assert np.allclose(a["scores"], b["scores"], rtol=1e-12)


def test_lrfu_lies_between_recency_and_frequency() -> None:
    """Expert 0 was used often, long ago; 1 twice, a while ago; 2 once, just now."""
    history = [[[0, 3, 4]] * 40 + [[5, 6, 7]] * 120 + [[1, 3, 4]] * 2 + [[5, 6, 7]] * 4 + [[2, 3, 4]]]
    found = {name: order(play(make_eviction(name, EXPERTS), history), [0, 1, 2]) for name in EVICTIONS}
    assert found == {"lru": [0, 1, 2], "lrfu": [0, 2, 1], "frequency": [2, 1, 0]}


def test_the_decay_survives_more_rows_than_a_float_can_count() -> None:
    """The weight of a use doubles every half-life; 2 ** 1024 is no number."""
    policy, half_life = make_eviction("lrfu", EXPERTS), int(HALF_LIVES["lrfu"])
    for number in range(1100 * half_life):
        policy.used(np.array([[0, 1, 2 + number % 2]]))
    assert order(policy)[-4:] == [2, 3, 0, 1]
    assert np.isfinite(policy.to_dict()["scores"]).all()
    policy.used(np.array([[4, 5, 6]] * (1100 * half_life)))
    assert order(policy)[-3:] == [4, 5, 6]
    assert np.isfinite(policy.to_dict()["scores"]).all()


def _decay_forgotten(self: eviction.DecayedFrequency, ids: Any) -> None:
    self._scores += np.bincount(ids.ravel(), minlength=EXPERTS)


def _first_row_alone(self: eviction.LRU, ids: Any) -> None:
    self._rows += 1
    self._scores[ids] = self._rows


@pytest.mark.parametrize(
    ("policy", "broken", "law"),
    [
        (eviction.DecayedFrequency, _decay_forgotten, test_frequency_evicts_by_the_decayed_count),
        (eviction.LRU, _first_row_alone, test_lru_evicts_by_the_latest_use),
    ],
    ids=["frequency that does not decay", "a window as one row"],
)
def test_the_laws_kill_the_mutant(
    policy: type, broken: Any, law: Any, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(policy, "used", broken)
    with pytest.raises(AssertionError):
        law()
    record_property("killed_by", law.__name__)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "of the eviction policy None"),
        ({"eviction": "frequency", "scores": [0.0] * EXPERTS}, "of the eviction policy 'frequency'"),
        ({"eviction": "lru"}, "must hold 9 finite scores"),
        ({"eviction": "lru", "scores": [0.0] * 8}, "must hold 9 finite scores"),
        ({"eviction": "lru", "scores": [0.0] * 8 + [float("nan")]}, "must hold 9 finite scores"),
        ({"eviction": "lru", "scores": [0.0] * 8 + ["x"]}, "must hold 9 finite scores"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        make_eviction("lru", EXPERTS, state)


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(InputError, match="eviction is 'fifo', expected one of lru, lrfu, frequency"):
        make_eviction("fifo", EXPERTS)
