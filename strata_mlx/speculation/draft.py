"""Drafting: what could come next, by the MTP head or by looking it up in the context.

A drafter is told every committed token, and proposes what may follow. To write another one, implement Drafter and hand
it to SpeculativeDecoder. It cannot spoil the text: the trunk confirms every token.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import InputError
from ..models.mtp import DraftHead, confidence
from ..models.numpy_head import for_drafts
from ..models.trunk import Hidden, Trunk
from ..routing import drafting
from .sampling import Sampling
from .window import Window

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

    With several heads, head i makes draft i: a row of head i for token t takes token t+1+i, so that committed tokens
    reach it i rows later than the first head, and in a chain it reads i rows that end with drafts.

    cache: the head's, of all pairs of a hidden state and the token after it that were observed, and then of its own
    chain, which is taken back before the next round.

    Args:
        model: one loaded with its head.
        sampling: how drafts are drawn; None takes the likeliest token.

    Raises:
        InputError: the model has no head.
    """

    def __init__(self, model: nn.Module, sampling: Sampling | None = None):
        if "mtp" not in model:
            raise InputError("the model was loaded without an MTP head; load it with mtp=True")
        self._trunk, self._sampling = Trunk(model), sampling
        self._head: DraftHead = for_drafts(model.mtp)
        self.cache = self._head.make_cache()
        self._observed: list[tuple[mx.array, mx.array]] = []  # tokens [N] and hidden states [1, N, D]
        # By head, hidden states [1, N, D] whose tokens are not yet committed.
        self._waiting: list[mx.array | None] = [None] * self._head.heads
        self._chain: Window | None = None  # the caches before the guesses at their end
        self._last: mx.array | None = None  # [1, 1, D], the first head's output for the last token observed

    def observe(self, tokens: mx.array, hidden: Hidden) -> None:
        self._observed.append((tokens, getattr(hidden, self._head.takes)))
        waiting = sum(tokens.size for tokens, _ in self._observed)
        while waiting - self._observed[0][0].size >= CAUGHT_UP:
            waiting -= self._observed.pop(0)[0].size
            self._waiting = [None] * self._head.heads

    def catch_up(self) -> list[mx.array]:
        if self._chain:
            self._chain.commit(0)
            self._chain = None
        if self._observed:
            tokens = mx.concatenate([tokens for tokens, _ in self._observed])
            hidden = mx.concatenate([hidden for _, hidden in self._observed], axis=1)
            self._observed.clear()
            self._last = self._read(tokens, hidden)[:, -1:]
        arrays = [array for layer in self.cache for array in (layer.keys, layer.values)]
        return [array for array in (*arrays, *self._waiting) if array is not None]

    def _read(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """What the first head makes of committed tokens; the others read as far as they can."""
        first = states = self._run(0, hidden, tokens)
        for head in range(1, self._head.heads):
            states = _joined(self._waiting[head], states if self._head.chained else hidden)
            rows = max(states.shape[1] - (1 if self._head.chained else head), 0)
            self._waiting[head] = states[:, rows:]
            if rows == 0 and self._head.chained:
                break
            states = self._run(head, states[:, :rows], tokens) if rows else states
        return first

    def steps(self) -> Iterator[Step]:
        self.catch_up()
        if self._last is None:
            return
        self._chain = Window(self.cache, 1)
        states, drafts, last = self._last, list[mx.array](), self._head.heads - 1
        for number in count():
            step = self._draft(states[:, -1:], min(number, last))
            yield step
            drafts.append(step.token)
            if number >= last:  # the last head goes on from what it made itself
                states = states[:, -1:]
            elif self._head.chained:
                states = _joined(self._waiting[number + 1], states if number else states[:, :0])
            else:
                states = _joined(self._waiting[number + 1], states[:, :0])
            recent = drafts[-1] if states.shape[1] == 1 else mx.concatenate(drafts)
            states = self._run(min(number + 1, last), states, recent)

    def _run(self, head: int, states: mx.array, tokens: mx.array) -> mx.array:
        """A head on hidden states ``[1, T, D]`` and the last T of ``tokens`` ``[N]``."""
        rows = states.shape[1]
        tokens = tokens if tokens.size == rows else tokens[-rows:]
        with drafting():
            return self._head.read(self._trunk, tokens[None], states, self.cache, head)

    def _draft(self, state: mx.array, head: int) -> Step:
        """A candidate by a head's row ``[1, 1, D]``."""
        if self._sampling is None:
            return Step(*self._head.likeliest(self._trunk, state, head))
        logits = self._head.logits(self._trunk, state, head)[0].astype(mx.float32)
        logprobs = self._sampling.logprobs(logits)
        return Step(mx.random.categorical(logprobs), confidence(logits), logprobs[0])


def _joined(before: mx.array | None, states: mx.array) -> mx.array:
    if before is None:
        return states
    return mx.concatenate([before, states], axis=1) if states.shape[1] else before


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
