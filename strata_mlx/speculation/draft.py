"""Drafting: what could come next, by the MTP head or by looking it up in the context.

A drafter is told every committed token, and proposes what may follow. To write another one, implement Drafter and hand
it to SpeculativeDecoder. It cannot spoil the text: the trunk confirms every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from ..errors import InputError
from ..models.trunk import Hidden, Trunk
from .sampling import Sampling

MAX_STEPS = 8
CAUGHT_UP = 32  # tokens that a head which was not asked for long still reads, the latest ones
_SHORTEST, _LONGEST = 3, 32  # suffixes that prompt lookup searches for


class Step(NamedTuple):
    """One draft, lazy perhaps.

    token: ``[1]``, an id. confidence: float32 scalar, what the retention gates look at: the drafter's probability of
    its likeliest candidate, which is the token unless that was drawn. (A gate on the drawn token's own probability
    would bias the text.) logprobs: ``[V]`` normalised, what the token was drawn from; None where it is certain.
    """

    token: mx.array
    confidence: mx.array
    logprobs: mx.array | None = None


class Drafter(Protocol):
    """One per text: it may keep what it learns from the tokens."""

    def observe(self, tokens: mx.array, hidden: Hidden) -> None:
        """Take note of committed ``tokens`` ``[N]``, lazy perhaps, in order and without a gap, and of the hidden states
        ``[1, N, D]`` of the tokens *before* each. Called with chunks of the prompt, from its second token on, and
        after every round.
        """

    def catch_up(self) -> list[mx.array]:
        """Work off what was observed, lazily: what is returned is evaluated with the prompt's chunk."""

    def steps(self) -> Iterator[Step]:
        """Drafts of the tokens after the last one observed, as many as are asked for or as there are."""


class MTPDrafter:
    """Drafts with the model's MTP head, each from the trunk's or, down the chain, from the head's own hidden state.

    cache: the head's, of all pairs of a hidden state and the token after it that were observed, and then of its own
    chain, which is trimmed before the next round.

    Args:
        model: one loaded with its head.
        sampling: how drafts are drawn; None takes the likeliest token.

    Raises:
        InputError: the model has no head.
    """

    def __init__(self, model: nn.Module, sampling: Sampling | None = None):
        if "mtp" not in model:
            raise InputError("the model was loaded without an MTP head; load it with mtp=True")
        self.cache = [KVCache() for _ in model.mtp.layers]
        self._trunk, self._head, self._sampling = Trunk(model), model.mtp, sampling
        self._observed: list[tuple[mx.array, mx.array]] = []  # tokens [N] and hidden states [1, N, D]
        self._chained = 0  # rows at the end of the cache that are guesses
        self._last: mx.array | None = None  # [1, 1, D], the head's output for the last token observed

    def observe(self, tokens: mx.array, hidden: Hidden) -> None:
        self._observed.append((tokens, getattr(hidden, self._head.takes)))
        waiting = sum(tokens.size for tokens, _ in self._observed)
        while waiting - self._observed[0][0].size >= CAUGHT_UP:
            waiting -= self._observed.pop(0)[0].size

    def catch_up(self) -> list[mx.array]:
        for layer in self.cache:
            layer.trim(self._chained)
        self._chained = 0
        if self._observed:
            tokens = mx.concatenate([tokens for tokens, _ in self._observed])
            hidden = mx.concatenate([hidden for _, hidden in self._observed], axis=1)
            self._observed.clear()
            self._last = self._head(self._embed(tokens), hidden, self.cache)[:, -1:]
        return [array for layer in self.cache for array in (layer.keys, layer.values) if array is not None]

    def steps(self) -> Iterator[Step]:
        self.catch_up()
        hidden = self._last
        while hidden is not None:
            step = self._draft(self._trunk.rounded_logits(hidden)[:, -1])
            yield step
            hidden = self._head(self._embed(step.token), hidden, self.cache)
            self._chained += 1

    def _draft(self, logits: mx.array) -> Step:
        """A candidate by the head's logits ``[1, V]``."""
        logits = logits.astype(mx.float32)
        confidence = mx.exp(mx.max(logits) - mx.logsumexp(logits))
        if self._sampling is None:
            return Step(mx.argmax(logits, axis=-1), confidence)
        logprobs = self._sampling.logprobs(logits)
        return Step(mx.random.categorical(logprobs), confidence, logprobs[0])

    def _embed(self, tokens: mx.array) -> Any:
        return self._trunk.embed(tokens[None])


class PromptLookupDrafter:
    """Drafts what followed the last time that the context ended like this: the longest suffix of 3 to 32 tokens that
    occurs before, at its latest occurrence (Saxena, *Prompt Lookup Decoding*, 2023).
    """

    def __init__(self) -> None:
        self._observed: list[mx.array] = []
        self._context: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # of the shortest suffixes, where each occurs

    def observe(self, tokens: mx.array, hidden: Hidden) -> None:  # noqa: ARG002
        self._observed.append(tokens)

    def catch_up(self) -> list[mx.array]:
        return []

    def steps(self) -> Iterator[Step]:
        for tokens in self._observed:
            for token in np.array(tokens).tolist():
                self._context.append(token)
                suffix = tuple(self._context[-_SHORTEST:])
                self._ends.setdefault(suffix, []).append(len(self._context))
        self._observed.clear()
        for token in self._context[self._continuation() :]:
            yield Step(mx.array([token], mx.uint32), mx.array(1.0))

    def _continuation(self) -> int:
        """Where the continuation of the longest repeated suffix begins; the end of the context where there is none."""
        *places, end = self._ends.get(tuple(self._context[-_SHORTEST:]), [0])
        if len(self._context) <= _SHORTEST or not places:
            return len(self._context)
        return max(places, key=lambda place: (self._match(place, end), place))

    def _match(self, place: int, end: int) -> int:
        """How many tokens before ``place`` are those before ``end``, up to the longest suffix."""
        context, most = self._context, min(place, _LONGEST)
        return next((n for n in range(most) if context[place - 1 - n] != context[end - 1 - n]), most)
