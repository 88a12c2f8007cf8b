"""A job in the works: what has been decoded of it, what that becomes as text, and what it has cost."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import Fault, StrataError
from ..experts.traffic import Traffic
from ..speculation.record import Round
from ..speculation.sampling import LogitsProcessor, Sampling
from .jobs import End, Job, Piece, Token, Usage
from .prefixes import Ids
from .stops import StopStrings
from .streams import Stream

PENALISED = 20  # the latest tokens that penalties are about, as in mlx_lm


class Sequence:
    """One job from its arrival to its end.

    number: of the request. limit: most tokens. mode: as in Usage. streams: whether experts are read from disk.

    phase, read, cached, drafted, accepted, alone: as in RequestState and Usage. tokens: decoded so far.
    """

    def __init__(self, number: int, job: Job, tokenizer: TokenizerWrapper, limit: int, mode: str, streams: bool):
        self.number, self.job, self.limit = number, job, limit
        self.stream = Stream(job, self._usage)
        self.prompt: Ids = np.array(job.prompt, np.int32)
        self.tokens: list[int] = []
        self.phase, self.read, self.cached, self.alone = "queued", 0, 0, False
        self.drafted = self.accepted = 0
        self.arrived = time.perf_counter()
        self.first_token: float | None = None  # seconds after the arrival
        self.outcome: str | None = None  # as in OUTCOMES, once it has ended
        greedy = job.temperature == 0 or job.top_p == 0
        self.sampling = Sampling(0.0) if greedy else Sampling(job.temperature, job.top_p, job.min_p, 1, job.top_k)
        self.seeded = job.seed is not None and not greedy
        self.wants_logprobs = job.top_logprobs is not None
        self._tokenizer, self._mode, self._streams = tokenizer, mode, streams
        self._detokenizer = tokenizer.detokenizer
        self._stops = StopStrings(job.stop)
        self._key: mx.array | None = None
        self._share = np.zeros(3)  # hits, misses, bytes
        self._ended_after = 0.0
        self.processors: Seq[LogitsProcessor] = make_logits_processors(
            dict(job.logit_bias) or None,
            None if job.repetition_penalty == 1 else job.repetition_penalty,
            PENALISED,
            job.presence_penalty or None,
            PENALISED,
            job.frequency_penalty or None,
            PENALISED,
        )

    @property
    def context(self) -> Ids:
        """All of its tokens but the last one, which is the next to be computed with."""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])[:-1]

    @property
    def last(self) -> int:
        """The token to be computed with next."""
        return self.tokens[-1] if self.tokens else self.job.prompt[-1]

    def draw(self, logprobs: mx.array) -> mx.array:
        """A token ``[1]`` by log-probabilities ``[1, V]``, on the generation thread."""
        if not self.seeded:
            return self.sampling(logprobs)
        if self._key is None:
            assert self.job.seed is not None
            self._key = mx.random.key(self.job.seed % 2**64)
        self._key, now = mx.random.split(self._key)
        return mx.random.categorical(self.sampling.logprobs(logprobs), key=now)

    def process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits ``[1, V]`` after penalties and bias, for the latest of ``tokens`` at least."""
        for processor in self.processors:
            logits = processor(tokens, logits)
        return logits

    def accept(self, token: int, logprobs: mx.array) -> bool:
        """Take a decoded token with its log-probabilities ``[V]``, and pass its text on. Whether it is the last one;
        conclude() then tells how the text ended.
        """
        if not self.tokens:
            self.first_token = time.perf_counter() - self.arrived
        self.tokens.append(token)
        stop, full = token in self._tokenizer.eos_token_ids, len(self.tokens) >= self.limit
        if not stop:
            self._detokenizer.add_token(token)
        if stop or full:
            self._detokenizer.finalize()
        text = self._stops.feed(self._detokenizer.last_segment)
        met = self._stops.met
        if (stop or full) and met is None:
            text += self._stops.rest()
        tokens = (self._token(token, logprobs),) if self.wants_logprobs and not stop else ()
        if text or tokens:
            self.stream.put(Piece(text, tokens))
        if stop or full or met is not None:
            self.outcome = "stop" if stop or met is not None else "length"
        return self.outcome is not None

    def conclude(self) -> None:
        """Once the cost of the last window is known, tell how the text ended, if it has."""
        if self.outcome is not None and not self._ended_after:
            self._ended_after = time.perf_counter() - self.arrived
            self.stream.put(End(self.outcome, self._stops.met, self._usage()))

    def share(self, traffic: Traffic, among: int) -> None:
        """Take part in the cost of a window that ``among`` requests had."""
        self._share += np.array([traffic.hits, traffic.misses, traffic.bytes]) / among

    def round(self, latest: Round) -> None:
        self.drafted += latest.drafted
        self.accepted += latest.accepted

    def cancel(self) -> None:
        """End it because nobody reads on."""
        self.outcome = "cancelled"
        self.conclude()

    def fail(self, error: Exception) -> None:
        """End it with a Fault."""
        self.outcome = "failed"
        fault = error if isinstance(error, Fault) else Fault(_reason(error))
        self._ended_after = time.perf_counter() - self.arrived
        self.stream.put(fault)

    def _token(self, token: int, logprobs: mx.array) -> Token:
        row: Any = np.array(logprobs.astype(mx.float32))
        count = self.job.top_logprobs or 0
        best = np.argpartition(-row, count)[:count] if count else np.zeros(0, np.intp)
        best = best[np.argsort(-row[best], kind="stable")]
        top = tuple((int(other), self._tokenizer.decode([int(other)]), float(row[other])) for other in best)
        return Token(token, self._tokenizer.decode([token]), float(row[token]), top)

    def _usage(self) -> Usage:
        hits, misses, nbytes = (int(value) for value in np.rint(self._share))
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            completion_tokens=len(self.tokens),
            drafted=self.drafted,
            accepted=self.accepted,
            mode=self._mode,
            hits=hits if self._streams else None,
            misses=misses if self._streams else None,
            bytes_read=nbytes if self._streams else None,
            seconds_prompt=self.first_token or 0.0,
            seconds_total=self._ended_after or time.perf_counter() - self.arrived,
        )


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "there was not enough memory for this request; ask for fewer tokens, or send a shorter prompt"
    if isinstance(error, StrataError):
        return str(error)
    return f"the server failed on this request: {type(error).__name__}: {error}"
