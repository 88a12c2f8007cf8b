"""What acceptance must satisfy: checks in one registry, with fixed seeds.

The same checks run on ``strata_mlx.speculation.acceptance`` and, in ``test_acceptance_mutants.py``, on a broken one.
The trunk and the draft head are Markov chains over a few tokens, so that ``reference.joint_law`` can enumerate every
outcome.
"""

from collections import Counter
from collections.abc import Callable
from itertools import cycle, product
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx_lm.sample_utils
import numpy as np
from numpy.typing import NDArray

from strata_mlx.speculation import acceptance
from tests.speculation import reference
from tests.speculation.reference import Floats, Outcome

PROPERTIES: dict[str, Callable[[], None]] = {}
SEEDS, DRAWS = (1, 2, 3), 40_000
LEAST_P = 1e-4  # of about fifty tests, so that chance alone fails one in two hundred choices of seeds
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"min_p": 0.9, "min_tokens_to_keep": 3},
    {"top_p": 0.9, "top_k": 2},
    {"top_p": 0.7, "min_p": 0.2, "top_k": 4},
)
SETTINGS = [{"temp": temp, **filters} for temp, filters in zip(cycle((0.5, 1.7, 1.0)), FILTERS, strict=False)]


def _property(check: Callable[[], None]) -> Callable[[], None]:
    PROPERTIES[check.__name__] = check
    return check


def chain(seed: int, vocabulary: int = 4, zeros: bool = False) -> Floats:
    """A random Markov chain ``[V, V]``, with some tokens that never follow where ``zeros``. The numbers fit float32."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(vocabulary, 0.8), vocabulary)
    if zeros:
        weights[rng.random(weights.shape) < 0.3] = 0
        weights[:, 0] += 0.1
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def one_hot(q: Floats) -> Floats:
    return np.asarray(np.eye(len(q))[q.argmax(axis=1)])


def _log(p: Floats) -> mx.array:
    with np.errstate(divide="ignore"):
        return mx.array(np.log(p).astype(np.float32))


def draw_drafts(q: Floats, k: int, seed: int) -> NDArray[np.int64]:
    """``[DRAWS, k]`` chains of q after token 0."""
    uniforms = np.random.default_rng(seed).random((DRAWS, k))
    drafts = np.zeros((DRAWS, k + 1), np.int64)
    for i in range(k):
        drafts[:, i + 1] = (uniforms[:, i, None] >= np.cumsum(q, axis=1)[drafts[:, i]][:, :-1]).sum(axis=1)
    return drafts[:, 1:]


def outcomes(result: acceptance.Acceptance, drafts: NDArray[np.int64]) -> list[Outcome]:
    accepted, tokens = np.array(result.accepted), np.array(result.token)
    return [
        (n, (*row[:n], token))
        for n, row, token in zip(accepted.tolist(), drafts.tolist(), tokens.tolist(), strict=True)
    ]


def rounds(p: Floats, q: Floats, k: int, seed: int, certain: bool = False, **options: Any) -> list[Outcome]:
    """Outcomes of DRAWS rounds, which are one batch."""
    drafts = draw_drafts(q, k, seed)
    context = np.concatenate([np.zeros((DRAWS, 1), np.int64), drafts], axis=1)
    logprobs = _log(p)[mx.array(context)]
    draft_logprobs = None if certain else _log(q)[mx.array(context[:, :k])]
    key = mx.random.key(seed)
    return outcomes(acceptance.accept_sampled(mx.array(drafts), logprobs, draft_logprobs, key=key, **options), drafts)


def check_law(p: Floats, q: Floats, k: int, certain: bool = False) -> None:
    law = reference.joint_law(p, q, k)
    for seed in SEEDS:
        assert reference.chi_square_p(Counter(rounds(p, q, k, seed, certain)), law) > LEAST_P


@_property
def a_drawn_draft_follows_the_enumerated_law() -> None:
    check_law(chain(1), chain(2), 1)
    check_law(chain(3), chain(4), 3)


@_property
def a_window_alone_follows_the_enumerated_law() -> None:
    # As many drafts as tokens: draws that share a key would be equal.
    p, q = chain(14, 3), one_hot(chain(15, 3))
    drafts = draw_drafts(q, 3, 0)[:1]
    logprobs = _log(p)[mx.array([0, *drafts[0].tolist()])]

    def one_round(key: mx.array) -> tuple[mx.array, mx.array]:
        result = acceptance.accept_sampled(mx.array(drafts[0]), logprobs, key=key)
        return result.accepted, result.token

    accepted, tokens = mx.vmap(one_round)(mx.random.split(mx.random.key(0), DRAWS))
    drawn = outcomes(acceptance.Acceptance(accepted, tokens), np.repeat(drafts, DRAWS, axis=0))
    assert reference.chi_square_p(Counter(drawn), reference.joint_law(p, q, 3)) > LEAST_P


@_property
def drafts_that_p_or_q_excludes_follow_the_enumerated_law() -> None:
    check_law(chain(5, zeros=True), chain(6, zeros=True), 2)


@_property
def a_certain_draft_follows_the_enumerated_law() -> None:
    check_law(chain(1), one_hot(chain(2)), 1, certain=True)
    check_law(chain(7), one_hot(chain(7) ** 0.1), 3, certain=True)
    check_law(chain(5, zeros=True), one_hot(chain(6)), 2, certain=True)


@_property
def drafts_of_the_same_distribution_are_all_kept() -> None:
    p = chain(8)
    assert {n for n, _ in rounds(p, p, 3, 1)} == {3}
    check_law(p, p, 2)


@_property
def without_drafts_the_token_is_sampled_from_p() -> None:
    law = {(0, (token,)): share for token, share in enumerate(chain(9)[0])}
    for certain in (True, False):
        assert reference.chi_square_p(Counter(rounds(chain(9), chain(9), 0, 1, certain)), law) > LEAST_P


@_property
def padding_of_a_batch_changes_no_law() -> None:
    p, q = chain(10), chain(11)
    retained = np.random.default_rng(0).integers(0, 4, DRAWS)
    for certain, drafter in ((False, q), (True, one_hot(q))):
        drawn = rounds(p, drafter, 3, 1, certain, retained=mx.array(retained))
        for k in range(4):
            mine = Counter(outcome for outcome, count in zip(drawn, retained.tolist(), strict=True) if count == k)
            assert reference.chi_square_p(mine, reference.joint_law(p, drafter, k)) > LEAST_P


def gated_rounds(p: Floats, q: Floats, k: int, seed: int, dropped: NDArray[np.bool_], told: bool) -> list[Outcome]:
    """Rounds whose window ends before the first draft that is ``dropped`` ``[V, V]``; acceptance is told so or not."""
    drafts = draw_drafts(q, k, seed)
    context = np.concatenate([np.zeros((DRAWS, 1), np.int64), drafts], axis=1)
    stops = np.concatenate([dropped[context[:, :k], drafts], np.ones((DRAWS, 1), bool)], axis=1)
    retained = stops.argmax(axis=1)
    rows = np.where(dropped, 0, q)[context]
    rows[:, k] = 0
    result = acceptance.accept_sampled(
        mx.array(drafts),
        _log(p)[mx.array(context)],
        _log(rows if told else q[context[:, :k]]),
        key=mx.random.key(seed),
        retained=mx.array(retained),
    )
    return outcomes(result, drafts)


@_property
def a_drawn_draft_that_a_gate_dropped_follows_the_enumerated_law() -> None:
    p, q, k = chain(12), chain(13), 2
    law = reference.joint_law(p, q, k, dropped=q < 0.25)
    for seed in SEEDS:
        drawn = Counter(gated_rounds(p, q, k, seed, q < 0.25, told=True))
        assert reference.chi_square_p(drawn, law) > LEAST_P


@_property
def probabilities_of_keeping_and_residuals_are_exact() -> None:
    for seed, zeros in product(range(20), (False, True)):
        p, q = chain(seed, 7, zeros), chain(seed + 100, 7, zeros)
        for x in range(7):
            drafts = mx.full((7, 1), x)
            logs = mx.stack([_log(p), _log(p)], axis=1), _log(q)[:, None]
            drawn = np.array(acceptance.keep_probabilities(drafts, *logs))[:, 0]
            certain = np.array(acceptance.keep_probabilities(drafts, logs[0]))[:, 0]
            possible = q[:, x] > 0
            exact = np.array([reference.keep_probability(a, b, x) for a, b in zip(p, q, strict=True)])
            assert np.abs(drawn - exact)[possible].max(initial=0) < 1e-6
            assert np.abs(certain - p[:, x]).max() < 1e-6
        rest = np.array(mx.softmax(acceptance.residual_logits(_log(p), _log(q)), axis=-1))
        assert np.abs(rest - [reference.residual(a, b) for a, b in zip(p, q, strict=True)]).max() < 1e-5
        same = np.array(mx.softmax(acceptance.residual_logits(_log(p), _log(p)), axis=-1))
        assert np.abs(same - p).max() < 1e-6


@_property
def a_key_repeats_its_draws_and_another_does_not() -> None:
    first = rounds(chain(1), chain(2), 2, 1)
    assert first == rounds(chain(1), chain(2), 2, 1)
    mx.random.seed(5)
    undisturbed = mx.random.uniform().item()
    mx.random.seed(5)
    rounds(chain(1), chain(2), 2, 1)
    assert mx.random.uniform().item() == undisturbed  # a given key leaves the global state alone
    drafts, logs = mx.array([[1, 2]] * 500), mx.stack([_log(chain(1)[:3])] * 500)
    draws = [acceptance.accept_sampled(drafts, logs, key=mx.random.key(seed)).token.tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


@_property
def greedy_keeps_the_common_prefix() -> None:
    for k in range(4):
        for drafts, targets in product(product(range(2), repeat=k), product(range(2), repeat=k + 1)):
            accepted = acceptance.accept_greedy(drafts, targets)
            assert drafts[:accepted] == targets[:accepted]
            assert accepted == k or drafts[accepted] != targets[accepted]


@_property
def certainty_makes_sampling_greedy() -> None:
    rng = np.random.default_rng(1)
    logits, drafts = rng.normal(size=(200, 4, 3)), rng.integers(0, 3, (200, 3))
    logprobs = acceptance.sampling_logprobs(mx.array(logits.astype(np.float32)))
    sampled = acceptance.accept_sampled(mx.array(drafts), logprobs, key=mx.random.key(0))
    counts, tokens = np.array(sampled.accepted), np.array(sampled.token)
    for row, targets, count, token in zip(drafts, logits.argmax(-1), counts, tokens, strict=True):
        accepted = acceptance.accept_greedy(row, targets)
        assert (accepted, targets[accepted]) == (count, token)


def settings_and_logits() -> list[tuple[dict[str, Any], Floats]]:
    return [
        (settings, np.random.default_rng(i).normal(size=(5, 8)).astype(np.float32).astype(np.float64))
        for i, settings in enumerate([{}, *SETTINGS])
    ]


@_property
def sampling_has_the_law_of_its_settings() -> None:
    for settings, logits in settings_and_logits():
        p = np.exp(np.array(acceptance.sampling_logprobs(mx.array(logits.astype(np.float32)), **settings)))
        assert np.abs(p.sum(axis=-1) - 1).max() < 1e-6
        expected = np.array([reference.sampler_law(row, **settings) for row in logits])
        assert ((p > 0) == (expected > 0)).all()
        assert np.abs(p - expected).max() < 1e-6


@_property
def sampling_is_that_of_mlx_lm_in_every_type() -> None:
    for settings, logits in settings_and_logits()[1:]:
        for dtype in (mx.float32, mx.bfloat16, mx.float16):
            rows = mx.array(logits).astype(dtype)
            logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)  # as strata_mlx.engine does
            # What the sampler hands to mx.random.categorical, whose law is the softmax of it.
            with patch.object(mlx_lm.sample_utils, "categorical_sampling", lambda x, temp: x * (1 / temp)):
                drawn_from = mlx_lm.sample_utils.make_sampler(**settings)(logprobs)
            theirs = np.array(mx.softmax(drawn_from.astype(mx.float32), axis=-1))
            ours = np.exp(np.array(acceptance.sampling_logprobs(rows, **settings)))
            assert ((ours > 0) == (theirs > 0)).all()
            assert np.abs(ours - theirs).max() < 1e-6


@_property
def a_round_with_filters_follows_the_enumerated_law() -> None:
    settings: list[dict[str, Any]] = [
        {"temp": 0.7, "top_k": 3},
        {"temp": 1.5, "top_p": 0.9},
        {"temp": 1.0, "min_p": 0.2, "top_k": 3},
    ]
    trunk, head = (np.random.default_rng(seed).normal(size=(4, 4)) for seed in (20, 21))
    for options in settings:
        p, q = (np.array([reference.sampler_law(row, **options) for row in logits]) for logits in (trunk, head))
        drafts = draw_drafts(q, 2, 1)
        context = mx.array(np.concatenate([np.zeros((DRAWS, 1), np.int64), drafts], axis=1))
        logs = [
            acceptance.sampling_logprobs(mx.array(logits.astype(np.float32)), **options) for logits in (trunk, head)
        ]
        result = acceptance.accept_sampled(
            mx.array(drafts), logs[0][context], logs[1][context[:, :2]], key=mx.random.key(4)
        )
        drawn = Counter(outcomes(result, drafts))
        assert reference.chi_square_p(drawn, reference.joint_law(p, q, 2)) > LEAST_P
