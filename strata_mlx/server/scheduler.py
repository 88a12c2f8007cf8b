"""Who gets the next window of the model: prompts and texts take turns, and nobody waits for another's end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..device import on_cpu
from ..errors import InputError, StrataError, in_one_line
from ..experts.streaming import streaming_of
from ..experts.traffic import Traffic
from ..models.moe import blocks
from ..policy import Policy
from ..prefill import make_cache, rows_at_a_time
from ..speculation.window import check_rollback
from .alone import Alone
from .batch import Batch
from .prefixes import Prefixes
from .reading import Reading
from .sequences import Sequence
from .state import Totals

# Rows of a prompt that are read at a time while others decode, who wait for them: about as long as a few steps.
_BESIDE_CPU, _BESIDE_GPU = 96, 512
_FAILURES = (StrataError, MemoryError)  # of one window, after which the next may work


class Scheduler:
    """The requests that are being served, all on the generation thread.

    A turn is a chunk of a prompt, prompts one after another, and then a token for everybody who has been read. One
    that is alone drafts, if it may: not where a seed is to repeat a sampled text, which drafts depend on the clock and
    on others for.

    speculation: options of SpeculativeDecoder; None never drafts.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        prefixes: Prefixes,
        totals: Totals,
        speculation: dict[str, Any] | None,
        prefill_step_size: int,
    ):
        self._model, self._tokenizer, self._prefixes, self._totals = model, tokenizer, prefixes, totals
        self._speculation = speculation
        self._streaming = streaming_of(model)
        self._rows = rows_at_a_time(model, prefill_step_size)
        self._rows_beside = min(self._rows, _BESIDE_CPU if on_cpu() else _BESIDE_GPU)
        self._waiting: deque[Sequence] = deque()
        self._readings: deque[Reading] = deque()
        self._alone: Alone | None = None
        self._batch = Batch(model, prefixes)
        self._ranks = getattr(model, "ranks", None)

    @property
    def gone(self) -> set[int]:
        """The numbers of requests whose reader has gone at the moment."""
        sequences = [*self._waiting, *(reading.sequence for reading in self._readings), *self._batch.rows]
        sequences += [self._alone.sequence] if self._alone else []
        return {sequence.number for sequence in sequences if sequence.stream.cancelled}

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self._serving

    @property
    def _serving(self) -> bool:
        return bool(self._readings or self._alone or self._batch.rows)

    def add(self, sequence: Sequence) -> None:
        """One request more."""
        self._waiting.append(sequence)

    def turn(self, gone: Collection[int] | None = None) -> None:
        """Let everybody come a window further. Afterwards, sequences that have an outcome are done with.

        gone: numbers of those that end now; None is whose reader has gone.
        """
        self._cancel(self.gone if gone is None else gone)
        while self._waiting:
            self._begin(self._waiting.popleft())
        self._read()
        if self._alone:
            self._step_alone(self._alone)
        elif self._batch.rows:
            self._step_batch()
        if not self.busy:
            mx.clear_cache()

    def _cancel(self, gone: Collection[int]) -> None:
        if self._alone and self._alone.sequence.number in gone:
            self._alone.leave()
            self._alone.sequence.cancel()
            self._alone = None
        for sequence in [*self._waiting, *(reading.sequence for reading in self._readings), *self._batch.rows]:
            if sequence.number in gone:
                sequence.cancel()
        self._waiting = deque(sequence for sequence in self._waiting if sequence.outcome is None)
        self._readings = deque(reading for reading in self._readings if reading.sequence.outcome is None)
        self._batch.drop()

    def _begin(self, sequence: Sequence) -> None:
        if not self._serving:
            for block in blocks(self._model):
                block.routing.begin()
        with self._window("prompt", [sequence]):
            drafts = self._speculation is not None and not sequence.seeded and not self.busy
            self._readings.append(Reading(self._model, sequence, self._prefixes, drafts))
            self._totals.prompt_tokens += len(sequence.prompt)
            self._totals.cached_tokens += sequence.cached

    def _read(self) -> None:
        """A chunk of the next prompt, and more prompts where these are so short that they are read within its time."""
        left = self._rows_beside
        while self._readings and (left == self._rows_beside or self._readings[0].rest <= left):
            left -= max(1, self._read_chunk())

    def _read_chunk(self) -> int:
        """Of the next prompt; of one that is then complete, the first token comes next. Returns the tokens read."""
        reading = self._readings.popleft()
        rest = reading.rest
        with self._window("prompt", [reading.sequence]):
            if not reading.done:
                reading.advance(self._rows_beside if self._serving else self._rows)
            if not reading.done:
                self._readings.append(reading)
            elif reading.drafter and not self._serving:
                assert self._speculation is not None
                self._alone = Alone(
                    self._model, self._tokenizer, reading, self._prefixes, self._speculation, self._totals.round
                )
            else:
                self._join(reading)
        return rest - reading.rest

    def _join(self, reading: Reading) -> None:
        if self._alone:
            alone, self._alone = self._alone, None
            with self._window("batch", [alone.sequence]):
                self._batch.join(alone.sequence, alone.leave())
        self._batch.join(reading.sequence, reading.cache)

    def _step_alone(self, alone: Alone) -> None:
        given = 0
        with self._window("", [alone.sequence]):
            given = alone.step()
        self._totals.completion_tokens += given
        if alone.sequence.outcome is not None:
            self._alone = None

    def _step_batch(self) -> None:
        given = 0
        with self._window("batch", self._batch.rows):
            given = self._batch.step()
        self._totals.windows += 1
        self._totals.completion_tokens += given
        self._batch.drop()

    @contextmanager
    def _window(self, part: str, sequences: list[Sequence]) -> Iterator[None]:
        """Work for ``sequences``, who share what it costs, and all fail where it fails. part: of Totals.seconds."""
        sequences = list(sequences)
        before = self._streaming.traffic() if self._streaming else Traffic()
        start = time.perf_counter()
        try:
            yield
        except _FAILURES as error:
            if self._ranks:  # which would not go on alike
                self._ranks.abort(in_one_line(error), wait=True)
            for sequence in sequences:
                if sequence.outcome is None:
                    sequence.fail(error)
        finally:
            if part:
                self._totals.seconds[part] += time.perf_counter() - start
            if self._streaming:
                traffic = self._streaming.traffic() - before
                for sequence in sequences:
                    sequence.share(traffic, len(sequences))
            for sequence in sequences:
                sequence.conclude()


def speculation_of(model: nn.Module, mtp: str, policy: Policy) -> dict[str, Any] | None:
    """How a request that is alone drafts: options of SpeculativeDecoder; None where none does.

    Raises InputError where ``mtp`` is "on" and the model cannot.
    """
    if mtp == "off" or (mtp == "auto" and "mtp" not in model):
        return None
    if "mtp" not in model:
        raise InputError("mtp is on, but the model was loaded without an MTP head; load it with mtp=True, or say off")
    check_rollback(make_cache(model))
    return {
        "retention": policy.retention,
        "max_steps": policy.max_steps,
        "drafting": policy.drafting,
        "auto": mtp == "auto",
    }
