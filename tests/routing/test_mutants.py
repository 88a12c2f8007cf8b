"""Every plausible mistake in the tables or the op path must be caught; the report says by which property."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from strata_mlx.routing import Executor, RoutingPolicy, ops, select_ops
from strata_mlx.routing.policy import DRAFT, FACTOR, HEAD, INVERSE
from tests.routing.properties import PROPERTIES
from tests.strategies import RoutingCase, draw_case

Tables = NDArray[np.float32]
POLICIES = (
    RoutingPolicy(),
    RoutingPolicy(0.85),
    RoutingPolicy(-1.0, 0.4, protect=3),
    RoutingPolicy(0.0, 0.4, protect=2, draft_moce=True),
    RoutingPolicy(0.85, 0.4, protect=3),
    RoutingPolicy(0.85, 0.4, protect=3, draft_moce=True),
    RoutingPolicy(1.4, 0.0, protect=2),
    RoutingPolicy(1.4, 2.0, protect=0, draft_moce=True),
    RoutingPolicy(20.0, protect=1),
)


def cases() -> list[RoutingCase]:
    rng = np.random.default_rng(0)
    fixed: list[dict[str, Any]] = [
        {"router": "softmax", "residency": "some", "norm_topk": True},
        {"router": "softmax", "residency": "all", "norm_topk": False, "scale": 2.5},
        {"router": "sigmoid", "residency": "some", "grouped": True, "biased": True},
        {"router": "sigmoid", "residency": "few", "grouped": False},
        {"tie_free": False, "dtype": "float32", "residency": "some", "grouped": False, "biased": False},
    ]
    return [draw_case(rng, policy, top_k=10, rows=4, **choice) for policy in POLICIES for choice in fixed]


CASES = cases()


def killed_by(executor: Executor, tables: Callable[..., Tables] = RoutingPolicy.tables) -> str | None:
    """The first property that does not hold with this executor and these tables."""
    with patch.object(RoutingPolicy, "tables", tables):
        for name, check in PROPERTIES.items():
            for case in CASES:
                try:
                    check(executor, case)
                except AssertionError:
                    return name
    return None


def changed_tables(change: Callable[[Tables, RoutingPolicy], None]) -> Callable[..., Tables]:
    """``RoutingPolicy.tables`` with a mistake."""
    original = RoutingPolicy.tables

    def tables(policy: RoutingPolicy, top_k: int) -> Tables:
        values = original(policy, top_k)
        change(values, policy)
        return values

    return tables


def on_ops(name: str, mutant: Callable[..., Any]) -> Executor:
    """select_ops with one of its functions replaced; the mutant gets the original as its first argument."""
    original = getattr(ops, name)

    def executor(*args: Any, **options: Any) -> Any:
        with patch.object(ops, name, lambda *a, **k: mutant(original, *a, **k)):
            return select_ops(*args, **options)

    return executor


def on_call(change: Callable[..., Any]) -> Executor:
    """A function around select_ops itself."""

    def executor(logits: mx.array, resident: Any, tables: Tables, draft_rows: mx.array, **options: Any) -> Any:
        return change(logits, resident, tables, draft_rows, options)

    return executor


def legacy_inverse(tables: Tables, policy: RoutingPolicy) -> None:
    if policy.moce_bonus <= 0:  # the tail keeps r, and the earlier kernels forgot it
        tables[:, INVERSE, max(1, policy.protect) :] = 1


def tail_one_rank_early(tables: Tables, _: RoutingPolicy) -> None:
    tables[:, :, 1:-1] = tables[:, :, 2:].copy()


def tail_one_rank_late(tables: Tables, _: RoutingPolicy) -> None:
    tables[:, :, 2:] = tables[:, :, 1:-1].copy()
    tables[:, :, 1] = 1


def inverse_one_rank_late(tables: Tables, _: RoutingPolicy) -> None:
    tables[:, INVERSE, 1:] = tables[:, INVERSE, :-1].copy()


def bonus_twice(tables: Tables, _: RoutingPolicy) -> None:
    tables[:, FACTOR] *= tables[:, FACTOR]
    tables[:, INVERSE] *= tables[:, INVERSE]


def bonus_twice_inverse_once(tables: Tables, _: RoutingPolicy) -> None:
    tables[:, FACTOR] *= tables[:, FACTOR]


def bonus_at_rank_0(tables: Tables, _: RoutingPolicy) -> None:
    tables[:, :, 0] = tables[:, :, -1]


def inverse_multiplies(tables: Tables, _: RoutingPolicy) -> None:
    tables[:, INVERSE] = tables[:, FACTOR]


def no_recovery(tables: Tables, _: RoutingPolicy) -> None:
    tables[:, INVERSE] = 1


def draft_uses_head_tables(tables: Tables, _: RoutingPolicy) -> None:
    tables[DRAFT] = tables[HEAD]


def draft_uses_head_inverse(tables: Tables, _: RoutingPolicy) -> None:
    tables[DRAFT, INVERSE] = tables[HEAD, INVERSE]


def kinds_swapped(tables: Tables, _: RoutingPolicy) -> None:
    tables[:] = tables[::-1].copy()


def bonus_of_everyone_else(logits: Any, resident: Any, tables: Any, draft_rows: Any, options: Any) -> Any:
    return select_ops(logits, None if resident is None else ~resident, tables, draft_rows, **options)


def highest_id(logits: Any, resident: Any, tables: Any, draft_rows: Any, options: Any) -> Any:
    keys, ids = ops.sort_keys, ops.top_ids

    def reversed_keys(scores: mx.array, offset: Any = None) -> Any:
        experts = mx.arange(scores.shape[-1], dtype=mx.int64)
        return keys(scores, offset) - experts + experts[::-1]

    def reversed_ids(values: mx.array, count: int, taken: Any = None) -> Any:
        return values.shape[-1] - 1 - ids(values, count, taken)

    with patch.object(ops, "sort_keys", reversed_keys), patch.object(ops, "top_ids", reversed_ids):
        return select_ops(logits, resident, tables, draft_rows, **options)


def no_floor(original: Any, picked: mx.array, p: mx.array, **options: Any) -> Any:
    total = picked.sum(axis=-1, keepdims=True)
    return picked / total * options["scale"] if options["norm_topk"] else original(picked, p, **options)


def no_scale(original: Any, picked: mx.array, p: mx.array, **options: Any) -> Any:
    return original(picked, p, **{**options, "scale": 1.0})


def scale_before_floor(original: Any, picked: mx.array, p: mx.array, **options: Any) -> Any:
    return original(picked * options["scale"], p, **{**options, "scale": 1.0})


def always_normalised(original: Any, picked: mx.array, p: mx.array, **options: Any) -> Any:
    return original(picked, p, **{**options, "norm_topk": True})


def sum_over_all_experts(original: Any, picked: mx.array, p: mx.array, **options: Any) -> Any:
    del original
    return picked / p.sum(axis=-1, keepdims=True) * options["scale"]


def never_taken(original: Any, keys: mx.array, count: int, taken: Any = None) -> Any:
    del taken
    return original(keys, count)


def nan_survives(original: Any, logits: mx.array, router: str) -> Any:
    del original
    z = logits.astype(mx.float32)
    p = mx.softmax(z, axis=-1) if router == "softmax" else mx.sigmoid(z)
    return p, mx.zeros((z.shape[0], 1), mx.bool_)


def half_precision(original: Any, logits: mx.array, router: str) -> Any:
    return original(logits.astype(mx.bfloat16), router)


def bias_in_the_weights(logits: Any, resident: Any, tables: Any, draft_rows: Any, options: Any) -> Any:
    ids, weights = select_ops(logits, resident, tables, draft_rows, **options)
    if options["selection_bias"] is not None:
        weights = weights + 0.01 * options["selection_bias"][ids]
    return ids, weights


TABLE_MUTANTS = (
    legacy_inverse,
    tail_one_rank_early,
    tail_one_rank_late,
    inverse_one_rank_late,
    bonus_twice,
    bonus_twice_inverse_once,
    bonus_at_rank_0,
    inverse_multiplies,
    no_recovery,
    draft_uses_head_tables,
    draft_uses_head_inverse,
    kinds_swapped,
)
OPS_MUTANTS: dict[str, Executor] = {
    "bonus_of_everyone_else": on_call(bonus_of_everyone_else),
    "bias_in_the_weights": on_call(bias_in_the_weights),
    "highest_id": on_call(highest_id),
    "never_taken": on_ops("top_ids", never_taken),
    "no_floor": on_ops("mixing_weights", no_floor),
    "no_scale": on_ops("mixing_weights", no_scale),
    "scale_before_floor": on_ops("mixing_weights", scale_before_floor),
    "always_normalised": on_ops("mixing_weights", always_normalised),
    "sum_over_all_experts": on_ops("mixing_weights", sum_over_all_experts),
    "nan_survives": on_ops("router_probabilities", nan_survives),
    "half_precision": on_ops("router_probabilities", half_precision),
}
Record = Callable[[str, object], None]


def report(name: str, killer: str | None, record_property: Record) -> None:
    record_property("killed_by", killer)
    print(f"mutant {name}: killed by {killer}")
    assert killer is not None


def test_the_properties_hold_on_these_cases_without_a_mutation() -> None:
    assert killed_by(select_ops) is None


@pytest.mark.parametrize("change", TABLE_MUTANTS, ids=lambda change: change.__name__)
def test_a_mutant_of_the_tables_is_killed(change: Any, record_property: Record) -> None:
    report(change.__name__, killed_by(select_ops, changed_tables(change)), record_property)


@pytest.mark.parametrize("name", OPS_MUTANTS)
def test_a_mutant_of_the_op_path_is_killed(name: str, record_property: Record) -> None:
    report(name, killed_by(OPS_MUTANTS[name]), record_property)
