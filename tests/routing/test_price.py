"""The price of a policy, against NumPy in float64."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_mlx import Residency, Routing, RoutingPolicy
from strata_mlx.routing import Router, price, select_ops
from strata_mlx.routing.price import SAMPLE_EVERY, Meter, Price

EXPERTS, TOP_K = 12, 4
ROUTER = Router(TOP_K)
SEEDS = st.integers(0, 2**32 - 1)


def windows(seed: int, count: int, rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, (count, rows, EXPERTS)).astype(np.float32)


def divergence(row: NDArray[np.float64], ids: list[int]) -> float:
    """KL(weights || softmax) of the experts ``ids``, by its definition."""
    p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    w = p[ids] / p[ids].sum()
    return float((w * np.log(w / p[ids])).sum())


def reference(scores: NDArray[np.float32], ids: NDArray[np.integer[Any]]) -> tuple[int, int, float]:
    """Rows, picks that the plain router would not have made, and extra KL, of the windows that are sampled."""
    rows = changed = 0
    extra = 0.0
    for number, (window, picked) in enumerate(zip(scores.astype(np.float64), ids, strict=True)):
        if number % SAMPLE_EVERY != SAMPLE_EVERY // 2:
            continue
        for row, chosen in zip(window, picked.tolist(), strict=True):
            plain = np.argsort(-row)[:TOP_K].tolist()
            rows += 1
            changed += len(set(chosen) - set(plain))
            extra += divergence(row, chosen) - divergence(row, plain)
    return rows, changed, extra


@given(SEEDS, st.integers(1, 3 * SAMPLE_EVERY), st.integers(1, 3))
def test_the_price_is_the_divergence_from_the_router(seed: int, count: int, rows: int) -> None:
    scores, rng = windows(seed, count, rows), np.random.default_rng(seed)
    ids = np.stack([[rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)] for _ in range(count)])
    meter = Meter()
    for window, picked in zip(scores, ids, strict=True):
        meter.record(0, mx.array(window), mx.array(picked.astype(np.uint32)), ROUTER)
    sampled, changed, extra = reference(scores, ids)
    found = meter.price()
    assert (found.rows, found.sampled_rows) == (count * rows, sampled)
    if sampled == 0:
        assert (found.changed, found.extra_kl) == (None, None)
    else:
        assert math.isclose(found.changed or 0, changed / sampled / TOP_K, rel_tol=1e-6)
        assert math.isclose(found.extra_kl or 0, extra / sampled, rel_tol=1e-4, abs_tol=1e-5)


@given(SEEDS)
def test_routing_measures_what_it_selects(seed: int) -> None:
    scores, resident = windows(seed, SAMPLE_EVERY, 1), np.random.default_rng(seed).random(EXPERTS) < 0.4
    routing = Routing(RoutingPolicy(1.5), Residency({0: resident}), executor=select_ops)
    ids = np.stack([np.array(routing.route(0, mx.array(window), ROUTER)[0]) for window in scores])
    _, changed, extra = reference(scores, ids)
    assert routing.price.rows == SAMPLE_EVERY
    assert math.isclose(routing.price.changed or 0, changed / TOP_K, rel_tol=1e-6)
    assert math.isclose(routing.price.extra_kl or 0, extra, rel_tol=1e-4, abs_tol=1e-5)


def test_rows_that_are_routed_exactly_count_as_such() -> None:
    """A layer of which nothing is known is a part of the model that costs nothing."""
    routing = Routing(RoutingPolicy(9.0), Residency({0: np.arange(EXPERTS) < 6}), executor=select_ops)
    scores = windows(1, SAMPLE_EVERY, 1)
    for window in scores:
        routing.route(0, mx.array(window), ROUTER)
    alone = routing.price
    for window in scores:
        routing.route(1, mx.array(window), ROUTER)
    both = routing.price
    assert (both.rows, both.sampled_rows) == (2 * alone.rows, 2 * alone.sampled_rows)
    assert alone.changed
    assert both.changed == alone.changed / 2


def test_a_request_begins_with_no_price() -> None:
    routing = Routing(RoutingPolicy(9.0), Residency({0: np.arange(EXPERTS) < 6}), executor=select_ops)
    for window in windows(1, SAMPLE_EVERY, 1):
        routing.route(0, mx.array(window), ROUTER)
    assert "% of the selections changed" in str(routing.price)
    routing.begin()
    assert routing.price == Price()
    assert str(routing.price) == "not sampled"


def test_exact_routing_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meter, "record", lambda *_: pytest.fail("exact routing has a price"))
    Routing(RoutingPolicy(9.0)).route(0, mx.array(windows(1, 1, 1)), ROUTER)


def test_a_row_without_a_number_has_a_finite_price() -> None:
    meter = Meter()
    for _ in range(SAMPLE_EVERY):
        meter.record(0, mx.full((1, EXPERTS), mx.nan), mx.arange(TOP_K, dtype=mx.uint32)[None], ROUTER)
    assert meter.price() == Price(SAMPLE_EVERY, 1, 0.0, 0.0)


def _every_pick(self: Meter, layer: int, logits: mx.array, ids: mx.array | None, *rest: Any) -> None:
    _RECORD(self, layer, logits, ids, *rest)
    self._totals = self._totals + mx.array([1.0, 0.0])


def _of_the_mass_alone(logits: mx.array, ids: mx.array, *rest: Any) -> mx.array:
    p = mx.softmax(logits, axis=-1)
    lost = -mx.log(mx.take_along_axis(p, ids, axis=-1).sum(axis=-1)).sum()
    return mx.stack([_DISTANCE(logits, ids, *rest)[0], lost])


_RECORD, _DISTANCE = Meter.record, price.distance


@pytest.mark.parametrize(
    ("target", "name", "broken"),
    [(Meter, "record", _every_pick), (price, "distance", _of_the_mass_alone)],
    ids=["a pick too many", "the plain router's own divergence forgotten"],
)
def test_the_definition_kills_the_mutant(
    target: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(target, name, broken)
    with pytest.raises(AssertionError):
        test_routing_measures_what_it_selects()
    record_property("killed_by", test_routing_measures_what_it_selects.__name__)
