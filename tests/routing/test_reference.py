"""The reference against cases worked out by hand from the specification."""

import math

import numpy as np
import pytest

from strata_mlx.routing import RoutingPolicy, reference

P = np.array([0.30, 0.20, 0.15, 0.12, 0.10, 0.08, 0.05])
LOGITS = np.log(P)[None]
LAST = np.array([False, False, False, True, True, True, True])  # .12 .10 .08 .05
R2, B4 = math.log(2), math.log(4)


@pytest.mark.parametrize(
    ("policy", "draft", "ids"),
    [
        (RoutingPolicy(), False, [0, 1, 2, 3]),
        (RoutingPolicy(B4), False, [0, 3, 4, 5]),
        (RoutingPolicy(R2), False, [0, 3, 1, 4]),  # .24, then .20 and .20: the lowest id
        (RoutingPolicy(R2, protect=3), False, [0, 1, 2, 3]),
        (RoutingPolicy(0.0, R2, protect=2), False, [0, 3, 1, 4]),  # the tail keeps r
        (RoutingPolicy(B4, R2, protect=2), False, [0, 3, 4, 5]),
        (RoutingPolicy(0.01, R2, protect=2), False, [0, 3, 1, 2]),  # m replaces r: .101 < .15
        (RoutingPolicy(R2, B4, protect=3, draft_moce=True), True, [0, 3, 4, 5]),  # m = 4, r off
        (RoutingPolicy(R2, B4, protect=4), False, [0, 3, 4, 5]),  # never reaches the tail
    ],
    ids=str,
)
def test_picks(policy: RoutingPolicy, draft: bool, ids: list[int]) -> None:
    got, weights = reference.select(LOGITS, LAST, policy, top_k=4, draft_rows=np.array([draft]))
    assert got[0].tolist() == ids
    assert np.abs(weights[0] - P[ids] / P[ids].sum()).max() < 1e-12


def test_prescribed_picks_are_followed_and_judged() -> None:
    row = reference.route_row(P, LAST, RoutingPolicy(R2), 2, draft=False, prescribed=np.array([1, 3]))
    assert row.scores == pytest.approx([0.20, 0.24])
    assert row.best == pytest.approx([0.30, 0.30])
    assert row.recovered == pytest.approx([0.20, 0.12])


def test_bias_and_groups_select_but_do_not_weigh() -> None:
    logits = np.array([[0.0, 0.1, 0.2, 0.3]])
    sigma = 1 / (1 + np.exp(-logits[0]))
    bias = np.array([1.0, 0.0, 0.0, 0.0])
    ids, weights = reference.select(
        logits, None, top_k=1, router="sigmoid", selection_bias=bias, norm_topk=False, scale=2.0
    )
    assert ids.tolist() == [[0]]
    assert weights[0, 0] == pytest.approx(2 * sigma[0])
    ids, _ = reference.select(logits, None, top_k=2, router="sigmoid", n_group=2, topk_group=1)
    assert ids.tolist() == [[3, 2]]


def test_a_sum_below_the_floor_is_not_made_one() -> None:
    _, weights = reference.select(np.full((1, 4), -20.0), None, top_k=2, router="sigmoid")
    assert weights[0] == pytest.approx([math.exp(-20) * 2**14] * 2, rel=1e-6)


def test_a_plan_by_hand() -> None:
    ids = np.array([[3, 1], [1, 2]])
    experts, offsets, counts, entries = reference.plan(ids, np.array([True, False, True, True]))
    assert experts.tolist() == [2, 3, 1]
    assert offsets.tolist() == [0, 1, 2]
    assert counts.tolist() == [1, 1, 2]
    assert entries.tolist() == [3, 0, 1, 2]
