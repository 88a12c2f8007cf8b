"""Speculative sampling in float64, by enumeration, from the definitions; and a chi-square test."""

import math
from collections import Counter
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Outcome = tuple[int, tuple[int, ...]]  # accepted length; the accepted drafts and the token after them


def keep_probability(p: Floats, q: Floats, x: int) -> float:
    """With which draft x, drawn from q ``[V]``, is kept where the trunk says p ``[V]``."""
    return 1.0 if q[x] <= p[x] else float(p[x] / q[x])


def residual(p: Floats, q: Floats) -> Floats:
    """What the token comes from after a rejection."""
    rest = np.where(p > q, p - q, 0.0)
    return rest / rest.sum() if rest.sum() else p


def joint_law(p: Floats, q: Floats, k: int, dropped: NDArray[np.bool_] | None = None) -> dict[Outcome, float]:
    """The law of one round's outcome after token 0, where p and q are Markov chains.

    p, q: ``[V, V]``, row x is what follows token x. k: how many drafts. dropped: ``[V, V]`` drafts that a gate ends the
    window at, and which then count as rejected; q keeps their probabilities.
    """
    law: Counter[Outcome] = Counter()
    allowed = q if dropped is None else np.where(dropped, 0.0, q)
    for drafts in product(range(len(p)), repeat=k):
        context = (0, *drafts)
        reach = float(np.prod([q[a, b] for a, b in zip(context, drafts, strict=False)]))
        for n, x in enumerate(drafts):
            row = context[n]
            keep = keep_probability(p[row], allowed[row], x) if allowed[row, x] else 0.0
            for token, share in enumerate(residual(p[row], allowed[row])):
                law[n, (*drafts[:n], token)] += reach * (1 - keep) * share
            reach *= keep
        for token, share in enumerate(p[context[k]]):
            law[k, (*drafts, token)] += reach * share
    return {outcome: probability for outcome, probability in law.items() if probability > 0}


def law_of_the_text(law: Mapping[Outcome, float], p: Floats, length: int) -> Floats:
    """What the first ``length`` tokens are, ``[V] * length``, where plain sampling goes on after the round."""
    text = np.zeros((len(p),) * length)
    for (_, tokens), probability in law.items():
        for rest in product(range(len(p)), repeat=length - len(tokens)):
            whole = (*tokens, *rest)
            follow = [p[a, b] for a, b in zip(whole[len(tokens) - 1 :], rest, strict=False)]
            text[whole] += probability * np.prod(follow)
    return text


def law_of_plain_sampling(p: Floats, length: int) -> Floats:
    """As ``law_of_the_text``, without speculation."""
    text = np.empty((len(p),) * length)
    for whole in np.ndindex(text.shape):
        text[whole] = np.prod([p[a, b] for a, b in zip((0, *whole), whole, strict=False)])
    return text


def sampler_law(
    logits: Floats,
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
) -> Floats:
    """Probabilities ``[V]`` of mlx_lm's sampler for logits ``[V]`` without ties."""
    ranks = np.argsort(-logits).argsort()
    p = np.exp(logits - logits.max())
    p /= p.sum()
    if temp == 0:
        return (ranks == 0).astype(float)
    kept = np.ones(len(p), bool)
    if 0 < top_p < 1:  # what is likelier does not reach the mass
        kept &= np.array([p[p > value].sum() < top_p for value in p])
    if min_p > 0:
        kept &= (p >= min_p * p.max()) | (ranks < min_tokens_to_keep)
    if top_k > 0:
        kept &= ranks < top_k
    with np.errstate(divide="ignore"):
        scaled = np.where(kept, np.log(p) / temp, -np.inf)
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())


def chi_square_p(observed: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """p-value of draws against a law: Pearson's statistic, rare cells joined, by Wilson and Hilferty's normal form.

    0 where an outcome was drawn that the law excludes.
    """
    if set(observed) - set(law):
        return 0.0
    draws = sum(observed.values())
    cells = [(observed.get(outcome, 0), draws * probability) for outcome, probability in law.items()]
    common = [cell for cell in cells if cell[1] >= 10]
    rare = [cell for cell in cells if cell[1] < 10]
    if rare:
        common.append((sum(seen for seen, _ in rare), sum(expected for _, expected in rare)))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in common)
    freedom = len(common) - 1
    if not freedom:
        return 1.0
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread))
