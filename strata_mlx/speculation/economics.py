"""What a round of speculation is worth: expected tokens, cost, and how many drafts to verify.

The notation is that of *Fast Inference from Transformers via Speculative Decoding* (arXiv 2211.17192, section 3), with
acceptances that differ by position and a measured cost for each number of rows. All arrays are float64; ``...`` are the
axes of many rounds. Costs are in any one unit. With streamed experts a row costs what it loads, so ``verify_costs`` may
differ from round to round; ``numpy.cumsum`` makes it from the costs of single rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError

Floats = NDArray[np.float64]


def reach_probabilities(acceptances: ArrayLike) -> Floats:
    """``A_i = a_0 * ... * a_i`` ``[..., n]``: the probability that draft i is committed.

    Args:
        acceptances: ``[..., n]`` a_i, the probability that the trunk accepts draft i once it accepted those before.

    Raises:
        InputError: not probabilities.
    """
    a = np.asarray(acceptances, np.float64)
    if a.ndim == 0 or not ((a >= 0) & (a <= 1)).all():
        raise InputError("economics: acceptances must be arrays of probabilities from 0 to 1")
    return np.cumprod(a, axis=-1, dtype=np.float64)


def expected_tokens(acceptances: ArrayLike) -> Floats:
    """``R_k = 1 + sum(A_i for i < k)`` for k = 0..n: ``[..., n + 1]``. Arguments as in ``reach_probabilities``."""
    reach = reach_probabilities(acceptances)
    return 1 + np.concatenate([np.zeros((*reach.shape[:-1], 1)), np.cumsum(reach, axis=-1)], axis=-1)


def round_costs(verify_costs: ArrayLike, draft_cost: ArrayLike = 0.0) -> Floats:
    """``C_k = draft_cost + verify_cost(k + 1)`` for k = 0..n: ``[..., n + 1]``.

    Args:
        verify_costs: ``[..., n + 1]`` of windows of 1, 2, ... n + 1 rows.
        draft_cost: a scalar for chained drafting, which always makes all drafts; ``[..., n + 1]`` where stopping at k
            saves the remaining steps.

    Raises:
        InputError: a cost of a round that is not positive and finite.
    """
    costs = np.asarray(draft_cost, np.float64) + np.asarray(verify_costs, np.float64)
    if not ((costs > 0) & np.isfinite(costs)).all():
        raise InputError("economics: the cost of a round must be positive and finite")
    return costs


def pays(reach: ArrayLike, marginal_cost: ArrayLike, tokens: ArrayLike, cost: ArrayLike) -> NDArray[np.bool_]:
    """Whether retaining one more draft improves tokens / cost: ``A_k / delta > R_k / C_k``, without the division.

    Where a row costs nothing more, any positive acceptance pays; where it costs less, every draft does.

    Args:
        reach: A_k of that draft.
        marginal_cost: delta, ``C_(k+1) - C_k``.
        tokens, cost: R_k and C_k without it. Their ratio alone matters: give a run's totals to judge by its rate.
    """
    gain = np.asarray(reach, np.float64) * np.asarray(cost, np.float64)
    return np.asarray(gain > np.asarray(marginal_cost, np.float64) * np.asarray(tokens, np.float64))


def best_k(
    acceptances: ArrayLike, verify_costs: ArrayLike, draft_cost: ArrayLike = 0.0, *, rate: float | None = None
) -> NDArray[np.int64]:
    """How many of the n drafts to retain, ``[...]``; the fewest where several numbers are equally good.

    Unlike ``pays`` draft by draft, this looks beyond a dear row that makes later ones cheap.

    Args:
        acceptances, verify_costs, draft_cost: as in ``expected_tokens`` and ``round_costs``.
        rate: None maximises this round's own ``R_k / C_k``. A rate maximises ``R_k - rate * C_k``: what the round adds
            where other rounds earn ``rate`` tokens per unit of cost. See ``best_rate``.

    Raises:
        InputError: not probabilities, costs that are not positive, or shapes that do not go together.
    """
    tokens, costs = _rounds(acceptances, verify_costs, draft_cost)
    worth = tokens / costs if rate is None else tokens - rate * costs
    return np.asarray(np.argmax(worth, axis=-1))


def best_rate(acceptances: ArrayLike, verify_costs: ArrayLike, draft_cost: ArrayLike = 0.0) -> float:
    """The most tokens per cost, of all rounds together, that any choice of k per round can reach.

    Choosing k by each round's own ratio falls short of it, since a poor round then does not yield its time to better
    ones. The maximum of a ratio of sums is where ``max sum(R - rate * C) = 0`` (Dinkelbach, *On Nonlinear Fractional
    Programming*, Management Science 13, 1967); ``best_k(..., rate=best_rate(...))`` attains it.

    Args:
        acceptances, verify_costs, draft_cost: ``[..., n]`` and so on, of all rounds.

    Raises:
        InputError: as ``best_k``.
    """
    tokens, costs = _rounds(acceptances, verify_costs, draft_cost)
    rate, improved = 0.0, True
    while improved:
        k = np.argmax(tokens - rate * costs, axis=-1)[..., None]
        new = np.take_along_axis(tokens, k, axis=-1).sum() / np.take_along_axis(costs, k, axis=-1).sum()
        rate, improved = max(rate, float(new)), bool(new > rate)
    return rate


def _rounds(acceptances: ArrayLike, verify_costs: ArrayLike, draft_cost: ArrayLike) -> tuple[Floats, Floats]:
    tokens, costs = expected_tokens(acceptances), round_costs(verify_costs, draft_cost)
    if costs.shape[-1:] != tokens.shape[-1:]:
        raise InputError(f"economics: {tokens.shape[-1] - 1} drafts need the costs of as many rows and one more")
    shape = np.broadcast_shapes(tokens.shape, costs.shape)
    return np.broadcast_to(tokens, shape), np.broadcast_to(costs, shape)
