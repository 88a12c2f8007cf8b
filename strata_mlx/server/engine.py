"""The engine of the server: jobs go in from any thread, and one generation thread, which alone touches the model,
decodes them.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..device import evaluate
from ..errors import Fault, InputError, in_one_line
from ..experts import system
from ..experts.options import fit_of, save_profile
from ..experts.streaming import streaming_of
from ..models.family import text_args
from ..models.moe import blocks
from ..policy import MTP, Policy
from .jobs import Busy, Job, JobError
from .prefixes import Prefixes
from .scheduler import Scheduler, speculation_of
from .sequences import Sequence
from .state import ExpertState, LayerState, MemoryState, RequestState, State, Totals
from .streams import Stream

if TYPE_CHECKING:
    from ..parallel.ranks import Ranks

PREFIX_BYTES = 256_000_000
STALLED = 120.0  # seconds in one turn, after which the thread does not count as alive
_PROFILE_EVERY = 60.0  # seconds between two times that the expert profile is written
_CLOSING = 30.0  # seconds that close() waits for the turn in hand
_LONGEST_WAIT = 60  # seconds that a client is told to wait at most


class Engine:
    """Decodes many jobs at a time with one model.

    mtp: whether a request that is the only one drafts: "on", "off", or "auto", while that pays by the clock; None is
    what ``policy`` says. policy: how it drafts; its routing is not looked at, see set_routing(). max_queue: requests
    that may wait. concurrency: requests that are served at the same time. prefix_bytes: memory for what was read of
    earlier prompts and texts. prefill_step_size: tokens of a prompt that are read at a time. max_context: tokens that a
    request may come to, its prompt included.

    Raises:
        InputError: options out of range, or ``mtp`` "on" for a model without a head.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        *,
        mtp: str | None = None,
        policy: Policy | None = None,
        max_queue: int = 64,
        concurrency: int = 16,
        prefix_bytes: int = PREFIX_BYTES,
        prefill_step_size: int = 2048,
        max_context: int | None = None,
    ):
        _at_least("max_queue", max_queue, 0)
        _at_least("concurrency", concurrency, 1)
        _at_least("prefix_bytes", prefix_bytes, 0)
        _at_least("prefill_step_size", prefill_step_size, 1)
        _at_least("max_context", max_context, 2)
        self.policy = policy or Policy()
        self.mtp = mtp or self.policy.mtp
        if self.mtp not in MTP:
            raise InputError(f"mtp is {mtp!r}, expected one of {', '.join(MTP)}")
        self._model, self._tokenizer = model, tokenizer
        self._max_queue, self._concurrency, self._max_context = max_queue, concurrency, max_context
        self._prefixes, self._totals = Prefixes(prefix_bytes), Totals()
        speculation = speculation_of(model, self.mtp, self.policy)
        self._scheduler = Scheduler(model, tokenizer, self._prefixes, self._totals, speculation, prefill_step_size)
        self._blocks, self._streaming = blocks(model), streaming_of(model)
        self._ranks: Ranks | None = getattr(model, "ranks", None)
        self._experts: int = getattr(text_args(model), "num_experts", 0)
        self._vocabulary: int = text_args(model).vocab_size
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._turn_began: float | None = None
        self._next_profile = time.monotonic() + _PROFILE_EVERY
        self._changed = threading.Condition()  # guards all that follows
        self._queue: deque[Sequence] = deque()
        self._served: list[Sequence] = []
        self._number = 0
        self._seconds_each = 1.0  # that a request takes, a moving average
        self._closing = False
        self._trouble: str | None = None

    def start(self) -> None:
        """Start the generation thread."""
        # What was loaded lazily belongs to the stream of the thread that loaded it.
        evaluate(self._model.parameters(), "loading the model")
        self._thread.start()

    def close(self) -> None:
        """Stop after the turn in hand; every stream that has not ended gets a Fault. May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(_CLOSING)
        self._end_all(Fault("the server is closing"))

    @property
    def alive(self) -> bool:
        """Whether the generation thread works, and has come further in the last STALLED seconds."""
        return self._thread.is_alive() and self.trouble is None

    @property
    def trouble(self) -> str | None:
        """Why the generation thread does not work, in words."""
        began = self._turn_began
        if self._trouble is None and began is not None and time.monotonic() - began > STALLED:
            return f"the generation thread has been at one window for more than {STALLED:.0f} seconds"
        return self._trouble

    @property
    def mode(self) -> str:
        """As in Usage."""
        return "biased" if any(block.routing.mode == "biased" for block in self._blocks) else "exact"

    def submit(self, job: Job) -> Stream:
        """Have ``job`` decoded, as soon as there is room. From any thread; never waits.

        Raises:
            Busy: max_queue requests are waiting.
            JobError: tokens that the model does not have, or more of them than there is room for.
            Fault: the engine does not work any more.
        """
        limit = self._check(job)
        with self._changed:
            if self._closing or self._trouble:
                raise Fault(self._trouble or "the server is closing")
            if len(self._queue) - (self._concurrency - len(self._served)) >= self._max_queue:
                self._totals.requests["refused"] += 1
                raise Busy(min(_LONGEST_WAIT, max(1, math.ceil(self._seconds_each / self._concurrency))))
            self._number += 1
            sequence = Sequence(self._number, job, self._tokenizer, limit, self.mode, self._streaming is not None)
            self._queue.append(sequence)
            self._changed.notify_all()
        return sequence.stream

    def state(self) -> State:
        """The engine at this moment, from any thread."""
        with self._changed:
            served, queued = list(self._served), list(self._queue)
            totals = self._totals.copy()
        return State(
            at=time.monotonic(),
            alive=self.alive,
            trouble=self.trouble,
            mode=self.mode,
            policy=str(self.policy),
            routing=str(self._blocks[0].routing),
            drafting=self.mtp,
            queue=len(queued),
            max_queue=self._max_queue,
            concurrency=self._concurrency,
            requests=tuple(_request_state(sequence) for sequence in (*served, *queued)),
            totals=totals,
            experts=self._expert_state(),
            memory=self._memory_state(),
        )

    def _check(self, job: Job) -> int:
        """How many tokens ``job`` may come to."""
        if not (min(job.prompt) >= 0 and max(job.prompt) < self._vocabulary):
            raise JobError("prompt", f"the prompt has token ids that are not in the vocabulary of {self._vocabulary}")
        for token in job.logit_bias:
            if not 0 <= token < self._vocabulary:
                raise JobError("logit_bias", f"logit_bias: {token} is not in the vocabulary of {self._vocabulary}")
        if job.top_k >= self._vocabulary:
            raise JobError("top_k", f"top_k is {job.top_k}, expected less than the vocabulary of {self._vocabulary}")
        if self._max_context is None:
            return job.max_tokens
        room = self._max_context - len(job.prompt)
        if room < 1:
            raise JobError(
                "prompt",
                f"the prompt has {len(job.prompt)} tokens, and this server has room for {self._max_context} with the "
                f"answer: send less, or start the server with a larger --max-context",
            )
        return min(job.max_tokens, room)

    def _run(self) -> None:
        """The generation thread. MLX's default stream and random state are each thread's own: all is computed on that
        of this thread, and the draws of each engine are its own.
        """
        try:
            self._seed()
            with wired_limit(self._model):
                while (admitted := self._await()) is not None:
                    self._turn_began = time.monotonic()
                    self._turn(admitted)
                    self._save_profile()
                    self._turn_began = None
                if self._ranks:
                    self._ranks.broadcast(None)
        except Exception as error:
            if self._ranks:
                self._ranks.abort(in_one_line(error), wait=True)
            self._trouble = f"the generation thread has ended: {type(error).__name__}: {in_one_line(error)}"
            self._end_all(Fault(self._trouble))
            raise
        finally:
            self._turn_began = None
            mx.synchronize()
            mx.clear_streams()  # their threads, if left to the process' end, make it abort
        self._end_all(Fault("the server is closing"))

    def _turn(self, admitted: list[Sequence]) -> None:
        """The next window, of the other ranks too."""
        if self._ranks is None:
            return self._scheduler.turn()
        gone = list(self._scheduler.gone)
        self._ranks.broadcast({"jobs": [_told(sequence) for sequence in admitted], "gone": gone})
        return self._scheduler.turn(gone)

    def follow(self) -> None:
        """In the place of start(), on every rank but 0, and in this thread: do what rank 0 does until that closes."""
        assert self._ranks is not None
        self._seed()
        with wired_limit(self._model):
            while (told := self._ranks.broadcast()) is not None:
                for number, limit, fields in told["jobs"]:
                    job = _heard(fields)
                    streams = self._streaming is not None
                    self._scheduler.add(Sequence(number, job, self._tokenizer, limit, self.mode, streams))
                self._scheduler.turn(told["gone"])

    def _seed(self) -> None:
        seed = int.from_bytes(os.urandom(7), "little")
        mx.random.seed(self._ranks.broadcast(seed) if self._ranks else seed)

    def _save_profile(self) -> None:
        """Write the expert profile once in a while, for a process that may be killed."""
        if time.monotonic() >= self._next_profile:
            self._next_profile = time.monotonic() + _PROFILE_EVERY
            save_profile(self._model)

    def _await(self) -> list[Sequence] | None:
        """Settle who has ended, wait for work, and return who may begin. None where the engine closes."""
        with self._changed:
            self._settle(self._served)
            for sequence in self._queue:
                if sequence.stream.cancelled:
                    sequence.cancel()
            self._settle(self._queue)
            self._changed.wait_for(lambda: self._closing or self._queue or self._scheduler.busy)
            admitted = []
            while self._queue and len(self._served) < self._concurrency:
                admitted.append(self._queue.popleft())
                self._served.append(admitted[-1])
                self._scheduler.add(admitted[-1])
            return None if self._closing else admitted

    def _settle(self, sequences: list[Sequence] | deque[Sequence]) -> None:
        """Count those that have ended, and forget them."""
        for sequence in [sequence for sequence in sequences if sequence.outcome is not None]:
            sequences.remove(sequence)
            self._totals.requests[sequence.outcome or "failed"] += 1
            if sequence.first_token is not None:
                self._totals.first_token.add(sequence.first_token)
                self._seconds_each += 0.1 * (sequence.stream.usage.seconds_total - self._seconds_each)

    def _end_all(self, fault: Fault) -> None:
        with self._changed:
            for sequence in (*self._served, *self._queue):
                if sequence.outcome is None:
                    sequence.fail(fault)
            self._settle(self._served)
            self._settle(self._queue)

    def _expert_state(self) -> ExpertState:
        indices = tuple(block.layer for block in self._blocks)
        if self._streaming is None:
            return ExpertState(len(indices), self._experts, indices)
        streamed = tuple(
            LayerState(layer, table.slots, tuple(table.resident.nonzero()[0].tolist()))
            for layer, table in self._streaming.tables.items()
        )
        return ExpertState(len(indices), self._experts, indices, streamed, self._streaming.traffic())

    def _memory_state(self) -> MemoryState:
        fit = fit_of(self._model)
        own_gpu = system.on_gpu_of_its_own()
        return MemoryState(
            scope="GPU memory" if own_gpu else "process memory",
            used=mx.get_active_memory() + mx.get_cache_memory() if own_gpu else system.footprint(),
            budget=fit.budget if fit else None,
            prefixes=self._prefixes.nbytes,
            prefix_budget=self._prefixes.budget,
            parts=fit.parts if fit else {},
        )


def _request_state(sequence: Sequence) -> RequestState:
    return RequestState(
        id=sequence.number,
        phase=sequence.phase,
        prompt_tokens=len(sequence.prompt),
        read=sequence.read,
        cached_tokens=sequence.cached,
        completion_tokens=len(sequence.tokens),
        max_tokens=sequence.limit,
        alone=sequence.alone,
        seconds=time.perf_counter() - sequence.arrived,
    )


def _told(sequence: Sequence) -> tuple[int, int, dict[str, Any]]:
    """A request, for the other ranks: its number, its limit and its job."""
    return sequence.number, sequence.limit, asdict(sequence.job)


def _heard(fields: dict[str, Any]) -> Job:
    """The job that was told, as it is after JSON."""
    bias = {int(token): value for token, value in fields.pop("logit_bias").items()}
    return Job(tuple(fields.pop("prompt")), stop=tuple(fields.pop("stop")), logit_bias=bias, **fields)


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise InputError(f"{name} is {value}, expected at least {low}")
