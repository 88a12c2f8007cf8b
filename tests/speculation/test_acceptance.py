"""Acceptance: exact in distribution, lazily; the reference against which that is checked; bad input."""

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

from strata_mlx.errors import InputError
from strata_mlx.speculation.acceptance import (
    accept_greedy,
    accept_sampled,
    keep_probabilities,
    sampling_logprobs,
)
from tests.errors import refuses
from tests.speculation.acceptance_properties import LEAST_P, PROPERTIES, SETTINGS, chain, gated_rounds, one_hot
from tests.speculation.reference import (
    chi_square_p,
    joint_law,
    law_of_plain_sampling,
    law_of_the_text,
)


@pytest.mark.parametrize("name", PROPERTIES)
def test_property(name: str) -> None:
    PROPERTIES[name]()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_enumerated_law_is_that_of_plain_sampling(k: int, zeros: bool) -> None:
    p, q = chain(1, 3, zeros), chain(2, 3, zeros)
    for drafter in (q, one_hot(q), p, one_hot(p)):
        law = joint_law(p, drafter, k)
        assert np.abs(law_of_the_text(law, p, k + 1) - law_of_plain_sampling(p, k + 1)).max() < 1e-12
        gated = joint_law(p, drafter, k, dropped=drafter < 0.4)
        assert np.abs(law_of_the_text(gated, p, k + 1) - law_of_plain_sampling(p, k + 1)).max() < 1e-12


def test_a_drawn_draft_that_a_gate_dropped_must_not_be_forgotten() -> None:
    p, k = chain(12), 1
    text = {(0, (token,)): share for token, share in enumerate(p[0])}
    for told in (True, False):
        drawn = Counter((0, tokens[:1]) for _, tokens in gated_rounds(p, p, k, 1, p < 0.4, told))
        assert (chi_square_p(drawn, text) > LEAST_P) == told


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_of_mlx_lm_follow_the_law_of_the_settings(settings: dict[str, Any]) -> None:
    logits = mx.array(np.random.default_rng(3).normal(size=(1, 6)).astype(np.float32))
    mx.random.seed(1)
    rows = mx.repeat(logits - mx.logsumexp(logits), 50_000, axis=0)
    drawn = Counter((0, (token,)) for token in np.array(make_sampler(**settings)(rows)).tolist())
    p = np.exp(np.array(sampling_logprobs(logits, **settings), np.float64))[0]
    assert chi_square_p(drawn, {(0, (token,)): share for token, share in enumerate(p) if share > 0}) > LEAST_P


def test_a_large_vocabulary_and_extreme_logits_stay_exact() -> None:
    logits = np.zeros((2, 150_000), np.float32)
    logits[0, 7], logits[1, 9] = 80.0, 1e4
    logprobs = sampling_logprobs(mx.array(logits), temp=1.0)
    for seed in range(20):
        kept = accept_sampled(mx.array([7]), logprobs, key=mx.random.key(seed))
        assert (kept.accepted.item(), kept.token.item()) == (1, 9)
        rejected = accept_sampled(mx.array([8]), logprobs, key=mx.random.key(seed))
        assert (rejected.accepted.item(), rejected.token.item()) == (0, 7)


def test_types_of_half_precision_and_of_ids_are_taken() -> None:
    logprobs = sampling_logprobs(mx.array([[0.0, 9.0], [9.0, 0.0]]), temp=0.1)
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        for ids in (mx.uint32, mx.int32, mx.int64):
            result = accept_sampled(mx.array([1], ids), logprobs.astype(dtype), logprobs[:1].astype(dtype))
            assert (result.accepted.item(), result.token.item()) == (1, 0)


def test_nothing_is_evaluated_on_the_way() -> None:
    @mx.compile  # tracing fails where a value is asked for
    def whole_round(drafts: mx.array, logits: mx.array, q: mx.array, key: mx.array) -> tuple[mx.array, ...]:
        logprobs = sampling_logprobs(logits, temp=0.8, top_k=3)
        results = (
            accept_sampled(drafts, logprobs, key=key),
            accept_sampled(drafts, logprobs, q, key=key, retained=drafts[:, 0]),
        )
        return tuple(array for result in results for array in (result.accepted, result.token))

    shapes = mx.zeros((2, 3), mx.int32), mx.zeros((2, 4, 5)), mx.zeros((2, 3, 5)), mx.random.key(0)
    assert all(array.shape == (2,) for array in whole_round(*shapes))


def test_shapes_that_do_not_go_together_are_refused() -> None:
    drafts, rows = mx.zeros((2, 3), mx.int32), mx.zeros((2, 4, 5))
    with refuses(InputError, "(3,)", "(4,)"):
        accept_greedy([1, 2, 3], [1, 2, 3])
    with refuses(InputError, "(4, 5)"):
        accept_sampled(drafts, mx.zeros((4, 5, 5)))
    with refuses(InputError, "()"):
        accept_sampled(mx.array(1), mx.zeros((2, 5)))
    for wrong in ((2, 2, 5), (2, 5, 5), (2, 3, 4), (3, 5)):
        with refuses(InputError, str(wrong), "(2, 3, 5)"):
            accept_sampled(drafts, rows, mx.zeros(wrong))
        with refuses(InputError, str(wrong)):
            keep_probabilities(drafts, rows, mx.zeros(wrong))


@pytest.mark.parametrize(
    "settings",
    [
        {"temp": -1.0},
        {"temp": float("nan")},
        {"temp": float("inf")},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"min_p": float("nan")},
        {"min_p": 2.0},
        {"top_k": -1},
        {"top_k": 5},
        {"min_tokens_to_keep": 0},
        {"min_tokens_to_keep": 6},
    ],
)
def test_a_setting_out_of_its_range_is_refused(settings: dict[str, Any]) -> None:
    with refuses(InputError, next(iter(settings)), "expected"):
        sampling_logprobs(mx.zeros((1, 5)), **{"temp": 1.0, **settings})
