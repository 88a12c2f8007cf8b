"""What a round is worth: the formulas by hand, and the choices against trying everything."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx.errors import InputError
from strata_mlx.speculation.economics import (
    best_k,
    best_rate,
    expected_tokens,
    pays,
    reach_probabilities,
    round_costs,
)
from tests.errors import refuses
from tests.strategies import likelihoods

VERIFY = [1.0, 1.02, 1.25, 1.60]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Any, Any, float]:
    """Acceptances ``[N, n]``, verify costs ``[N, n + 1]`` in any order, a draft cost."""
    count, n = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    acceptances = draw(st.lists(likelihoods, min_size=count * n, max_size=count * n))
    costs = draw(st.lists(st.floats(0.125, 8), min_size=count * (n + 1), max_size=count * (n + 1)))
    return np.reshape(acceptances, (count, n)), np.reshape(costs, (count, n + 1)), draw(st.floats(0, 1))


def test_the_formulas_by_hand() -> None:
    acceptances = [0.8, 0.5, 0.25]
    assert reach_probabilities(acceptances) == pytest.approx([0.8, 0.4, 0.1])
    assert expected_tokens(acceptances) == pytest.approx([1, 1.8, 2.2, 2.3])
    assert round_costs(VERIFY, 0.15) == pytest.approx([1.15, 1.17, 1.40, 1.75])
    assert round_costs(VERIFY, [0.0, 0.1, 0.2, 0.3]) == pytest.approx([1, 1.12, 1.45, 1.90])
    assert best_k(acceptances, VERIFY, 0.15) == 2  # 0.87, 1.538, 1.571, 1.314
    assert expected_tokens(np.zeros((2, 0))).shape == (2, 1)


def test_a_draft_pays_where_its_ratio_beats_that_of_the_round() -> None:
    assert pays(0.5, 0.2, 1.0, 1.0)
    assert not pays(0.2, 0.2, 1.0, 1.0)  # as good as the round: no improvement
    assert not pays(0.1, 0.2, 1.0, 1.0)
    assert pays(1e-9, 0.0, 1.0, 1.0)  # a free row
    assert not pays(0.0, 0.0, 1.0, 1.0)
    assert pays(0.0, -0.1, 1.0, 1.0)


@given(case=rounds())
def test_a_draft_pays_exactly_where_it_improves_the_round(case: Any) -> None:
    acceptances, costs, draft_cost = case
    reach, tokens, cost = (
        reach_probabilities(acceptances),
        expected_tokens(acceptances),
        round_costs(costs, draft_cost),
    )
    gain = tokens[:, 1:] * cost[:, :-1] - tokens[:, :-1] * cost[:, 1:]
    clear = np.abs(gain) > 1e-9
    verdict = pays(reach, np.diff(cost, axis=-1), tokens[:, :-1], cost[:, :-1])
    assert (verdict == (gain > 0))[clear].all()


@given(case=rounds(), rate=st.none() | st.floats(0, 4))
def test_the_best_number_is_the_first_of_the_best(case: Any, rate: float | None) -> None:
    acceptances, costs, draft_cost = case
    for i, k in enumerate(best_k(acceptances, costs, draft_cost, rate=rate)):
        tokens, cost = expected_tokens(acceptances[i]), round_costs(costs[i], draft_cost)
        worth = list(tokens / cost if rate is None else tokens - rate * cost)
        assert k == worth.index(max(worth))


@given(case=rounds())
def test_the_best_rate_is_that_of_the_best_choice_of_all(case: Any) -> None:
    acceptances, costs, draft_cost = case
    tokens, cost = expected_tokens(acceptances), round_costs(costs, draft_cost)
    index = range(len(tokens))
    rates = [
        sum(tokens[i, k[i]] for i in index) / sum(cost[i, k[i]] for i in index)
        for k in product(range(tokens.shape[1]), repeat=len(tokens))
    ]
    rate = best_rate(acceptances, costs, draft_cost)
    assert rate == pytest.approx(max(rates))
    k = best_k(acceptances, costs, draft_cost, rate=rate)
    assert tokens[index, k].sum() / cost[index, k].sum() == pytest.approx(rate)


@given(acceptances=st.lists(likelihoods, min_size=3, max_size=3))
def test_with_rising_marginal_costs_the_rule_walks_to_the_best(acceptances: list[float]) -> None:
    reach, tokens, cost = reach_probabilities(acceptances), expected_tokens(acceptances), round_costs(VERIFY, 0.15)
    k = 0
    while k < 3 and pays(reach[k], cost[k + 1] - cost[k], tokens[k], cost[k]):
        k += 1
    assert tokens[k] / cost[k] == pytest.approx((tokens / cost).max())


@pytest.mark.parametrize("acceptances", [[1.1], [-0.1], [np.nan], 0.5])
def test_what_is_no_acceptance_is_refused(acceptances: Any) -> None:
    with refuses(InputError, "acceptances"):
        best_k(acceptances, [1, 1])


@pytest.mark.parametrize("costs", [[1, 0], [1, np.inf], [np.nan, 1], [1, -1]])
def test_what_is_no_cost_is_refused(costs: Any) -> None:
    with refuses(InputError, "cost"):
        best_k([0.5], costs)
    with refuses(InputError, "2 drafts"):
        best_rate([[0.5, 0.5]], [1, 1])
