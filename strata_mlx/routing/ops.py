"""Expert selection with the weights recovered, as MLX ops: lazy, deterministic, on any device.

What the specification leaves to the implementation, and every executor does alike:

- Logits are read as float32 with NaN and -inf as the lowest finite number and +inf as the highest.
- Probabilities below the smallest normal float32 count as zero, since GPUs flush them.
- A row in which no logit is above the lowest number (all NaN, say) has the probability 1/E everywhere, and
  neither residency nor a selection bias applies to it: ids 0..K-1, equal weights.
- A group mask is decided once per row by the router's own scores; residency does not choose groups.
"""

import itertools
from functools import lru_cache
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from strata_mlx.routing.policy import DRAFT, FACTOR, HEAD, INVERSE
from strata_mlx.routing.router import Router

WEIGHT_FLOOR = 2.0**-14  # smallest sum of weights that renormalisation divides by
LOWEST = float(np.finfo(np.float32).min)
_TINY = float(np.finfo(np.float32).tiny)
_TAKEN = np.iinfo(np.int64).max  # after every key

Selection = tuple[mx.array, mx.array]  # ids [T, K] uint32, weights [T, K] float32


class Executor(Protocol):
    """What computes a selection: ``select_ops``, or a kernel. The tables are all it knows of the policy."""

    def __call__(
        self,
        logits: mx.array,
        resident: mx.array | None,
        tables: NDArray[np.float32],
        draft_rows: mx.array,
        *,
        top_k: int,
        norm_topk: bool = True,
        router: str = "softmax",
        selection_bias: mx.array | None = None,
        n_group: int = 1,
        topk_group: int = 1,
        scale: float = 1.0,
    ) -> Selection: ...


def select_ops(
    logits: mx.array,
    resident: mx.array | None,
    tables: NDArray[np.float32],
    draft_rows: mx.array,
    *,
    top_k: int,
    norm_topk: bool = True,
    router: str = "softmax",
    selection_bias: mx.array | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
) -> Selection:
    """Picks ``top_k`` experts per row with the router's own weights. Inputs are taken as checked.

    Args:
        logits: ``[T, E]`` float32, bfloat16 or float16.
        resident: bool ``[E]``; None scales nothing.
        tables: float32 ``[2, 2, K]`` of ``RoutingPolicy.tables``, on the host.
        draft_rows: bool ``[T]``, which kind of row each is.
        router: "softmax", or "sigmoid" with ``selection_bias`` (float32 ``[E]``) and groups.

    Returns:
        ids ``[T, K]`` uint32 in the order of their picks, and weights ``[T, K]`` float32.
    """
    probabilities, dead, offset = router_scores(logits, router, selection_bias, n_group, topk_group)
    if resident is None:
        ids = top_ids(sort_keys(probabilities, offset), top_k)
        weights = mx.take_along_axis(probabilities, ids, axis=-1)
    else:
        present = resident & ~dead  # [T, E]
        segments, inverse = _constants(tables.tobytes())
        ids, scores = _pick_by_rank(probabilities, present, segments, draft_rows, offset)
        if router == "softmax":
            weights = mx.where(mx.take_along_axis(present, ids, axis=-1), scores * inverse(draft_rows), scores)
        else:  # the sigmoid scores are kept: nothing to recover, no digit lost
            weights = mx.take_along_axis(probabilities, ids, axis=-1)
    return ids, mixing_weights(weights, probabilities, norm_topk=norm_topk, router=router, scale=scale)


def plain_router(logits: mx.array, router: Router, bias: mx.array | None = None) -> Selection:
    """``router`` by mlx-lm's own chain of operations: ids and weights ``[..., K]``. Those of a softmax router have the
    logits' type, those of a sigmoid router, whose selection ``bias`` is float ``[E]``, are float32.

    The same experts and weights as ``select_ops`` without residency, for a fifth of its cost on a CPU, but in no
    promised order, and with a tie or a NaN decided as MLX happens to. One difference is mlx-lm's: where all biased
    scores of a group that counts are negative, experts of groups that do not count come before them.
    """
    if router.kind == "sigmoid":
        bias = mx.zeros(logits.shape[-1]) if bias is None else bias
        r = router
        return _plain_sigmoid(logits, bias, r.top_k, r.n_group, r.topk_group, r.scale, r.norm_topk, r.eps)
    p = mx.softmax(logits, axis=-1, precise=True)
    ids = mx.argpartition(p, kth=-router.top_k, axis=-1)[..., -router.top_k :]
    weights = mx.take_along_axis(p, ids, axis=-1)
    weights = weights / weights.sum(axis=-1, keepdims=True) if router.norm_topk else weights
    return ids, weights if router.scale == 1.0 else weights * router.scale


@mx.compile  # as mlx-lm does: what is fused is not always rounded alike
def _plain_sigmoid(
    logits: mx.array,
    bias: mx.array,
    top_k: int,
    n_group: int,
    topk_group: int,
    scale: float,
    norm_topk: bool,
    eps: float,
) -> Selection:
    own = mx.sigmoid(logits.astype(mx.float32))
    scores = own + bias
    if n_group > 1 and topk_group < n_group:
        scores = mx.unflatten(scores, axis=-1, shape=(n_group, -1))
        best = mx.topk(scores, 2, axis=-1).sum(axis=-1, keepdims=True)
        left_out = n_group - topk_group
        groups = mx.argpartition(best, kth=left_out - 1, axis=-2)[..., :left_out, :]
        scores = mx.flatten(mx.put_along_axis(scores, groups, mx.array(0.0), axis=-2), -2, -1)
    ids = mx.argpartition(-scores, kth=top_k - 1, axis=-1)[..., :top_k]
    weights = mx.take_along_axis(own, ids, axis=-1)
    if norm_topk:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + eps)
    return ids, weights * scale


def _pick_by_rank(
    probabilities: mx.array,
    present: mx.array,
    segments: "list[_Segment]",
    draft_rows: mx.array,
    offset: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """The ids and the scaled scores, each ``[T, K]``, of the picks at all ranks."""
    ids: mx.array | None = None
    scores = []
    for count, factor in segments:
        scaled = probabilities
        if factor is not None:
            scaled = mx.where(present, probabilities * factor(draft_rows), probabilities)
        picked = top_ids(sort_keys(scaled, offset), count, taken=ids)
        scores.append(mx.take_along_axis(scaled, picked, axis=-1))
        ids = picked if ids is None else mx.concatenate([ids, picked], axis=-1)
    assert ids is not None, "at least one expert is picked"
    return ids, mx.concatenate(scores, axis=-1)


def router_scores(
    logits: mx.array, router: str, bias: mx.array | None, n_group: int, topk_group: int
) -> tuple[mx.array, mx.array, mx.array | None]:
    """As router_probabilities(), and what is added to the probabilities for selection, None where nothing is."""
    probabilities, dead = router_probabilities(logits, router)
    if router == "softmax":
        return probabilities, dead, None
    return probabilities, dead, selection_offset(probabilities, dead, bias, n_group, topk_group)


def router_probabilities(logits: mx.array, router: str) -> tuple[mx.array, mx.array]:
    """What the router gives each expert, float32 ``[T, E]``, and which rows say nothing, bool ``[T, 1]``."""
    z = logits.astype(mx.float32)
    z = mx.where(z > LOWEST, mx.minimum(z, -LOWEST), LOWEST)  # no NaN is above anything
    dead = mx.max(z, axis=-1, keepdims=True) == LOWEST
    # The softmax of a dead row is 1/E everywhere.
    p = mx.softmax(z, axis=-1) if router == "softmax" else mx.where(dead, 1.0 / z.shape[-1], mx.sigmoid(z))
    return mx.where(p < _TINY, 0.0, p), dead


def selection_offset(
    probabilities: mx.array, dead: mx.array, bias: mx.array | None, n_group: int, topk_group: int
) -> mx.array:
    """What a sigmoid router adds to its scores for selection only: the bias, and -inf in groups left out.

    A group's score is the sum of its two best biased scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    rows, experts = probabilities.shape
    offset = (
        mx.zeros_like(probabilities)
        if bias is None
        else mx.broadcast_to(mx.nan_to_num(bias.astype(mx.float32)), (rows, experts))
    )
    if n_group > 1:
        grouped = (probabilities + offset).reshape(rows, n_group, -1)
        best = mx.topk(grouped, min(2, grouped.shape[-1]), axis=-1).sum(axis=-1)  # [T, groups]
        kept = top_ids(sort_keys(best, mx.array(0.0)), topk_group)
        mask = mx.put_along_axis(mx.full(best.shape, -mx.inf), kept, mx.array(0.0), axis=-1)
        offset = offset + mx.repeat(mask, experts // n_group, axis=-1)
    return mx.where(dead, 0.0, offset)


def sort_keys(scores: mx.array, offset: mx.array | None = None) -> mx.array:
    """Keys int64 ``[T, E]``, all different: smaller for a larger score, then for a lower id, their low half.

    ``argpartition`` and ``argsort`` promise nothing about ties. Here there are none to break.
    """
    if offset is None:
        bits = scores.view(mx.int32)  # no probability is negative, so the bits are ordered like the numbers
    else:
        bits = (scores + offset).view(mx.int32)
        bits = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return mx.arange(scores.shape[-1], dtype=mx.int64) - (bits.astype(mx.int64) << 32)


def top_ids(keys: mx.array, count: int, taken: mx.array | None = None) -> mx.array:
    """The ids ``[T, count]`` uint32 of the smallest keys, in order, that are not yet taken."""
    if taken is not None:
        keys = mx.put_along_axis(keys, taken, mx.array(_TAKEN, mx.int64), axis=-1)
    best = mx.partition(keys, count - 1, axis=-1)[:, :count]
    return mx.sort(best, axis=-1).astype(mx.uint32)  # the cast keeps the low half, the id


def mixing_weights(
    picked: mx.array, probabilities: mx.array, *, norm_topk: bool, router: str, scale: float
) -> mx.array:
    """Mixing weights float32 ``[T, K]`` from the probabilities of the picked experts ``[T, K]`` and of all.

    Sums take the smallest terms first, and many terms in parts, or the weights would miss the 2e-7 that the
    specification allows: in selection order 16 terms cost 3.4e-7; MLX's softmax of 1,024 is 3e-6 off on CPU.
    """
    if norm_topk:
        total = mx.sort(picked, axis=-1).sum(axis=-1, keepdims=True)
        weights = picked / mx.maximum(total, WEIGHT_FLOOR)
    elif router == "softmax":
        weights = picked / _sum_in_parts(probabilities)
    else:
        weights = picked
    return weights if scale == 1.0 else weights * scale


def _sum_in_parts(values: mx.array) -> mx.array:
    """The sums of rows ``[T, E]`` as ``[T, 1]``: sorted, in parts of 32."""
    rows, columns = values.shape
    parts = mx.pad(mx.sort(values, axis=-1), [(0, 0), (-columns % 32, 0)]).reshape(rows, -1, 32)
    return parts.sum(axis=-1).sum(axis=-1, keepdims=True)


class _PerRow:
    """Constants ``[2, ...]`` of both kinds of rows, as what each row needs."""

    def __init__(self, values: NDArray[np.float32]):
        values = values.reshape(2, -1)
        self._head, self._draft = mx.array(values[HEAD]), mx.array(values[DRAFT])
        self._same = np.array_equal(values[HEAD], values[DRAFT])

    def __call__(self, draft_rows: mx.array) -> mx.array:
        """One row that broadcasts where both kinds agree, else ``[T, ...]``."""
        return self._head if self._same else mx.where(draft_rows[:, None], self._draft, self._head)


_Segment = tuple[int, _PerRow | None]  # how many picks, and what residents are scaled by


@lru_cache
def _constants(tables: bytes) -> tuple[list[_Segment], _PerRow]:
    """Of tables float32 ``[2, 2, K]``: the runs of ranks that share their factors, and all inverse factors.

    Within a run, the picks are the best of a fixed score.
    """
    values = np.frombuffer(tables, np.float32).reshape(2, 2, -1)
    factors = values[:, FACTOR]
    changes = np.flatnonzero((factors[:, 1:] != factors[:, :-1]).any(axis=0)) + 1
    edges = [0, *changes.tolist(), factors.shape[-1]]
    segments = [
        (stop - start, _PerRow(factors[:, start]) if (factors[:, start] != 1).any() else None)
        for start, stop in itertools.pairwise(edges)
    ]
    return segments, _PerRow(values[:, INVERSE])
