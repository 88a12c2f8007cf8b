"""Selection and recovery, on every executor."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx.errors import InputError
from strata_mlx.routing import Executor, RoutingPolicy, reference, select
from tests.routing.properties import PROPERTIES, TOLERANCE, own_weights, run
from tests.strategies import RoutingCase, extreme_cases, policies, routing_cases


@pytest.mark.parametrize("name", PROPERTIES)
@given(case=routing_cases())
def test_property(executor: Executor, name: str, case: RoutingCase) -> None:
    PROPERTIES[name](executor, case)


@pytest.mark.parametrize("rank", range(10))
@given(policy=policies(), data=st.data())
def test_the_weight_of_a_resident_is_recovered_at_rank(
    executor: Executor, rank: int, policy: RoutingPolicy, data: st.DataObject
) -> None:
    assert_recovered(
        executor, data.draw(routing_cases(policy=policy, top_k=10, router="softmax", residency="all")), rank
    )


def assert_recovered(executor: Executor, case: RoutingCase, rank: int) -> None:
    """The weights at ``rank`` are the router's own."""
    ids, weights = run(executor, case)
    error = np.abs(weights[:, rank] - own_weights(case, ids)[:, rank])
    assert error.max() <= TOLERANCE * case.options["scale"]


@given(case=routing_cases(tie_free=True, dtype="float32", biased=False))
def test_ids_are_those_of_the_reference(executor: Executor, case: RoutingCase) -> None:
    ids, _ = run(executor, case)
    expected, _ = reference.select(
        case.logits,
        case.resident,
        case.policy,
        top_k=case.top_k,
        draft_rows=case.draft_rows,
        **case.options,
    )
    assert (ids == expected).all()


@pytest.mark.parametrize(
    "name",
    [
        "ids_are_distinct_and_in_range",
        "weights_are_the_routers_own",
        "without_a_residency_map_it_is_the_plain_router",
    ],
)
@given(case=extreme_cases())
def test_property_with_extreme_logits(executor: Executor, name: str, case: RoutingCase) -> None:
    PROPERTIES[name](executor, case)
    assert np.isfinite(run(executor, case)[1]).all()


@pytest.mark.parametrize(("experts", "top_k", "rows"), [(1024, 16, 3), (1, 1, 1), (16, 16, 2), (512, 10, 2048)])
def test_sizes(executor: Executor, experts: int, top_k: int, rows: int) -> None:
    logits = np.random.default_rng(0).normal(size=(rows, experts)).astype(np.float32)
    resident = np.arange(experts) % 2 == 0
    case = RoutingCase(logits, resident, RoutingPolicy(0.85), top_k, options={"norm_topk": True, "scale": 1.0})
    ids, weights = run(executor, case)
    assert np.abs(weights - own_weights(case, ids)).max() <= TOLERANCE


def test_no_rows_give_no_selections(executor: Executor) -> None:
    ids, weights = select(mx.zeros((0, 8)), mx.ones(8, mx.bool_), RoutingPolicy(1.0), top_k=2, executor=executor)
    assert ids.shape == weights.shape == (0, 2)


def test_residency_does_not_choose_the_groups(executor: Executor) -> None:
    logits = np.array([[2.0, 1.9, 1.8, 1.7, 0.1, 0.0, -0.1, -0.2]], np.float32)
    resident = np.arange(8) >= 4
    options: dict[str, Any] = {
        "norm_topk": True,
        "scale": 1.0,
        "router": "sigmoid",
        "n_group": 2,
        "topk_group": 1,
    }
    ids, _ = run(executor, RoutingCase(logits, resident, RoutingPolicy(20.0), 2, options=options))
    assert ids.tolist() == [[0, 1]]


def test_a_checked_row_of_nan_is_an_error_that_names_layer_and_row() -> None:
    logits = mx.where(mx.arange(3)[:, None] == 1, mx.nan, mx.zeros((3, 8)))
    with pytest.raises(InputError, match="layer 7, row 1"):
        select(logits, None, None, top_k=2, check=True, layer=7)
    with pytest.raises(InputError, match="row 1"):
        select(logits, None, None, top_k=2, check=True)
    select(mx.zeros((3, 8)), None, None, top_k=2, check=True, layer=7)


GOOD: dict[str, Any] = {"logits": mx.zeros((2, 8)), "resident": None, "policy": None, "top_k": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": mx.zeros((8,))}, "router logits"),
        ({"logits": mx.zeros((2, 8), mx.int32)}, "router logits"),
        ({"resident": mx.zeros((7,), mx.bool_)}, "resident"),
        ({"resident": mx.zeros((8,), mx.float32)}, "resident"),
        ({"draft_rows": mx.zeros((3,), mx.bool_)}, "draft_rows"),
        ({"router": "top"}, "router is 'top'"),
        ({"selection_bias": mx.zeros((8,))}, "selection_bias is for sigmoid"),
        ({"selection_bias": mx.zeros((7,)), "router": "sigmoid"}, "selection_bias: expected"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": True}, "top_k is True"),
        ({"top_k": 9}, "top_k is 9"),
        ({"n_group": 2}, "groups are for sigmoid"),
        ({"n_group": 3, "router": "sigmoid"}, "cannot keep 1 of 3"),
        ({"n_group": 2, "topk_group": 3, "router": "sigmoid"}, "cannot keep 3 of 2"),
        ({"n_group": 4, "topk_group": 1, "router": "sigmoid", "top_k": 3}, "chooses from 2 experts"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": True}, "scale is True"),
        ({"policy": RoutingPolicy(1.0, protect=3)}, "protect is 3"),
        ({"policy": RoutingPolicy(kind="max_rank", max_rank=1)}, "max_rank is 1"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {**GOOD, **changes}
    with pytest.raises(InputError, match=message):
        select(**arguments)


@given(case=routing_cases(rows=4, tie_free=True))
def test_a_row_does_not_depend_on_the_other_rows(executor: Executor, case: RoutingCase) -> None:
    ids, weights = run(executor, case)
    for row in range(4):
        alone = replace(case, logits=case.logits[row : row + 1], draft_rows=case.drafts[row : row + 1])
        one, one_weights = run(executor, alone)
        assert (one[0] == ids[row]).all()
        assert one_weights.tobytes() == weights[row].tobytes()
