"""Requests that are decoded together: one forward of the model gives each of them a token.

The rows do not touch each other, so that each text is the one that its request would have got alone. Their contexts
are padded on the left to the longest (mlx-lm's BatchKVCache); recurrent states have no length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache

from ..device import evaluate
from ..errors import Fault
from ..experts.ahead import a_layer_ahead
from ..experts.pressure import relieve
from ..experts.streaming import streaming_of
from .prefixes import Prefixes
from .sequences import PENALISED, Sequence

_CLEAR_EVERY = 32  # steps: MLX keeps buffers for reuse, of every number of rows that there has been


@dataclass
class _Pending:
    """A token for each row, on its way. tokens ``[B]``; logprobs ``[B, V]``; totals ``[B]``, the logarithms of the sums
    of exponentials of the logits.
    """

    tokens: mx.array
    logprobs: mx.array
    totals: mx.array

    def launch(self, wait: bool) -> None:
        evaluate((self.tokens, self.logprobs, self.totals), "computing the next tokens", wait=wait)

    def rows(self, keep: mx.array) -> _Pending:
        return _Pending(self.tokens[keep], self.logprobs[keep], self.totals[keep])

    def __add__(self, other: _Pending) -> _Pending:
        return _Pending(
            mx.concatenate([self.tokens, other.tokens]),
            mx.concatenate([self.logprobs, other.logprobs]),
            mx.concatenate([self.totals, other.totals]),
        )


class Batch:
    """The rows that are decoded together. While the host has a token of each row, the device works on the next."""

    def __init__(self, model: nn.Module, prefixes: Prefixes):
        self.rows: list[Sequence] = []
        self._model, self._prefixes = model, prefixes
        self._cache: list[Any] = []
        self._recurrent: list[list[mx.array]] = []  # states before the forward that was launched last
        self._pending: _Pending | None = None
        self._launched = False  # whether the caches hold the pending tokens already
        self._seen: dict[int, mx.array] = {}  # by number of the request, the latest tokens, for penalties
        self._steps = 0

    def join(self, sequence: Sequence, cache: list[Any]) -> None:
        """One row more, with caches of all its tokens but the last. Raises Fault where its first step fails; the others
        are as they were.
        """
        relieve(self._model)
        if sequence.processors:
            self._seen[sequence.number] = mx.array(sequence.context[-PENALISED:])
        try:
            pending = self._next([sequence], mx.array([sequence.last], mx.uint32), cache)
            pending.launch(wait=True)
        except BaseException:
            self._seen.pop(sequence.number, None)
            raise
        sequence.phase = "decoding"
        merged = [layer.merge([layer]) for layer in cache]
        if self.rows:
            assert self._pending is not None
            for mine, new in zip(self._cache, merged, strict=True):
                mine.extend(new)
            self._pending += pending
        else:
            self._cache, self._pending = merged, pending
        self.rows.append(sequence)

    def step(self) -> int:
        """Give each row its token, and have the next ones computed; rows that end go. Returns the tokens given.

        Raises Fault where the forward fails: no row can go on then.
        """
        pending = self._pending
        assert pending is not None, "there are rows"
        relieve(self._model)
        following = None
        if any(len(row.tokens) + 1 < row.limit for row in self.rows):
            self._recurrent = [layer.cache for layer in self._cache if isinstance(layer, ArraysCache)]
            self._recurrent = [list(arrays) for arrays in self._recurrent]
            following = self._next(self.rows, pending.tokens, self._cache)
            following.launch(wait=False)
        self._launched = following is not None
        pending.launch(wait=True)
        tokens, totals = np.array(pending.tokens).tolist(), np.array(pending.totals.astype(mx.float32))
        given = 0
        for place, row in enumerate(self.rows):
            if row.outcome is not None:
                continue
            if not np.isfinite(totals[place]):
                row.fail(Fault("the model's logits are not finite: its weights are broken or overflow their type"))
                continue
            given += 1
            if row.accept(tokens[place], pending.logprobs[place]) and not self._slides:
                self._prefixes.keep(row.context, self._taken(place))
        self._pending = following
        self.drop()
        self._steps += 1
        if self._steps % _CLEAR_EVERY == 0:
            mx.clear_cache()
        return given

    def drop(self) -> None:
        """Forget the rows that have ended."""
        keep = [place for place, row in enumerate(self.rows) if row.outcome is None]
        if len(keep) == len(self.rows):
            return
        for row in self.rows:
            if row.outcome is not None:
                self._seen.pop(row.number, None)
        self.rows = [self.rows[place] for place in keep]
        if not keep:
            self._cache, self._pending, self._recurrent = [], None, []
            return
        index = mx.array(keep)
        for layer in self._cache:
            layer.filter(index)
        if self._pending:
            self._pending = self._pending.rows(index)

    def _next(self, rows: list[Sequence], tokens: mx.array, cache: list[Any]) -> _Pending:
        """What follows ``tokens`` ``[B]``, one of each of ``rows``."""
        with a_layer_ahead(streaming_of(self._model)):
            logits = self._model(tokens[:, None], cache=cache)[:, -1]
        if any(row.processors for row in rows):
            logits = mx.concatenate(
                [self._process(row, tokens[i : i + 1], logits[i : i + 1]) for i, row in enumerate(rows)]
            )
        totals = mx.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = logits - totals
        return _Pending(_draw(rows, logprobs), logprobs, totals[:, 0])

    def _process(self, row: Sequence, token: mx.array, logits: mx.array) -> mx.array:
        if not row.processors:
            return logits
        seen = mx.concatenate([self._seen[row.number].astype(mx.uint32), token])[-PENALISED:]
        self._seen[row.number] = seen
        return row.process(seen, logits)

    @property
    def _slides(self) -> bool:
        """Whether there are sliding windows, which have dropped what the step before has seen: texts are not kept."""
        return any(isinstance(layer, BatchRotatingKVCache) for layer in self._cache)

    def _taken(self, place: int) -> list[Any]:
        """The caches of a row that has just ended, of all its tokens but the last."""
        recurrent = iter(self._recurrent)
        result = []
        for layer in self._cache:
            row = layer.extract(place)
            if self._launched:
                if isinstance(layer, ArraysCache):
                    row.cache = [array[place : place + 1] for array in next(recurrent)]
                else:
                    row.trim(1)
            result.append(row)
        return result


def _draw(rows: list[Sequence], logprobs: mx.array) -> mx.array:
    """A token for each row, ``[B]``; in one go where all are drawn alike."""
    first = rows[0]
    if all(row.sampling == first.sampling and not row.seeded for row in rows):
        return first.sampling(logprobs).astype(mx.uint32)
    return mx.concatenate([row.draw(logprobs[i : i + 1]).astype(mx.uint32) for i, row in enumerate(rows)])
