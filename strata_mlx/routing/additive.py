"""The policies that are no table of factors, as MLX ops: re-rankings of *Mixture of Cache-Conditional Experts*
(arXiv 2412.00099), and margin.

``cache_prior`` adds ``prior_lambda * delta`` to the logits of residents, delta being the running mean of the
range (max - min) of a row's logits. ``max_rank`` puts residents among the router's best M before the others;
``mass`` finds M per row from the cumulative probability. All leave the router's first ``protect`` picks alone
(the paper's J), and all take the weights from the router's own probabilities.

``margin`` adds a share of what the router's own choice adds up to to the probabilities of residents, a larger one in
rows whose next token a draft head is sure of.
"""

import math
from dataclasses import dataclass, field

import mlx.core as mx

from strata_mlx.routing.ops import (
    LOWEST,
    Selection,
    mixing_weights,
    router_scores,
    sort_keys,
    top_ids,
)
from strata_mlx.routing.policy import RoutingPolicy

# Every probability that is not zero is at least 2^-126, so a larger factor would not change any comparison.
_LARGEST_EXPONENT = 126 * math.log(2)


@dataclass(frozen=True)
class LogitRange:
    """What cache_prior remembers of one layer: the mean range of router logits, and over how many rows.

    A value, so that rollback is to keep the old one. The mean that a row sees ends with that row, never with
    a later one: an accepted row was routed as plain decoding would have routed it.
    """

    mean: mx.array = field(default_factory=lambda: mx.array(0.0))  # float32, scalar
    rows: mx.array = field(default_factory=lambda: mx.array(0.0))  # float32, scalar

    def through(self, logits: mx.array) -> mx.array:
        """The running mean ``[T, 1]`` up to and including each row of ``logits [T, E]``."""
        means, _ = self._running(logits)
        return means

    def after(self, logits: mx.array, accepted: int) -> "LogitRange":
        """The state once the first ``accepted`` rows of ``logits [T, E]`` are committed."""
        if accepted == 0:
            return self
        means, rows = self._running(logits[:accepted])
        return LogitRange(means[-1, 0], rows[-1, 0])

    def _running(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        z = logits.astype(mx.float32)
        finite = mx.isfinite(z)
        ranges = mx.where(finite, z, -mx.inf).max(axis=-1) - mx.where(finite, z, mx.inf).min(axis=-1)
        usable = mx.isfinite(ranges)  # a row without a finite logit teaches nothing
        rows = self.rows + mx.cumsum(usable.astype(mx.float32))
        total = self.rows * self.mean + mx.cumsum(mx.where(usable, ranges, 0.0))
        return (total / mx.maximum(rows, 1.0))[:, None], rows[:, None]


def select_additive(
    logits: mx.array,
    resident: mx.array,
    policy: RoutingPolicy,
    logit_range: LogitRange,
    *,
    top_k: int,
    norm_topk: bool,
    router: str,
    selection_bias: mx.array | None,
    n_group: int,
    topk_group: int,
    scale: float,
) -> Selection:
    """``select`` for an active policy of an additive kind but margin; arguments as there, and taken as checked.

    Returns:
        ids ``[T, K]`` uint32 and weights ``[T, K]`` float32. The order is that of selection for cache_prior. The other
        two choose a set; its ids are in the router's own order.
    """
    probabilities, dead, offset = router_scores(logits, router, selection_bias, n_group, topk_group)
    present = resident & ~dead  # [T, E]
    if policy.kind == "cache_prior":
        bonus, own = policy.prior_lambda * logit_range.through(logits), probabilities
        if router == "softmax":
            raised = probabilities * mx.exp(mx.minimum(bonus, _LARGEST_EXPONENT))
        elif selection_bias is None:  # as logits, whose order is that of the sigmoids where these are all 1 in float32
            own = mx.where(probabilities > 0, mx.nan_to_num(logits.astype(mx.float32)), LOWEST)
            raised = own + bonus
        else:
            raised = mx.sigmoid(logits.astype(mx.float32) + bonus)
        raised = mx.where(present & (probabilities > 0), raised, own)
        first = top_ids(sort_keys(probabilities, offset), policy.protect) if policy.protect else None
        ids = _then_best(first, sort_keys(raised, offset), top_k)
    else:
        ids = _residents_first(probabilities, offset, present, policy, top_k)
    weights = mx.take_along_axis(probabilities, ids, axis=-1)
    return ids, mixing_weights(weights, probabilities, norm_topk=norm_topk, router=router, scale=scale)


def margins(policy: RoutingPolicy) -> mx.array:
    """``margin`` and ``sure_margin``, float32 ``[2]``, as select_margin() takes them."""
    return mx.array([policy.margin, policy.sure_margin or 0.0])


def select_margin(
    logits: mx.array,
    resident: mx.array,
    margins: mx.array,
    confidence: mx.array | None = None,
    *,
    protect: int,
    top_k: int,
    norm_topk: bool,
    router: str,
    selection_bias: mx.array | None,
    n_group: int,
    topk_group: int,
    scale: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """``select`` for a policy of kind "margin": ids, in the order of selection, and weights as there, and the router's
    own ids ``[T, K]`` uint32.

    margins: as from margins(). confidence: float32 ``[T]``, None for 0 in every row.
    """
    probabilities, dead, offset = router_scores(logits, router, selection_bias, n_group, topk_group)
    own = top_ids(sort_keys(probabilities, offset), top_k)
    margin = margins[0]
    if confidence is not None:
        c = mx.where(confidence > 0, mx.minimum(confidence, 1.0), 0.0)[:, None]  # no NaN is above anything
        margin = (1 - c * c) * margins[0] + c * c * margins[1]
    own_mass = mx.take_along_axis(probabilities, own, axis=-1).sum(axis=-1, keepdims=True)
    raised = mx.where(resident & ~dead & (probabilities > 0), probabilities + margin * own_mass, probabilities)
    ids = _then_best(own[:, :protect] if protect else None, sort_keys(raised, offset), top_k)
    weights = mx.take_along_axis(probabilities, ids, axis=-1)
    return ids, mixing_weights(weights, probabilities, norm_topk=norm_topk, router=router, scale=scale), own


def _then_best(first: mx.array | None, keys: mx.array, top_k: int) -> mx.array:
    """The ids ``[T, K]``: ``first``, which are protected, and then the best others by ``keys [T, E]``."""
    if first is None:
        return top_ids(keys, top_k)
    if (left := top_k - first.shape[-1]) == 0:
        return first
    return mx.concatenate([first, top_ids(keys, left, taken=first)], axis=-1)


def _residents_first(
    probabilities: mx.array, offset: mx.array | None, present: mx.array, policy: RoutingPolicy, top_k: int
) -> mx.array:
    """The ids ``[T, K]`` of the true top J, then residents among the top M, then the rest."""
    experts = probabilities.shape[-1]
    order = top_ids(sort_keys(probabilities, offset), experts)  # [T, E], the router's own
    position = mx.arange(experts)
    if policy.max_rank is not None:
        among = position < policy.max_rank
    else:
        sorted_probabilities = mx.take_along_axis(probabilities, order, axis=-1)
        before = mx.cumsum(sorted_probabilities, axis=-1) - sorted_probabilities
        among = before < policy.mass * sorted_probabilities.sum(axis=-1, keepdims=True)
    if offset is not None:  # an expert of a group that is left out is no candidate
        allowed = mx.broadcast_to(mx.isfinite(offset), order.shape)
        among = among & mx.take_along_axis(allowed, order, axis=-1)
    early = (position < policy.protect) | (mx.take_along_axis(present, order, axis=-1) & among)
    # Protected positions are the smallest of the early ones, so two classes are enough.
    rank = mx.where(early, position, position + experts)
    chosen = mx.argpartition(rank, top_k - 1, axis=-1)[:, :top_k]  # all ranks differ: no ties
    return mx.take_along_axis(order, mx.sort(chosen, axis=-1), axis=-1)
