"""Every plausible mistake in the gates must be caught; the report says by which property."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from strata_mlx.speculation.retention import FloorGate, RetentionPolicy
from tests.conftest import Report
from tests.speculation.retention_properties import PROPERTIES, Check
from tests.strategies import observations, retention_policies

SEARCH = settings(
    max_examples=150,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
CASES = st.tuples(retention_policies(), st.lists(observations, max_size=10))


def killed_by() -> str | None:
    """The first property for which some case is found that does not hold."""

    def fails(check: Check, case: tuple[RetentionPolicy, list[float]]) -> bool:
        try:
            check(*case)
        except AssertionError:
            return True
        return False

    for name, check in PROPERTIES.items():
        try:
            find(CASES, partial(fails, check), settings=SEARCH)
        except NoSuchExample:
            continue
        return name
    return None


@contextmanager
def passes(rule: Callable[[FloorGate, float], bool]) -> Iterator[None]:
    """Another rule for one candidate."""
    with patch.object(FloorGate, "_passes", rule):
        yield


def _floors(gate: FloorGate, p: float, product: float) -> bool:
    return 0 <= p <= 1 and p >= gate._policy.floor(gate.kept) and product >= gate._policy.min_cum_p


def strict_gate(gate: FloorGate, p: float) -> bool:
    return bool(p > gate._policy.floor(gate.kept)) if gate._legacy else _floors(gate, p, gate._product)


def strict_product(gate: FloorGate, p: float) -> bool:
    gate._product *= p
    if gate._legacy:
        return p >= gate._policy.floor(gate.kept)
    return _floors(gate, p, gate._product) and (not gate._policy.min_cum_p or gate._product > gate._policy.min_cum_p)


def strict_schedule(gate: FloorGate, p: float) -> bool:
    gate._product *= p
    if gate._legacy:
        return p >= gate._policy.floor(gate.kept)
    return _floors(gate, p, gate._product) and (gate._policy.schedule is None or p > gate._policy.floor(gate.kept))


def product_of_floats(gate: FloorGate, p: float) -> bool:
    if gate._legacy:
        return p >= gate._policy.floor(gate.kept)
    with np.errstate(all="ignore"):
        gate._product = float(np.float32(gate._product) * np.float32(p))
    return _floors(gate, p, gate._product)


def product_without_this_candidate(gate: FloorGate, p: float) -> bool:
    if gate._legacy:
        return p >= gate._policy.floor(gate.kept)
    before, gate._product = gate._product, gate._product * p
    return _floors(gate, p, before)


def product_kept_between_rounds() -> Callable[[FloorGate, float], bool]:
    products: dict[RetentionPolicy, float] = {}

    def rule(gate: FloorGate, p: float) -> bool:
        if gate._legacy:
            return p >= gate._policy.floor(gate.kept)
        products[gate._policy] = products.get(gate._policy, 1.0) * p
        return _floors(gate, p, products[gate._policy])

    return rule


def either_gate(gate: FloorGate, p: float) -> bool:
    if gate._legacy:
        return p >= gate._policy.floor(gate.kept)
    gate._product *= p
    return 0 <= p <= 1 and (p >= gate._policy.floor(gate.kept) or gate._product >= gate._policy.min_cum_p)


def anything_observed(gate: FloorGate, p: float) -> bool:
    gate._product *= p
    floors = gate._policy.floor(gate.kept), gate._policy.min_cum_p
    return not (p < floors[0] or (not gate._legacy and gate._product < floors[1]))  # a NaN passes


def old_rule_checks_too(gate: FloorGate, p: float) -> bool:
    gate._product *= p
    return _floors(gate, p, gate._product)


def schedule_not_repeated(policy: RetentionPolicy, step: int) -> float:
    return policy.min_p if policy.schedule is None or step >= len(policy.schedule) else policy.schedule[step]


def schedule_begins_again(policy: RetentionPolicy, step: int) -> float:
    return policy.min_p if policy.schedule is None else policy.schedule[step % len(policy.schedule)]


def schedule_one_step_late(policy: RetentionPolicy, step: int) -> float:
    return policy.min_p if policy.schedule is None else policy.schedule[min(max(step - 1, 0), len(policy.schedule) - 1)]


def schedule_and_min_p(policy: RetentionPolicy, step: int) -> float:
    return max(policy.min_p, *(policy.schedule or (0.0,))[min(step, len(policy.schedule or (0.0,)) - 1) :][:1])


def goes_on_after_a_failure(gate: FloorGate, p: Any) -> bool:
    keep = gate._passes(float(p))
    gate.kept += keep
    return keep


def never_appends_a_failure(gate: FloorGate, p: Any) -> bool:
    keep = gate.open = gate.open and gate._passes(float(p))
    gate.kept += keep
    return keep


def always_appends_a_failure(gate: FloorGate, p: Any) -> bool:
    was_open = gate.open
    gate.open = gate.open and gate._passes(float(p))
    gate.kept += was_open
    return was_open


def a_schedule_of_zero_does_not_opt_in(policy: RetentionPolicy) -> bool:
    return bool(policy.schedule and any(policy.schedule)) or policy.min_cum_p > 0


MUTANTS: dict[str, Any] = {
    **{
        rule.__name__: passes(rule)
        for rule in (
            strict_gate,
            strict_product,
            strict_schedule,
            product_of_floats,
            product_without_this_candidate,
            either_gate,
            anything_observed,
            old_rule_checks_too,
        )
    },
    "product_not_reset_between_rounds": passes(product_kept_between_rounds()),
    **{
        floor.__name__: patch.object(RetentionPolicy, "floor", floor)
        for floor in (schedule_not_repeated, schedule_begins_again, schedule_one_step_late, schedule_and_min_p)
    },
    **{
        offer.__name__: patch.object(FloorGate, "offer", offer)
        for offer in (goes_on_after_a_failure, never_appends_a_failure, always_appends_a_failure)
    },
    "a_schedule_of_zero_does_not_opt_in": patch.object(
        RetentionPolicy, "opted_in", property(a_schedule_of_zero_does_not_opt_in)
    ),
}


def test_the_properties_hold_in_this_search_without_a_mutation() -> None:
    assert killed_by() is None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str, report: Report) -> None:
    with MUTANTS[name]:
        report(name, killed_by())
