"""The sweep: chosen on one half, judged on the other, and the oracle is not beaten."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from strata_mlx.errors import InputError
from strata_mlx.intervals import interval, resampled
from strata_mlx.replay.costs import STORAGES, CostModel
from strata_mlx.replay.recording import Recording
from strata_mlx.replay.sweep import KINDS, AsItPays, Machine, Swept, Way, choose, halves, replays, run, sweep, ways
from strata_mlx.replay.tuning import PLAIN
from strata_mlx.speculation.retention import RetentionPolicy
from tests.errors import refuses

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def longer(recording: Recording) -> Recording:
    """Each document twice, for halves that have something to say."""
    return Recording(recording.header, recording.documents * 2)


@pytest.fixture(scope="module")
def swept(longer: Recording, costs: CostModel) -> Swept:
    return sweep(longer, Machine(costs))


def test_every_kind_is_judged_once_and_plain_is_the_measure(swept: Swept) -> None:
    assert Counter(row["kind"] for row in swept.rows) == Counter((*KINDS, "default", "oracle"))
    plain = swept.row("plain")
    assert plain["speedup"] == 1
    assert plain["speedup_interval"] == [1, 1]
    assert plain["tokens_per_round"] == 1
    assert plain["accepted_share"] is None
    for row in swept.rows:
        low, high = row["tokens_per_s_interval"]
        assert low * (1 - 1e-9) <= row["tokens_per_s"] <= high * (1 + 1e-9)
        assert row["ms_per_token"]["draft"] + row["ms_per_token"]["verify"] == pytest.approx(1e3 / row["tokens_per_s"])
        assert row["ms_per_token"]["reading"] == 0
    json.dumps(swept.rows, allow_nan=False)


def test_no_way_beats_the_oracle(swept: Swept) -> None:
    assert swept.row("oracle")["tokens_per_s"] >= 0.99 * max(row["tokens_per_s"] for row in swept.rows)


def test_the_judging_half_has_no_part_in_the_choice(longer: Recording, costs: CostModel, swept: Swept) -> None:
    fit, held = halves(longer)
    assert len(fit.documents) + len(held.documents) == len(longer.documents)
    wrong = [_never(document) for document in held.documents]
    mixed = [wrong.pop(0) if i % 2 else document for i, document in enumerate(longer.documents)]
    other = sweep(Recording(longer.header, tuple(mixed)), Machine(costs))
    assert other.chosen == swept.chosen
    assert other.calibration == swept.calibration
    assert not other.pays
    assert other.row("oracle")["tokens_per_s"] == pytest.approx(other.row("plain")["tokens_per_s"], rel=0.05)


def _never(document: Any) -> Any:
    return replace(document, agree=np.zeros_like(document.agree))


def test_the_report_of_progress_adds_up(longer: Recording, costs: CostModel) -> None:
    calls: list[int] = []
    sweep(longer, Machine(costs), lambda: calls.append(1))
    assert len(calls) == replays(longer.header.steps)


def test_reading_is_part_of_the_time_of_a_model_that_streams(longer: Recording, costs: CostModel) -> None:
    way = Way("flat", RetentionPolicy(), 2)
    resident = run(longer, way, Machine(costs))
    measured = run(longer, way, Machine(costs, slots=6))
    slow = run(longer, way, Machine(costs, slots=6, storage=STORAGES[-1]))
    assert resident.reading == 0
    trunk = len(longer.header.layers)
    later = measured.replayed.misses[np.diff(measured.replayed.document, prepend=-1) == 0]
    assert later.sum() > 0
    assert measured.reading == pytest.approx(0.5 * later[:, :trunk].sum())  # misses of the head cost nothing here
    assert 0 < slow.reading < slow.replayed.seconds


def test_what_does_not_pay_is_soon_left(longer: Recording, costs: CostModel) -> None:
    assert costs.resident is not None
    dear = replace(costs, resident=replace(costs.resident, draft=tuple(50.0 + i for i in range(7))))
    tried = run(longer, Way("default", AsItPays(), 1), Machine(dear)).replayed
    assert sum(each.drafted > 0 for each in tried.rounds) <= 2 * len(longer.documents)
    cheap = replace(costs, resident=replace(costs.resident, verify=(0.8,) * 8, draft=(0.0,) * 7))
    assert sum(each.drafted > 0 for each in run(longer, Way("default", AsItPays(), 3), Machine(cheap)).replayed.rounds)


def test_the_economic_policy_is_chosen_where_it_is_as_good() -> None:
    plain, flat, economic = Way("plain", PLAIN, 7), Way("flat", RetentionPolicy(0.5), 7), Way("economic", PLAIN, 7)
    assert choose({"plain": (10, plain), "flat": (10.05, flat), "economic": (10, economic)}) == economic
    assert choose({"plain": (10, plain), "flat": (12, flat), "economic": (11, economic)}) == flat


@pytest.mark.parametrize("most", [1, 2, 7])
def test_ways_differ_and_fit_the_recording(most: int) -> None:
    made = ways(most)
    assert len({(way.retention, way.steps, way.drafting) for way in made}) == len(made)
    assert all(1 <= way.steps <= most for way in made)
    assert {way.kind for way in made} == {*KINDS} - {"economic"}


def test_one_document_has_no_half(recording: Recording) -> None:
    with refuses(InputError, "at least two"):
        halves(recording.of([0]))


def test_intervals_hold_the_mean_and_repeat() -> None:
    sums = np.random.default_rng(3).random((20, 2)) + 1
    drawn = resampled(sums)
    assert np.array_equal(drawn, resampled(sums))
    low, high = interval(drawn[:, 0] / drawn[:, 1])
    assert low < sums[:, 0].sum() / sums[:, 1].sum() < high
    assert np.allclose(resampled(sums[:1]), sums[:1])
