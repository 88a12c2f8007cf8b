"""What the retention policy must satisfy, for any policy and any observations: checks in one registry.

The same checks run on the policy and, in ``test_retention_mutants.py``, on broken ones.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.retention_decisions import reference
from strata_mlx.speculation.retention import PATHS, RetentionPolicy

Check = Callable[[RetentionPolicy, list[float]], None]
PROPERTIES: dict[str, Check] = {}


def _property(check: Check) -> Check:
    PROPERTIES[check.__name__] = check
    return check


def _sound(probs: list[float]) -> list[float]:
    return [p for p in probs if 0 <= p <= 1]


@_property
def equality_passes(policy: RetentionPolicy, probs: list[float]) -> None:
    probs = _sound(probs)[:8]
    if not probs:
        return
    for floors in (RetentionPolicy(min(probs)), RetentionPolicy(policy.min_p, tuple(probs))):
        assert floors.retain(probs) == len(probs)
    product = math.prod(probs)  # of doubles, from 1, in order
    assert RetentionPolicy(min_cum_p=product).retain(probs) == len(probs)


@_property
def the_next_number_above_does_not_pass(policy: RetentionPolicy, probs: list[float]) -> None:
    probs = [p for p in _sound(probs) if p < 1]
    if not probs:
        return
    last, product = math.nextafter(probs[-1], 1), math.prod(probs)
    schedule = (*([0.0] * (len(probs) - 1))[:7], last)
    if len(probs) <= 8:
        assert RetentionPolicy(policy.min_p, schedule).retain(probs) == len(probs) - 1
    assert RetentionPolicy(min_cum_p=math.nextafter(product, 1)).retain(probs) < len(probs)


@_property
def what_keeps_all_keeps_every_probability(policy: RetentionPolicy, probs: list[float]) -> None:
    sound = _sound(probs)
    for each in (policy, RetentionPolicy(), RetentionPolicy(schedule=(0.0,)), RetentionPolicy(5e-324)):
        if each.keeps_all:
            assert all(each.retain(sound, path) == len(sound) for path in PATHS)
        else:
            assert any(each.retain([p], "chained") == 0 for p in (0.0, math.nan))


@_property
def every_round_starts_anew(policy: RetentionPolicy, probs: list[float]) -> None:
    for path in PATHS:
        first = policy.retain(probs, path)
        gate = policy.gate(path)
        for p in probs:
            gate.offer(p)
        assert policy.retain(probs, path) == first == gate.kept


@_property
def nothing_is_kept_after_a_stop(policy: RetentionPolicy, probs: list[float]) -> None:
    for path in PATHS:
        gate = policy.gate(path)
        kept = [gate.offer(p) for p in [*probs, *probs]]
        assert kept == [True] * gate.kept + [False] * (len(kept) - gate.kept)
        assert gate.open == (gate.kept == len(kept) and policy.retain([*probs, *probs, 2.0], path) >= len(kept))


@_property
def a_prefix_of_the_drafts_gets_a_prefix_of_the_decision(policy: RetentionPolicy, probs: list[float]) -> None:
    for path in PATHS:
        whole = policy.retain(probs, path)
        assert [policy.retain(probs[:n], path) for n in range(len(probs) + 1)] == [
            min(n, whole) for n in range(len(probs) + 1)
        ]


@_property
def a_higher_floor_never_retains_more(policy: RetentionPolicy, probs: list[float]) -> None:
    higher = [replace(policy, min_p=(policy.min_p + 1) / 2)]
    if policy.min_cum_p:
        higher.append(replace(policy, min_cum_p=(policy.min_cum_p + 1) / 2))
    if policy.schedule:
        higher += [
            replace(policy, schedule=(*policy.schedule[:i], 1.0, *policy.schedule[i + 1 :]))
            for i in range(len(policy.schedule))
        ]
    for path in PATHS:
        assert all(other.retain(probs, path) <= policy.retain(probs, path) for other in higher)


@_property
def both_gates_retain_what_each_does(policy: RetentionPolicy, probs: list[float]) -> None:
    floors = policy.schedule or (policy.min_p,)
    only_floors, only_product = RetentionPolicy(schedule=floors), RetentionPolicy(0, (0,), policy.min_cum_p)
    both = RetentionPolicy(0, floors, policy.min_cum_p)
    assert both.retain(probs) == min(only_floors.retain(probs), only_product.retain(probs))


@_property
def a_schedule_replaces_min_p(policy: RetentionPolicy, probs: list[float]) -> None:
    schedule = policy.schedule or (0.0,)
    decisions = {RetentionPolicy(min_p, schedule, policy.min_cum_p).retain(probs) for min_p in (0, policy.min_p, 1)}
    assert len(decisions) == 1


@_property
def the_last_of_a_schedule_repeats(policy: RetentionPolicy, probs: list[float]) -> None:
    schedule = (policy.schedule or (policy.min_p,))[:2]
    long = RetentionPolicy(0, (*schedule, *schedule[-1:] * 6), policy.min_cum_p)
    for start in ([], [1.0] * len(schedule)):
        assert RetentionPolicy(0, schedule, policy.min_cum_p).retain(start + probs) == long.retain(start + probs)


@_property
def a_floor_for_every_step_is_min_p(policy: RetentionPolicy, probs: list[float]) -> None:
    probs = _sound(probs)
    for floor in (RetentionPolicy(policy.min_p), RetentionPolicy(policy.min_p, None, policy.min_cum_p)):
        scheduled = replace(floor, schedule=(policy.min_p,))
        assert scheduled.retain(probs) == floor.retain(probs)


@_property
def the_new_rule_stops_at_an_observation_that_is_no_probability(policy: RetentionPolicy, probs: list[float]) -> None:
    if policy.opted_in:
        sound = [0 <= p <= 1 for p in probs]
        first = sound.index(False) if False in sound else len(probs)
        assert all(policy.retain(probs, path) <= first for path in PATHS)
        for bad in (math.nan, math.inf, -math.inf, 1.5, -0.5):
            assert all(RetentionPolicy(0, (0.0,)).retain([1.0, bad, 1.0], path) == 1 for path in PATHS)


@_property
def the_old_rule_only_compares(policy: RetentionPolicy, probs: list[float]) -> None:
    old = RetentionPolicy(policy.min_p)
    passes = [p >= policy.min_p for p in probs]
    assert old.retain(probs) == (passes.index(False) if False in passes else len(probs))


@_property
def only_the_old_rule_appends_its_first_failure_and_only_stepwise(policy: RetentionPolicy, probs: list[float]) -> None:
    chained, stepwise = (policy.retain(probs, path) for path in PATHS)
    assert stepwise == (chained if policy.opted_in else min(chained + 1, len(probs)))


@_property
def decisions_are_those_of_the_reference(policy: RetentionPolicy, probs: list[float]) -> None:
    expected = reference(
        np.array([[*probs, 0.0]]),
        np.array([len(probs)]),
        np.array([policy.min_p]),
        [policy.schedule],
        np.array([policy.min_cum_p]),
    )
    for path in PATHS:
        assert policy.retain(probs, path) == expected[path][0]
