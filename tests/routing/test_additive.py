"""cache_prior, max_rank, mass and margin: re-rankings with the router's own weights."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx.errors import InputError
from strata_mlx.routing import LogitRange, RoutingPolicy, reference, select
from tests.routing.properties import TOLERANCE, own_weights
from tests.strategies import RoutingCase, additive_policies, extreme_cases, routing_cases

K = 8
NEUTRAL = [
    RoutingPolicy(kind="cache_prior", prior_lambda=0.0),
    RoutingPolicy(kind="max_rank", max_rank=K),
    RoutingPolicy(kind="mass", mass=0.0),
    RoutingPolicy(kind="margin", margin=0.0),
    RoutingPolicy(kind="margin", margin=0.0, sure_margin=0.0),
    RoutingPolicy(kind="margin", margin=1.0, sure_margin=1.0, protect=K),
    RoutingPolicy(kind="cache_prior", prior_lambda=3.0, protect=K),
    RoutingPolicy(kind="max_rank", max_rank=40, protect=K),
]
PLAIN = RoutingPolicy()


def route(case: RoutingCase, policy: RoutingPolicy, known: Any = None, confidence: Any = None) -> tuple[Any, Any]:
    resident = case.resident if known is None else known
    ids, weights = select(
        mx.array(case.logits),
        None if resident is None else mx.array(resident),
        policy,
        top_k=case.top_k,
        selection_bias=None if case.bias is None else mx.array(case.bias),
        confidence=None if confidence is None else mx.array(confidence, mx.float32),
        **case.options,
    )
    return np.array(ids), np.array(weights)


def cases(**fixed: Any) -> st.SearchStrategy[RoutingCase]:
    return routing_cases(policy=PLAIN, top_k=K, dtype="float32", **fixed)


@pytest.mark.parametrize("policy", NEUTRAL, ids=str)
@given(case=cases())
def test_a_neutral_parameter_is_the_plain_router_bit_for_bit(policy: RoutingPolicy, case: RoutingCase) -> None:
    ids, weights = route(case, policy)
    plain, plain_weights = route(case, PLAIN)
    assert (ids == plain).all()
    assert weights.tobytes() == plain_weights.tobytes()


@given(case=cases(), policy=additive_policies())
def test_without_residents_it_is_the_plain_router_bit_for_bit(case: RoutingCase, policy: RoutingPolicy) -> None:
    ids, weights = route(case, policy, known=np.zeros(case.logits.shape[1], bool))
    plain, plain_weights = route(case, PLAIN)
    assert (ids == plain).all()
    assert weights.tobytes() == plain_weights.tobytes()


@given(case=cases(tie_free=True, biased=False, residency="some"), policy=additive_policies(), seed=st.integers(0, 99))
def test_it_agrees_with_the_reference(case: RoutingCase, policy: RoutingPolicy, seed: int) -> None:
    confidence = np.random.default_rng(seed).uniform(-0.1, 1.1, len(case.logits)).astype(np.float32)
    ranges = case.logits.max(axis=1).astype(np.float64) - case.logits.min(axis=1)
    deltas = np.cumsum(ranges) / np.arange(1, len(ranges) + 1)
    ids, weights = route(case, policy, confidence=confidence)
    expected, expected_weights = reference.select(
        case.logits, case.resident, policy, top_k=K, deltas=deltas, confidence=confidence, **case.options
    )
    for got, want in zip(ids, expected, strict=True):
        # A cumulative probability or a raised score on the very edge may fall on either side.
        assert (got == want).all() or policy.kind != "max_rank"
        assert len(set(got.tolist()) ^ set(want.tolist())) <= 2
    agree = (ids == expected).all(axis=1)
    assert np.abs(weights - expected_weights)[agree].max(initial=0) <= TOLERANCE * case.options["scale"]


def test_a_large_prior_keeps_the_order_of_the_residents() -> None:
    """Their raised sigmoids are all 1 in float32; a found counterexample was decided by id instead."""
    logits = np.linspace(-1.0, 3.0, 32, dtype=np.float32)[None]
    policy = RoutingPolicy(kind="cache_prior", protect=0, prior_lambda=8.0)
    ids, _ = select(mx.array(logits), mx.ones(32, mx.bool_), policy, top_k=8, router="sigmoid")
    assert ids.tolist() == [list(range(31, 23, -1))]


@given(case=extreme_cases(), policy=additive_policies())
def test_weights_are_the_routers_own_and_ids_distinct(case: RoutingCase, policy: RoutingPolicy) -> None:
    if case.top_k < K:
        return
    case = RoutingCase(case.logits, case.resident, policy, K, options={**case.options, "topk_group": 1, "n_group": 1})
    ids, weights = route(case, policy)
    assert all(len(set(row.tolist())) == K for row in ids)
    assert np.isfinite(weights).all()
    assert np.abs(weights - own_weights(case, ids)).max() <= TOLERANCE * case.options["scale"]


def test_the_protected_picks_stay_and_residents_follow() -> None:
    logits = mx.array([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0]])
    resident = mx.arange(8) >= 4
    for policy, expected in (
        (RoutingPolicy(kind="max_rank", max_rank=6, protect=1), [0, 1, 4, 5]),
        (RoutingPolicy(kind="max_rank", max_rank=5, protect=1), [0, 1, 2, 4]),
        (RoutingPolicy(kind="max_rank", max_rank=8, protect=2), [0, 1, 4, 5]),
        (RoutingPolicy(kind="max_rank", max_rank=8, protect=0), [4, 5, 6, 7]),
        (RoutingPolicy(kind="mass", mass=1.0, protect=0), [4, 5, 6, 7]),
        (RoutingPolicy(kind="mass", mass=0.5, protect=0), [0, 1, 2, 3]),
        (RoutingPolicy(kind="cache_prior", prior_lambda=10.0, protect=1), [0, 4, 5, 6]),
    ):
        ids, _ = select(logits, resident, policy, top_k=4)
        assert ids.tolist() == [expected], str(policy)


def test_a_resident_makes_up_for_a_margin_of_the_weight_and_no_more() -> None:
    """The router's own weights are 0.4, 0.3, 0.2 and 0.1; experts 4 and 5 would weigh 0.08 and 0.02."""
    logits = mx.log(mx.array([[0.40, 0.30, 0.20, 0.10, 0.08, 0.02]]))
    resident = mx.array([False, False, False, False, True, True])
    for margin, protect, expected in (
        (0.01, 1, [0, 1, 2, 3]),
        (0.03, 1, [0, 1, 2, 4]),
        (0.17, 1, [0, 1, 4, 2]),
        (0.19, 1, [0, 1, 4, 5]),
        (0.30, 3, [0, 1, 2, 4]),
        (1.00, 1, [0, 4, 5, 1]),
    ):
        ids, weights = select(logits, resident, RoutingPolicy(kind="margin", margin=margin, protect=protect), top_k=4)
        assert ids.tolist() == [expected], (margin, protect)
        own = mx.softmax(logits, axis=-1)[0, mx.array(expected)]
        assert mx.allclose(weights[0], own / own.sum(), atol=1e-6)


@given(case=cases(), margin=st.floats(0, 1), sure=st.floats(0, 1))
def test_confidence_moves_the_margin_from_one_end_to_the_other_bit_for_bit(
    case: RoutingCase, margin: float, sure: float
) -> None:
    policy = RoutingPolicy(kind="margin", margin=margin, sure_margin=sure)
    rows = len(case.logits)
    for confidence, same in (
        (None, margin),
        (np.zeros(rows), margin),
        (np.full(rows, np.nan), margin),
        (np.ones(rows), sure),
    ):
        ids, weights = route(case, policy, confidence=confidence)
        plain, plain_weights = route(case, RoutingPolicy(kind="margin", margin=same))
        assert (ids == plain).all()
        assert weights.tobytes() == plain_weights.tobytes()


def test_the_margin_grows_with_the_square_of_the_confidence() -> None:
    """Expert 2 weighs 0.2 of 0.9, and 4, which is resident, would weigh 0.08: a margin of 0.133 makes up for that."""
    logits = mx.log(mx.array([[0.40, 0.30, 0.20, 0.10, 0.08, 0.02]] * 4))
    resident = mx.array([False, False, False, False, True, True])
    policy = RoutingPolicy(kind="margin", margin=0.1, sure_margin=0.18)
    ids, _ = select(logits, resident, policy, top_k=3, confidence=mx.array([0.0, 0.6, 0.7, 1.0]))
    assert [sorted(row) for row in np.array(ids).tolist()] == [[0, 1, 2], [0, 1, 2], [0, 1, 4], [0, 1, 4]]


def test_confidences_that_are_not_one_for_each_row_are_refused() -> None:
    with pytest.raises(InputError, match="confidence: expected float32"):
        select(mx.zeros((2, 8)), None, PLAIN, top_k=2, confidence=mx.zeros(3))


def test_the_running_range_ends_with_the_row_that_it_serves() -> None:
    logits = mx.array([[0.0, 2.0], [0.0, 4.0], [mx.nan, mx.nan], [0.0, 9.0]])
    assert LogitRange().through(logits)[:, 0].tolist() == [2.0, 3.0, 3.0, 5.0]
    state = LogitRange().after(logits, 2)
    assert (state.mean.item(), state.rows.item()) == (3.0, 2.0)
    assert state.after(logits, 0) is state
    assert state.through(logits[3:]).tolist() == [[5.0]]


def test_a_window_is_routed_as_its_rows_one_by_one() -> None:
    logits = mx.random.normal((6, 32), key=mx.random.key(0)) * 3
    policy = RoutingPolicy(kind="cache_prior", prior_lambda=0.3)
    resident = mx.arange(32) % 2 == 0
    ids, _ = select(logits, resident, policy, top_k=4)
    state = LogitRange()
    for row in range(6):
        one, _ = select(logits[row : row + 1], resident, policy, top_k=4, logit_range=state)
        assert one[0].tolist() == ids[row].tolist()
        state = state.after(logits[row : row + 1], 1)
