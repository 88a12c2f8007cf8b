"""The independent reference: selection, recovery and plan in float64 NumPy, one row and one pick at a time.

Written from the specification and not from the op path or the kernels: it scales the remaining scores in
place as the ranks are reached, remembers what each expert was multiplied by, and divides by exactly that. It
shares nothing with ``RoutingPolicy.tables``. It is slow, and it is the arbiter.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata_mlx.routing.policy import RoutingPolicy

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

SMALLEST = 2.0**-126  # probabilities below the smallest normal float32 count as zero
FLOOR = 2.0**-14


@dataclass(frozen=True)
class Row:
    """One row's picks, in order. Arrays are ``[K]``.

    ``best`` is the largest remaining score at each pick and ``scores`` the score of what was picked, so that
    picks prescribed to ``route_row`` can be judged with a tolerance. ``recovered`` is the picked score,
    without the selection bias, divided by what was applied to it: the router's probability.
    """

    ids: Ints
    scores: Floats
    best: Floats
    recovered: Floats


def select(
    logits: NDArray[np.floating],
    resident: Bools | None,
    policy: RoutingPolicy | None = None,
    *,
    top_k: int,
    draft_rows: Bools | None = None,
    norm_topk: bool = True,
    router: str = "softmax",
    selection_bias: NDArray[np.floating] | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
    deltas: Floats | None = None,
    confidence: NDArray[np.floating] | None = None,
) -> tuple[Ints, Floats]:
    """Same arguments as ``strata_mlx.routing.select``, as NumPy arrays.

    A policy of kind "cache_prior" needs ``deltas [T]``, the running mean of logit ranges at each row.

    Returns:
        ids ``[T, K]`` int64 and weights ``[T, K]`` float64.
    """
    ids, weights = [], []
    for index, row in enumerate(np.asarray(logits)):
        p, dead = probabilities(row, router)
        offset = np.zeros_like(p)
        if router == "sigmoid" and not dead:
            offset = selection_offset(p, selection_bias, n_group, topk_group)
        draft = index > 0 if draft_rows is None else bool(draft_rows[index])
        known, setting = None if dead else resident, policy or RoutingPolicy()
        if setting.kind == "moce":
            picked = route_row(p, known, setting, top_k, draft, offset=offset)
            chosen, recovered = picked.ids, picked.recovered
        else:
            raised = p
            if setting.kind == "cache_prior" and known is not None:
                assert deltas is not None
                raised = row + setting.prior_lambda * deltas[index] * known
                if router == "sigmoid":
                    raised, _ = probabilities(raised, router)
                # Softmax keeps the order of its logits, so these serve as scores. What is zero stays zero.
                raised = np.where(p > 0, raised, -np.inf if router == "softmax" else 0.0)
            if setting.kind == "margin" and known is not None:
                own = sorted(range(p.size), key=lambda e: (-(p[e] + offset[e]), e))[:top_k]
                margin = setting.margin
                if setting.sure_margin is not None and confidence is not None and confidence[index] > 0:
                    sure = min(float(confidence[index]), 1.0) ** 2
                    margin = (1 - sure) * setting.margin + sure * setting.sure_margin
                raised = p + margin * p[own].sum() * (known & (p > 0))
            chosen = np.array(rerank(p, raised, offset, known, setting, top_k))
            recovered = p[chosen]
        ids.append(chosen)
        weights.append(normalise(recovered, norm_topk, scale))
    return np.array(ids, np.int64).reshape(-1, top_k), np.array(weights, np.float64).reshape(-1, top_k)


def probabilities(logits: NDArray[np.floating], router: str = "softmax") -> tuple[Floats, bool]:
    """The router's scores ``[E]`` of one row, and whether the row says nothing (all NaN or lowest)."""
    limit = float(np.finfo(np.float32).max)
    z = np.asarray(logits, np.float64).copy()
    z[np.isnan(z)] = -limit
    z = np.clip(z, -limit, limit)
    if z.max() == -limit:
        return np.full(z.shape, 1.0 / z.size), True
    with np.errstate(over="ignore", under="ignore"):
        if router == "softmax":
            p = np.exp(z - z.max())
            p /= p.sum()
        else:
            p = 1.0 / (1.0 + np.exp(-z))
    p[p < SMALLEST] = 0.0
    return p, False


def selection_offset(p: Floats, bias: NDArray[np.floating] | None, n_group: int = 1, topk_group: int = 1) -> Floats:
    """What is added to a sigmoid router's scores ``[E]`` for selection only."""
    offset = np.zeros_like(p) if bias is None else np.nan_to_num(np.asarray(bias, np.float64))
    groups = (p + offset).reshape(n_group, -1)
    value = [sum(sorted(group.tolist())[-2:]) for group in groups]
    kept = sorted(range(n_group), key=lambda g: (-value[g], g))[:topk_group]
    size = p.size // n_group
    return np.array([o if e // size in kept else -np.inf for e, o in enumerate(offset)])


def route_row(
    p: Floats,
    resident: Bools | None,
    policy: RoutingPolicy,
    top_k: int,
    draft: bool,
    *,
    offset: Floats | None = None,
    prescribed: NDArray[np.integer] | None = None,
) -> Row:
    """Routes one row of probabilities ``[E]``, or follows the ``prescribed`` ids ``[K]``."""
    b, r = _float32_exp(policy.moce_bonus), _float32_exp(policy.r1_bonus)
    m, protect = b, policy.protect
    if draft and policy.draft_moce:
        m, protect = float(np.float32(b * b)), 1
    residents = np.zeros(p.shape, bool) if resident is None else np.asarray(resident, bool)
    r1_active = r > 1 and protect > 1 and resident is not None

    offset = np.zeros_like(p) if offset is None else offset
    score, applied = p.copy(), np.ones_like(p)
    remaining = np.ones(p.shape, bool)
    ids, scores, best, recovered = [], [], [], []
    for rank in range(top_k):
        step = 1.0
        if rank == 1 and r1_active:
            step *= r
        if rank == max(1, protect) and m > 1:
            step *= m / r if r1_active else m
        touched = remaining & residents
        score[touched] *= step
        applied[touched] *= step

        candidates = np.where(remaining, score + offset, -np.inf)
        if np.isneginf(candidates.max()):  # every group that is left is masked: take the lowest remaining id
            candidates = np.where(remaining, 0.0, -np.inf)
        pick = int(np.argmax(candidates)) if prescribed is None else int(prescribed[rank])
        ids.append(pick)
        scores.append(candidates[pick])
        best.append(candidates.max())
        recovered.append(score[pick] / applied[pick])
        remaining[pick] = False
    return Row(np.array(ids), np.array(scores), np.array(best), np.array(recovered))


def rerank(
    p: Floats, raised: Floats, offset: Floats, resident: Bools | None, policy: RoutingPolicy, top_k: int
) -> list[int]:
    """The picks of an additive policy: ``raised [E]`` are the scores of cache_prior and margin after the
    protected ranks.
    """
    own = sorted(range(p.size), key=lambda e: (-(p[e] + offset[e]), e))
    first = own[: policy.protect]
    rest = [e for e in own if e not in first]
    if policy.kind in ("cache_prior", "margin"):
        rest.sort(key=lambda e: (-(raised[e] + offset[e]), e))
        return (first + rest)[:top_k]
    limit = policy.max_rank or 0
    if policy.kind == "mass":
        held, limit = 0.0, 0
        while limit < p.size and held < policy.mass * p.sum():
            held += p[own[limit]]
            limit += 1
    near = [e for e in own[:limit] if resident is not None and resident[e] and np.isfinite(offset[e])]
    chosen = (first + [e for e in near if e not in first] + [e for e in rest if e not in near])[:top_k]
    return sorted(chosen, key=own.index)


def normalise(recovered: Floats, norm_topk: bool, scale: float) -> Floats:
    """Mixing weights ``[K]`` from the probabilities of the picked experts."""
    total = max(float(recovered.sum()), FLOOR) if norm_topk else 1.0
    return recovered / total * scale


def plan(ids: NDArray[np.integer], resident: Bools | None, split: bool = True) -> tuple[Ints, Ints, Ints, Ints]:
    """The group plan by a stable sort: experts, offsets and counts ``[groups]``, entries ``[T * K]``.

    An entry is ``token * K + rank``.
    """
    flat = np.asarray(ids, np.int64).reshape(-1)
    missing = np.zeros(flat.shape, bool)
    if split and resident is not None:
        missing = ~np.asarray(resident, bool)[flat]
    order = sorted(range(flat.size), key=lambda entry: (missing[entry], flat[entry]))
    experts: list[int] = []
    offsets: list[int] = []
    for position, entry in enumerate(order):
        if position == 0 or flat[entry] != experts[-1]:
            experts.append(int(flat[entry]))
            offsets.append(position)
    counts = [end - start for start, end in itertools.pairwise([*offsets, flat.size])]
    return tuple(np.array(values, np.int64) for values in (experts, offsets, counts, order))  # type: ignore[return-value]


def _float32_exp(bonus: float) -> float:
    """The scale as kernels hold it: the nearest float32, so that both sides multiply by the same number."""
    return float(np.float32(math.exp(bonus)))
