"""What every executor of the selection must satisfy: checks that raise AssertionError, in one registry.

The same checks run on the executors and, in ``test_mutants.py``, on broken ones.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from strata_mlx.routing import Executor, RoutingPolicy, reference, select
from tests.strategies import LOGIT_TYPES, RoutingCase

TOLERANCE = 2e-7  # on a weight, from the specification
NEAR = 2e-5  # relative: scores this close may be picked in either order, for float32 exponentials differ

Check = Callable[[Executor, RoutingCase], None]
PROPERTIES: dict[str, Check] = {}


def _property(check: Check) -> Check:
    PROPERTIES[check.__name__] = check
    return check


def run(executor: Executor, case: RoutingCase, **changes: Any) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """ids and weights ``[T, K]`` of a case."""
    case = replace(case, **changes)
    ids, weights = select(
        mx.array(case.logits).astype(LOGIT_TYPES[case.dtype]),
        None if case.resident is None else mx.array(case.resident),
        case.policy,
        top_k=case.top_k,
        draft_rows=None if case.draft_rows is None else mx.array(case.draft_rows),
        selection_bias=None if case.bias is None else mx.array(case.bias),
        executor=executor,
        **case.options,
    )
    assert ids.dtype == mx.uint32
    assert weights.dtype == mx.float32
    return np.array(ids), np.array(weights)


def own_weights(case: RoutingCase, ids: NDArray[np.uint32]) -> NDArray[np.float64]:
    """The router's own weights ``[T, K]`` over given ids."""
    rows = []
    for logits, picks in zip(case.logits, ids, strict=True):
        p, _ = reference.probabilities(logits, case.router)
        rows.append(reference.normalise(p[picks], case.options["norm_topk"], case.options["scale"]))
    return np.array(rows)


def _same_bits(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return bool((a[0] == b[0]).all() and a[1].tobytes() == b[1].tobytes())


@_property
def ids_are_distinct_and_in_range(executor: Executor, case: RoutingCase) -> None:
    ids, _ = run(executor, case)
    assert ids.shape == (len(case.logits), case.top_k)
    assert ids.max() < case.logits.shape[1]
    assert all(len(set(row.tolist())) == case.top_k for row in ids)


@_property
def weights_are_the_routers_own(executor: Executor, case: RoutingCase) -> None:
    ids, weights = run(executor, case)
    assert np.abs(weights - own_weights(case, ids)).max() <= TOLERANCE * case.options["scale"]


@_property
def each_pick_has_the_best_remaining_score(executor: Executor, case: RoutingCase) -> None:
    ids, _ = run(executor, case)
    for row, picks in enumerate(ids):
        p, dead = reference.probabilities(case.logits[row], case.router)
        offset = np.zeros_like(p)
        if case.router == "sigmoid" and not dead:
            groups = {name: case.options[name] for name in ("n_group", "topk_group") if name in case.options}
            offset = reference.selection_offset(p, case.bias, **groups)
        known = None if dead else case.resident
        draft = bool(case.drafts[row])
        followed = reference.route_row(p, known, case.policy, case.top_k, draft, offset=offset, prescribed=picks)
        slack = NEAR * (np.abs(followed.best) + np.abs(followed.scores))
        slack += NEAR * np.abs(offset[np.isfinite(offset)]).max()
        assert (followed.scores >= followed.best - slack).all()


@_property
def a_tie_goes_to_the_lowest_id(executor: Executor, case: RoutingCase) -> None:
    ids, _ = run(executor, case)
    if case.bias is not None or "n_group" in case.options:
        return
    resident = np.zeros(case.logits.shape[1], bool) if case.resident is None else case.resident
    for logits, picks in zip(case.logits, ids, strict=True):
        for rank, pick in enumerate(picks):
            equal = np.flatnonzero((logits == logits[pick]) & (resident == resident[pick]))
            assert set(equal[equal < pick].tolist()) <= set(picks[:rank].tolist())


@_property
def without_a_residency_map_it_is_the_plain_router(executor: Executor, case: RoutingCase) -> None:
    plain = run(executor, case, resident=None, policy=RoutingPolicy())
    nobody = np.zeros(case.logits.shape[1], bool)
    everybody = np.ones_like(nobody)
    off = replace(case.policy, moce_bonus=min(case.policy.moce_bonus, 0.0), r1_bonus=-1.0, draft_moce=False)
    assert _same_bits(run(executor, case, resident=None), plain)
    assert _same_bits(run(executor, case, resident=nobody), plain)
    assert _same_bits(run(executor, case, resident=everybody, policy=off), plain)


@_property
def r1_has_no_effect_on_draft_rows(executor: Executor, case: RoutingCase) -> None:
    rows = np.ones(len(case.logits), bool)
    with_r1 = case.with_policy(draft_moce=True, r1_bonus=0.4)
    without = case.with_policy(draft_moce=True, r1_bonus=0.0)
    assert _same_bits(run(executor, with_r1, draft_rows=rows), run(executor, without, draft_rows=rows))


@_property
def a_larger_bonus_never_selects_fewer_residents(executor: Executor, case: RoutingCase) -> None:
    # With r1 active, m <= 1 leaves r on the tail while a small m > 1 replaces it, so m must be above 1 twice.
    if case.resident is None:
        return
    for weak, strong in (
        ({"r1_bonus": 0.0, "moce_bonus": -1.0}, {"r1_bonus": 0.0, "moce_bonus": 0.5}),
        ({"moce_bonus": 0.2}, {"moce_bonus": 2.0}),
        ({"r1_bonus": 0.1}, {"r1_bonus": 2.0}),
    ):
        few, _ = run(executor, case.with_policy(**weak))
        many, _ = run(executor, case.with_policy(**strong))
        assert (case.resident[many].sum(axis=1) >= case.resident[few].sum(axis=1)).all()


@_property
def protected_ranks_hold_the_routers_picks(executor: Executor, case: RoutingCase) -> None:
    case = case.with_policy(r1_bonus=0.0)
    plain, _ = run(executor, case, policy=RoutingPolicy())
    ids, _ = run(executor, case)
    for row, draft in enumerate(case.drafts):
        protect = 1 if draft and case.policy.draft_moce else max(1, case.policy.protect)
        assert (ids[row, :protect] == plain[row, :protect]).all()


@_property
def permuting_the_experts_permutes_the_result(executor: Executor, case: RoutingCase) -> None:
    if not case.tie_free or "n_group" in case.options:
        return
    order = np.random.default_rng(0).permutation(case.logits.shape[1])
    ids, weights = run(executor, case)
    resident = None if case.resident is None else case.resident[order]
    moved, moved_weights = run(executor, case, logits=case.logits[:, order], resident=resident)
    assert (order[moved] == ids).all()
    assert np.abs(moved_weights - weights).max() <= 2 * TOLERANCE * case.options["scale"]


@_property
def tiny_sums_are_divided_by_the_floor(executor: Executor, case: RoutingCase) -> None:
    options = {"router": "sigmoid", "norm_topk": True, "scale": 1.0}
    faint = replace(case, logits=case.logits - case.logits.max() - 20, bias=None, options=options, dtype="float32")
    ids, weights = run(executor, faint)
    assert weights.sum(axis=1).max() < 0.5
    assert np.abs(weights - own_weights(faint, ids)).max() <= TOLERANCE


@_property
def a_row_of_nan_gets_the_first_ids_with_equal_weights(executor: Executor, case: RoutingCase) -> None:
    ids, weights = run(executor, case, logits=np.full_like(case.logits, np.nan))
    assert (ids == np.arange(case.top_k)).all()
    assert np.isfinite(weights).all()
    assert (weights == weights[:, :1]).all()
    assert (weights > 0).all()


@_property
def infinity_wins_and_nan_loses(executor: Executor, case: RoutingCase) -> None:
    if case.bias is not None or "n_group" in case.options:
        return
    logits = case.logits.copy()
    logits[:, 3], logits[:, 5:] = np.inf, np.nan
    ids, weights = run(executor, case, logits=logits)
    assert np.isfinite(weights).all()
    assert all(len(set(row.tolist())) == case.top_k for row in ids)
    if case.router == "softmax":
        assert (ids[:, 0] == 3).all()
        assert (weights[:, 0] == case.options["scale"]).all()
    else:
        assert all(set(row[:5].tolist()) <= set(range(5)) for row in ids)
