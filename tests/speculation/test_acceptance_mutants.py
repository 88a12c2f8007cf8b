"""Every plausible mistake in acceptance must be caught; the report says by which property."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import apply_top_k

from strata_mlx.speculation import acceptance
from tests.conftest import Report
from tests.speculation.acceptance_properties import PROPERTIES

keep_probabilities, residual_logits = acceptance.keep_probabilities, acceptance.residual_logits
sampling_logprobs = acceptance.sampling_logprobs
accept_sampled, accept_greedy = acceptance.accept_sampled, acceptance.accept_greedy
_uniform, _split = mx.random.uniform, mx.random.split


def killed_by() -> str | None:
    """The first property that does not hold."""
    for name, check in PROPERTIES.items():
        try:
            check()
        except AssertionError:
            return name
    return None


def accept_with_q_over_p(drafts: mx.array, logprobs: mx.array, q: Any = None) -> mx.array:
    k = drafts.shape[-1]
    if q is None:
        return keep_probabilities(drafts, logprobs)
    return mx.exp(mx.minimum(acceptance._at(q[..., :k, :], drafts) - acceptance._at(logprobs[..., :k, :], drafts), 0))


def accept_where_p_is_not_less(drafts: mx.array, logprobs: mx.array, q: Any = None) -> mx.array:
    return mx.floor(keep_probabilities(drafts, logprobs, q))


def accept_by_p_alone(drafts: mx.array, logprobs: mx.array, _: Any = None) -> mx.array:
    return keep_probabilities(drafts, logprobs)


def accept_one_row_late(drafts: mx.array, logprobs: mx.array, q: Any = None) -> mx.array:
    later = mx.concatenate([logprobs[..., 1:, :], logprobs[..., -1:, :]], axis=-2)
    return keep_probabilities(drafts, later, q)


def residual_not_renormalised(p: mx.array, q: mx.array) -> mx.array:
    rest = mx.exp(residual_logits(p, q))  # a draw from the bare differences: what is missing falls to the last token
    missing = mx.maximum(1 - rest.sum(axis=-1, keepdims=True), 0)
    return mx.log(mx.where(mx.arange(p.shape[-1]) == p.shape[-1] - 1, rest + missing, rest))


def draft_not_zeroed(p: mx.array, q: mx.array) -> mx.array:
    return mx.where(mx.max(q, axis=-1, keepdims=True) == 0, p, residual_logits(p, q))


def residual_is_p(p: mx.array, _: mx.array) -> mx.array:
    return p


def residual_of_both_signs(p: mx.array, q: mx.array) -> mx.array:
    return mx.log(mx.abs(mx.exp(p) - mx.exp(q)) + 1e-30)


def nothing_left_gives_the_first_token(p: mx.array, q: mx.array) -> mx.array:
    return mx.log(mx.maximum(mx.exp(p) - mx.exp(q), 0))


def bonus_from_q(drafts: mx.array, logprobs: mx.array, q: Any = None, **options: Any) -> Any:
    if q is not None and q.shape[-2] == drafts.shape[-1] > 0:
        logprobs = mx.concatenate([logprobs[..., :-1, :], q[..., -1:, :]], axis=-2)
    return accept_sampled(drafts, logprobs, q, **options)


def bonus_from_the_row_before(drafts: mx.array, logprobs: mx.array, q: Any = None, **options: Any) -> Any:
    if drafts.shape[-1]:
        logprobs = mx.concatenate([logprobs[..., :-1, :], logprobs[..., -2:-1, :]], axis=-2)
    return accept_sampled(drafts, logprobs, q, **options)


def retained_is_ignored(drafts: mx.array, logprobs: mx.array, q: Any = None, **options: Any) -> Any:
    return accept_sampled(drafts, logprobs, q, key=options.get("key"))


def one_uniform_for_all(*, shape: Any, key: Any = None) -> mx.array:
    draws = _uniform(shape=(*shape[:-1], 1), key=key)
    return mx.broadcast_to(draws, shape)


def the_same_key_twice(key: mx.array, num: int = 2) -> Any:
    return [key, key] if num == 2 else _split(key, num)


def every_match_counts(keep: mx.array, retained: Any) -> mx.array:
    del retained
    return keep.astype(mx.int32).sum(axis=-1)


def filters_after_temperature(logits: mx.array, **options: Any) -> mx.array:
    return sampling_logprobs(logits / (options.get("temp") or 1), **{**options, "temp": min(options.get("temp", 0), 1)})


def top_k_first(logits: mx.array, **options: Any) -> mx.array:
    if options.get("temp") and options.get("top_k"):
        logits = apply_top_k(logits, options["top_k"])
    return sampling_logprobs(logits, **{**options, "top_k": 0})


def not_normalised(logits: mx.array, **options: Any) -> mx.array:
    logprobs = sampling_logprobs(logits, **options)
    return mx.where(logprobs == -mx.inf, logprobs, logits)


def in_single_precision(logits: mx.array, **options: Any) -> mx.array:
    return sampling_logprobs(logits.astype(mx.float32), **options)


def greedy_one_row_late(drafts: Sequence[int], targets: Sequence[int]) -> int:
    return accept_greedy(drafts, [*targets[1:], targets[-1]])


def greedy_counts_every_match(drafts: Sequence[int], targets: Sequence[int]) -> int:
    return sum(a == b for a, b in zip(drafts, targets, strict=False))


def greedy_one_too_many(drafts: Sequence[int], targets: Sequence[int]) -> int:
    return min(accept_greedy(drafts, targets) + 1, len(drafts))


MUTANTS: dict[str, Any] = {
    mutant.__name__: patch.object(owner, name, mutant)
    for owner, name, mutants in (
        (
            acceptance,
            "keep_probabilities",
            (accept_with_q_over_p, accept_where_p_is_not_less, accept_by_p_alone, accept_one_row_late),
        ),
        (
            acceptance,
            "residual_logits",
            (
                residual_not_renormalised,
                draft_not_zeroed,
                residual_is_p,
                residual_of_both_signs,
                nothing_left_gives_the_first_token,
            ),
        ),
        (acceptance, "accept_sampled", (bonus_from_q, bonus_from_the_row_before, retained_is_ignored)),
        (mx.random, "uniform", (one_uniform_for_all,)),
        (mx.random, "split", (the_same_key_twice,)),
        (acceptance, "_prefix", (every_match_counts,)),
        (
            acceptance,
            "sampling_logprobs",
            (filters_after_temperature, top_k_first, not_normalised, in_single_precision),
        ),
        (acceptance, "accept_greedy", (greedy_one_row_late, greedy_counts_every_match, greedy_one_too_many)),
    )
    for mutant in mutants
}


def test_the_properties_hold_without_a_mutation() -> None:
    assert killed_by() is None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str, report: Report) -> None:
    with MUTANTS[name]:
        report(name, killed_by())
