"""Acceptance: the longest prefix of the drafts that the trunk confirms, and the trunk's own next token.

Nothing of arrays is evaluated here: the result of sampling is two lazy arrays, so that one evaluation covers a whole
round. ``...`` in shapes are the axes of a batch, whose windows do not touch each other. That logits are finite and ids
valid is for the caller to check, since only the values can tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from ..errors import InputError


@dataclass(frozen=True)
class Acceptance:
    """What a round yields: the first ``accepted`` drafts, and then ``token``. Lazy integer arrays ``[...]``."""

    accepted: mx.array
    token: mx.array


def accept_greedy(drafts: Sequence[int], targets: Sequence[int]) -> int:
    """How many drafts to keep: those up to the first that is not what the trunk says itself. The token after them is
    ``targets[accepted]``, and the text that of plain greedy decoding. On the host, since what the device goes on with
    depends on it.

    Args:
        drafts: ``[k]`` token ids; k may be 0.
        targets: ``[k + 1]`` the trunk's argmax after t0 and after each draft.

    Raises:
        InputError: lengths that do not go together.
    """
    _check_shapes((len(drafts),), (len(targets),))
    return next((i for i, draft in enumerate(drafts) if draft != targets[i]), len(drafts))


def accept_sampled(
    drafts: mx.array,
    logprobs: mx.array,
    draft_logprobs: mx.array | None = None,
    *,
    key: mx.array | None = None,
    retained: mx.array | int | None = None,
) -> Acceptance:
    """Rejection sampling: whatever the drafts are, tokens are distributed as if the trunk had sampled each of them.

    Draft x is kept with probability ``min(1, p(x) / q(x))``. The token comes from ``norm(max(p - q, 0))`` of the first
    rejected draft's row, or from p of the last row where all are kept (Leviathan et al., *Fast Inference from
    Transformers via Speculative Decoding*, arXiv 2211.17192, algorithm 1).

    Args:
        drafts: ``[..., k]`` token ids; k may be 0.
        logprobs: ``[..., k + 1, V]`` log p: the trunk's after t0 and after each draft, from ``sampling_logprobs``.
        draft_logprobs: ``[..., k, V]`` log q, from which each draft was drawn. None: each was certain, an argmax, so
            that q is 1 there and 0 elsewhere. ``[..., k + 1, V]``: see below.
        key: of mx.random; the same key gives the same result, and every axis of a batch shares it. None: the global
            state.
        retained: ``[...]`` how many of the drafts count, where a batch is padded to one k. None: all.

    A draft that was *drawn* and then dropped because of what it is (a retention gate on its own q(x)) must not be
    forgotten: what remains is no sample of q, and forgetting it would bias the text. Give log q with the tokens that
    the gate drops at -inf, and as row k (row ``retained``) that of the dropped draft, or all -inf where no gate ended
    the window. Certain drafts need none of this.

    Raises:
        InputError: shapes that do not go together.
    """
    _check_shapes(drafts.shape, logprobs.shape[:-1])
    uniform_key, token_key = (None, None) if key is None else mx.random.split(key)
    keep = mx.random.uniform(shape=drafts.shape, key=uniform_key) < keep_probabilities(drafts, logprobs, draft_logprobs)
    accepted = _prefix(keep, retained)
    p = _row(logprobs, accepted)
    if draft_logprobs is None:
        ids = mx.arange(logprobs.shape[-1])
        draft = _row(_pad(drafts, -1, axis=-1)[..., None], accepted)
        q = mx.where(ids == draft, 0.0, -mx.inf)
    else:
        q = _row(_pad(draft_logprobs, -mx.inf, axis=-2), accepted)
    if draft_logprobs is None or draft_logprobs.shape[-2] == drafts.shape[-1]:
        count = drafts.shape[-1] if retained is None else retained
        q = mx.where((accepted == count)[..., None], -mx.inf, q)  # nothing was rejected: all of p remains
    return Acceptance(accepted, mx.random.categorical(residual_logits(p, q), key=token_key))


def keep_probabilities(drafts: mx.array, logprobs: mx.array, draft_logprobs: mx.array | None = None) -> mx.array:
    """``min(1, p(x) / q(x))`` of each draft x: float32 ``[..., k]``. Arguments as in ``accept_sampled``.

    Raises:
        InputError: shapes that do not go together.
    """
    _check_shapes(drafts.shape, logprobs.shape[:-1])
    k = drafts.shape[-1]
    ratio = _at(logprobs[..., :k, :], drafts)
    if draft_logprobs is not None:
        rows = {(*drafts.shape[:-1], count, logprobs.shape[-1]) for count in (k, k + 1)}
        if draft_logprobs.shape not in rows:
            raise InputError(f"acceptance: draft_logprobs is {draft_logprobs.shape}, expected one of {sorted(rows)}")
        ratio = ratio - _at(draft_logprobs[..., :k, :], drafts)
    return mx.exp(mx.minimum(ratio, 0))


def residual_logits(logprobs: mx.array, draft_logprobs: mx.array) -> mx.array:
    """``log max(p - q, 0)``, not normalised: float32 ``[..., V]`` from log p and log q of that shape.

    Where nothing remains (p = q, which rejects only by rounding), log p itself.
    """
    p, q = logprobs.astype(mx.float32), draft_logprobs.astype(mx.float32)
    rest = mx.maximum(mx.exp(p) - mx.exp(q), 0)
    return mx.where(mx.any(rest > 0, axis=-1, keepdims=True), mx.log(rest), p)


def sampling_logprobs(
    logits: mx.array,
    *,
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
) -> mx.array:
    """The distribution that the sampler of ``mlx_lm.sample_utils.make_sampler`` with these settings draws from.

    Args:
        logits: ``[..., V]`` after the logits processors.
        temp: 0 is certain of the argmax.
        top_p, min_p, min_tokens_to_keep, top_k: applied in this order, to the probabilities *before* temperature, in
            the logits' own type, as mlx_lm does. A top_p of 0 or 1, a min_p or top_k of 0 are off.

    XTC, which draws for each token whether it applies, has no one distribution and is not offered.

    Returns:
        float32 ``[..., V]``: normalised log-probabilities; -inf for what is never drawn.

    Raises:
        InputError: a setting out of its range.
    """
    vocabulary = logits.shape[-1]
    if not 0 <= temp < math.inf:
        raise InputError(f"sampling: temp is {temp}, expected a finite number of at least 0")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if not 0 <= value <= 1:
            raise InputError(f"sampling: {name} is {value}, expected a number from 0 to 1")
    if not 0 <= top_k < vocabulary:
        raise InputError(f"sampling: top_k is {top_k}, expected less than the vocabulary of {vocabulary}, or 0")
    if not 1 <= min_tokens_to_keep <= vocabulary:
        raise InputError(f"sampling: min_tokens_to_keep is {min_tokens_to_keep}, expected 1 to {vocabulary}")
    if temp == 0:
        top = mx.argmax(logits, axis=-1, keepdims=True)
        return mx.where(mx.arange(vocabulary) == top, 0.0, -mx.inf)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if 0 < top_p < 1:
        logprobs = apply_top_p(logprobs, top_p)
    if min_p > 0:
        logprobs = apply_min_p(logprobs, min_p, min_tokens_to_keep)
    if top_k > 0:
        logprobs = apply_top_k(logprobs, top_k)
    logprobs = (logprobs * (1 / temp)).astype(mx.float32)
    return logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)


def _prefix(keep: mx.array, retained: mx.array | int | None) -> mx.array:
    """How many of ``keep`` ``[..., k]`` hold before the first that does not, at most ``retained``."""
    if retained is not None:
        keep = keep & (mx.arange(keep.shape[-1]) < mx.array(retained)[..., None])
    return mx.cumprod(keep.astype(mx.int32), axis=-1).sum(axis=-1)


def _at(rows: mx.array, tokens: mx.array) -> mx.array:
    """Of each row ``[..., k, V]`` the value at its token ``[..., k]``, as float32."""
    return mx.take_along_axis(rows, tokens[..., None], axis=-1).squeeze(-1).astype(mx.float32)


def _row(rows: mx.array, index: mx.array) -> mx.array:
    """Row ``index`` ``[...]`` of ``[..., k, V]``."""
    return mx.take_along_axis(rows, index[..., None, None], axis=-2).squeeze(-2)


def _pad(rows: mx.array, value: float, axis: int) -> mx.array:
    """One more row, of ``value``."""
    shape = list(rows.shape)
    shape[axis] = 1
    return mx.concatenate([rows, mx.full(shape, value)], axis=axis)


def _check_shapes(drafts: tuple[int, ...], rows: tuple[int, ...]) -> None:
    expected = (*drafts[:-1], drafts[-1] + 1) if drafts else None
    if rows != expected:
        raise InputError(f"acceptance: the trunk has rows {rows} for drafts {drafts}, expected {expected}")
