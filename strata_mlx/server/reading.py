"""A prompt on its way into caches, chunk by chunk."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..device import evaluate
from ..experts.pressure import relieve
from ..models.trunk import Hidden, Trunk
from ..prefill import make_cache
from ..speculation.draft import MTPDrafter
from .prefixes import LEAST_TOKENS, Head, Prefixes, thawed
from .sequences import Sequence


class Reading:
    """Reads the prompt of ``sequence``, all but its last token, into ``cache``, from the longest snapshot on that
    ``prefixes`` has, and leaves snapshots there: at the end, and where the prompt parts from what was read before.

    drafts: whether a draft head reads it too.
    """

    def __init__(self, model: nn.Module, sequence: Sequence, prefixes: Prefixes, drafts: bool):
        self.sequence = sequence
        self._model, self._trunk, self._prefixes = model, Trunk(model), prefixes
        self._prompt = mx.array(sequence.prompt)
        known, seen = prefixes.find(sequence.prompt)
        self.cache: list[Any] = make_cache(model) if known is None else thawed(known.cache)
        sequence.phase = "prompt"
        sequence.read = sequence.cached = 0 if known is None else len(known.tokens)
        self._marks = [len(sequence.prompt) - 1]
        if seen >= sequence.read + LEAST_TOKENS:
            self._marks.insert(0, seen)
        self.drafter = MTPDrafter(model, sequence.sampling if sequence.sampling.temp else None) if drafts else None
        self._hidden: Hidden | None = None  # of the last token read, whose follower the drafter has not observed
        if self.drafter and known and known.head:
            self.drafter.cache = thawed(known.head.cache)
            self._hidden = known.head.hidden

    @property
    def rest(self) -> int:
        """How many tokens are left to be read."""
        return len(self.sequence.prompt) - 1 - self.sequence.read

    @property
    def done(self) -> bool:
        return self.rest == 0

    def advance(self, rows: int) -> None:
        """Read up to ``rows`` tokens more. Raises Fault where that fails; the sequence cannot go on then."""
        sequence, start = self.sequence, self.sequence.read
        end = min(start + rows, next(mark for mark in self._marks if mark > start))
        relieve(self._model)
        hidden = self._trunk(self._prompt[None, start:end], self.cache)
        arrays: list[Any] = [layer.state for layer in self.cache]
        if self.drafter:
            self._observe(start, hidden)
            arrays += [self.drafter.catch_up(), self._hidden]
        evaluate(arrays, f"reading tokens {start} to {end} of a prompt")
        mx.clear_cache()
        sequence.read = end
        if end in self._marks:
            head = Head(self.drafter.cache, self._hidden) if self.drafter else None
            self._prefixes.keep(sequence.prompt[:end], self.cache, head)

    def finish(self) -> None:
        """Tell the drafter of the last token."""
        if self.drafter and self._hidden is not None:
            self.drafter.observe(self._prompt[-1:], self._hidden)

    def _observe(self, start: int, hidden: Hidden) -> None:
        """Tell the drafter which tokens follow the one before ``start`` and those after it, whose states are
        ``hidden``, save the last one, whose follower may be another in another prompt.
        """
        assert self.drafter is not None
        rows = hidden.after.shape[1]
        followers, states = self._prompt[start + 1 : start + rows], hidden.first(rows - 1)
        if self._hidden is not None:
            followers = self._prompt[start : start + rows]
            states = Hidden(*(mx.concatenate(list(pair), axis=1) for pair in zip(self._hidden, states, strict=True)))
        if followers.size:
            self.drafter.observe(followers, states)
        self._hidden = Hidden(hidden.before[:, -1:], hidden.after[:, -1:])
