"""Speculative decoding: draft, retain, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..device import evaluate, integer, on_cpu
from ..errors import Fault, InputError
from ..experts.pressure import relieve
from ..models.moe import blocks
from ..models.trunk import Hidden, Trunk
from ..prefill import Progress, check_tokens, ignore, make_cache, read_tokens, rows_at_a_time
from ..routing import verify_window
from .acceptance import accept_greedy, accept_sampled
from .draft import MAX_STEPS, Drafter, MTPDrafter, Step
from .pacing import Pacer
from .record import Round, Stopwatch, Summary
from .retention import PATHS, Retention, RetentionPolicy
from .sampling import LogitsProcessor, Sampler, Sampling
from .window import Window, check_rollback


def default_steps() -> int:
    """Drafts in a round, where nobody says how many: on the CPU a row costs a third of a step, and three pay best; on
    an H200 four pay, and eight not much more (benchmarks/speculation_speed.py).
    """
    return 3 if on_cpu() else 4


class Token(NamedTuple):
    """A committed token. logprobs: ``[V]`` float, of the model and the logits processors, before the sampler.
    from_draft: whether it was drafted, and confirmed; else it is the trunk's own.
    """

    token: int
    logprobs: mx.array
    from_draft: bool


@dataclass
class _Flight:
    """A forward of the trunk on its way.

    said: ``[T]``, the trunk's own token after each row; where drafts were drawn, ``[1]``, the one after the accepted
    ones. ahead: it was launched before the step that it follows had landed.
    """

    window: Window
    tokens: mx.array  # [T], the last committed token and the drafts
    drafts: list[Step]
    seen: mx.array  # [N], the tokens before the window, for logits processors
    hidden: Hidden
    logprobs: mx.array  # [T, V]
    totals: mx.array  # [T, 1], the logarithm of the sum of exponentials of the logits
    said: mx.array
    drawn: mx.array | None  # how many drafts are accepted, where they were drawn
    made: Sequence[Step]  # all drafts of the round, and what the filler added
    ahead: bool
    accepted: int = 0  # once it has landed
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


class SpeculativeDecoder:
    """An iterator over the tokens that follow a prompt, several of which may come from one forward.

    Greedy text is that of plain decoding, up to logits that are equal within rounding. Sampled text has its
    distribution; after mx.random.seed() it repeats, unless ``auto`` decides by the clock. close() ends it early.
    At the end, however it comes, ``cache`` holds the prompt and the tokens that were taken, save the last one.

    Args:
        model: from load(), with ``mtp=True`` where the head is to draft.
        tokenizer: its end-of-sequence tokens end the text. None: nothing but ``max_tokens`` does.
        prompt: token ids ``[N]``, at least one.
        max_tokens: how many to yield; -1 for no end.
        retention: which drafts are verified, and how many of ``max_steps`` are made.
        max_steps: how many drafts a round makes, 1 to 8; None is default_steps().
        drafting: "chained" makes them in one evaluation; "stepwise" evaluates each and stops where the gates do;
            without gates both are the same.
        auto: draft only as long as it pays by the clock; else in every round.
        sampler: None takes the likeliest token; a Sampling draws drafts too and accepts them by rejection sampling. Any
            other function of log-probabilities ``[1, V]`` is called for every row, and drafts that it repeats stand.
        logits_processors: functions of the tokens so far ``[N]`` and logits ``[1, V]``, as in mlx_lm.
        drafter: None is the MTP head. filler: proposes more where it agrees with the retained drafts.
        prompt_cache: continued in place; a head has not seen what is in it.
        prefill_step_size, prompt_progress_callback: as in generate_step().
        on_round: told every round, before its tokens are given.

    Raises:
        InputError: at once, for arguments out of range or caches that cannot be rolled back. Fault: while decoding.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        prompt: mx.array | Sequence[int],
        max_tokens: int = 256,
        retention: Retention | None = None,
        max_steps: int | None = None,
        drafting: str = "chained",
        auto: bool = False,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        drafter: Drafter | None = None,
        filler: Drafter | None = None,
        prompt_cache: list[Any] | None = None,
        prefill_step_size: int = 2048,
        prompt_progress_callback: Progress | None = None,
        on_round: Callable[[Round], object] | None = None,
    ):
        if max_tokens < -1:
            raise InputError(f"max_tokens is {max_tokens}; use a positive number, or -1 for no limit")
        max_steps = default_steps() if max_steps is None else max_steps
        if not 1 <= max_steps <= MAX_STEPS:
            raise InputError(f"max_steps is {max_steps}, expected 1 to {MAX_STEPS}")
        if drafting not in PATHS:
            raise InputError(f"drafting is {drafting!r}, expected one of {', '.join(PATHS)}")
        prompt = prompt if isinstance(prompt, mx.array) else mx.array(list(prompt), mx.int32)
        check_tokens(prompt, model)
        self.cache = make_cache(model) if prompt_cache is None else prompt_cache
        check_rollback(self.cache)
        self.rounds: list[Round] = []
        self._on_round = on_round
        self._summary = Summary()
        self._trunk, self._model = Trunk(model), model
        self._blocks = blocks(model)
        self._left = max_tokens  # negative where there is no end
        self._retention, self._max_steps, self._path = (retention or RetentionPolicy()).start(), max_steps, drafting
        greedy = sampler is None or (isinstance(sampler, Sampling) and sampler.temp == 0)
        self._sampler: Sampler = _likeliest if greedy or sampler is None else sampler
        self._processors = logits_processors
        self._drafters = [drafter or MTPDrafter(model, self._sampler if isinstance(self._sampler, Sampling) else None)]
        self._drafters += [filler] if filler else []
        self._stops = frozenset(tokenizer.eos_token_ids if tokenizer else ())
        self._pacer, self._watch = Pacer(always=not auto), Stopwatch()
        # Of several processes that decode one text, all go by the clock of one.
        ranks = getattr(model, "ranks", None)
        self._times: Callable[[list[float]], list[float]] = ranks.broadcast if ranks else list
        self._tokens = self._decode(
            prompt, rows_at_a_time(model, prefill_step_size), prompt_progress_callback or ignore
        )

    def __iter__(self) -> SpeculativeDecoder:
        return self

    def __next__(self) -> Token:
        self._watch.run()
        try:
            return next(self._tokens)
        finally:
            self._watch.pause()

    def close(self) -> None:
        """End the text after the token taken last."""
        self._tokens.close()

    @property
    def summary(self) -> Summary:
        """Of the rounds so far."""
        return replace(self._summary, parked=not self._drafting)

    def _decode(self, prompt: mx.array, step_size: int, report: Progress) -> Generator[Token, None, None]:
        if self._left == 0:
            return
        flight = self._read(prompt, step_size, report)
        while True:
            relieve(self._model)
            following = self._step_ahead(flight)
            tokens = self._land(flight)
            ended = self._left == 0 or tokens[-1].token in self._stops
            commit_seconds = self._watch.lap()
            asked = self._ask() if self._drafting and not (following or ended) else None
            self._record(flight, len(tokens), commit_seconds, steady=following is not None)
            if len(self.rounds) == 1:
                report(prompt.size, prompt.size)
            taken = 0
            try:
                for token in tokens:
                    taken += 1
                    yield token
            except GeneratorExit:
                ended = True
            if ended:
                if following:
                    following.window.commit(0)
                else:
                    flight.window.commit(taken)
                return
            flight = following or self._verify(flight, tokens, asked)

    def _read(self, prompt: mx.array, step_size: int, report: Progress) -> _Flight:
        """Prefill trunk and drafters; what is on its way then gives the first token."""
        for block in self._blocks:
            block.routing.begin()

        def forward(chunk: mx.array, start: int) -> Any:
            relieve(self._model)
            hidden = self._trunk(chunk[None], self.cache)
            self._observe(prompt[start + 1 : start + 1 + chunk.size], hidden)
            return [layer.state for layer in self.cache], [drafter.catch_up() for drafter in self._drafters]

        read_tokens(prompt[:-1], forward, step_size, report, prompt.size)
        self._watch.lap()
        return self._launch(prompt[-1:], [], prompt[:-1])

    @property
    def _drafting(self) -> bool:
        """Whether pacer and retention both want drafts in the next round."""
        return self._pacer.drafting and self._retention.depth(self._max_steps) > 0

    def _step_ahead(self, flight: _Flight) -> _Flight | None:
        """A plain step on the token that a plain step is about to give, so that the device need not wait for us."""
        if flight.drafts or self._left == 1 or self._drafting:
            return None
        return self._launch(flight.said, [], self._seen(flight, 1), ahead=True)

    def _ask(self) -> Iterator[Step]:
        """Have the device begin with the next drafts: with the whole chain, or with its first step. Drafts that nobody
        waits for go to it with their window, which takes the host less time.
        """
        steps = islice(self._drafters[0].steps(), self._retention.depth(self._most()))
        if self._retention.keeps_all:
            return steps
        begun = []
        for step in steps if self._path == "chained" else islice(steps, 1):
            begun.append(step)  # the device is at work on it while we build the next
            evaluate((step.token, step.confidence), "drafting", wait=False)
        return chain(begun, steps)

    def _verify(self, before: _Flight, tokens: list[Token], asked: Iterator[Step] | None) -> _Flight:
        """Launch a window of the drafts that are retained; of none, a plain step, where none were ``asked`` for."""
        kept, made, sure = self._retain(asked) if asked else ([], [], [])
        seconds = self._watch.lap()
        window = mx.concatenate([mx.array([tokens[-1].token], mx.uint32), *(step.token for step in kept)])
        flight = self._launch(window, kept, self._seen(before, len(tokens)), made, sure=sure)
        flight.draft_seconds = seconds
        return flight

    def _retain(self, asked: Iterator[Step]) -> tuple[list[Step], list[Step], list[mx.array]]:
        """The drafts that pass the gates and what the filler adds, all that were made, and how sure a head is of the
        token after each of the first rows.
        """
        if self._retention.keeps_all:
            made = kept = list(asked)
        else:
            gate, made = self._retention.gate(self._path), []
            for step in asked:
                made.append(step)
                gate.offer(_confidence(step))
                if self._path == "stepwise" and not gate.open:
                    break
            kept = made[: gate.kept]
        filling = self._fill(kept)
        sure = made[: len(kept) + 1] if isinstance(self._drafters[0], MTPDrafter) else []
        return kept + filling, made + filling, [step.confidence for step in sure]

    def _fill(self, kept: list[Step]) -> list[Step]:
        """How the filler goes on, if what it proposes begins with the retained drafts."""
        if len(self._drafters) < 2:
            return []
        proposed = list(islice(self._drafters[1].steps(), self._most()))
        agree = all(integer(a.token) == integer(b.token) for a, b in zip(kept, proposed, strict=False))
        return proposed[len(kept) :] if agree else []

    def _most(self) -> int:
        """How many drafts a window may hold, so that no token comes after max_tokens."""
        return self._max_steps if self._left < 0 else min(self._max_steps, self._left - 1)

    def _launch(
        self,
        tokens: mx.array,
        drafts: list[Step],
        seen: mx.array,
        made: Sequence[Step] = (),
        ahead: bool = False,
        sure: Sequence[mx.array] = (),
    ) -> _Flight:
        """One forward over the last committed token and ``drafts``, and all that follows from its logits."""
        window = Window(self.cache, tokens.size)
        with verify_window(sure):
            hidden = self._trunk(tokens[None], window.layers, begin=bool(drafts))
        # A plain step has the bits of plain decoding. A window is greedy up to logits that are equal within rounding.
        logits = (self._trunk.rounded_logits if drafts else self._trunk.logits)(hidden.after)[0]  # [T, V]
        if self._processors:
            rows = [self._process(seen, tokens[: i + 1], logits[i : i + 1]) for i in range(tokens.size)]
            logits = mx.concatenate(rows)
        totals = mx.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = logits - totals
        # Each further operation costs a plain step 0.5 % on a small model: it gets none that it does not need.
        said, drawn = self._judge(logits, logprobs, drafts) if drafts else (self._sampler(logprobs), None)
        flight = _Flight(window, tokens, drafts, seen, hidden, logprobs, totals, said, drawn, made, ahead)
        self._wait(flight, wait=False)
        return flight

    def _judge(self, logits: mx.array, logprobs: mx.array, drafts: list[Step]) -> tuple[mx.array, mx.array | None]:
        """What a flight's ``said`` and ``drawn`` are."""
        if isinstance(self._sampler, Sampling):
            tokens, q = mx.concatenate([step.token for step in drafts]), _draft_logprobs(drafts, logits.shape[-1])
            outcome = accept_sampled(tokens, self._sampler.logprobs(logits), q)
            return outcome.token.reshape(1), outcome.accepted
        # A draft that the sampler repeats is a sample like any other.
        rows = [logprobs] if self._sampler is _likeliest else mx.split(logprobs, len(drafts) + 1)
        return mx.concatenate([self._sampler(row) for row in rows]), None

    def _land(self, flight: _Flight) -> list[Token]:
        """Wait for a forward, keep what the text goes on with, and tell the drafters."""
        self._wait(flight)
        flight.verify_seconds = self._watch.lap()
        drafts, said = [integer(step.token) for step in flight.drafts], np.array(flight.said).tolist()
        accepted = accept_greedy(drafts, said) if flight.drawn is None else integer(flight.drawn)
        flight.accepted = accepted
        # The sum of exponentials is not finite where one logit is NaN or +inf, or all are -inf.
        totals: Any = flight.totals.tolist()
        if not np.isfinite(totals[: accepted + 1]).all():
            raise Fault(
                f"the model's logits in round {len(self.rounds) + 1} are not finite: its weights are broken or "
                f"overflow their type"
            )
        ids = [*drafts[:accepted], said[accepted if flight.drawn is None else 0]]
        ids = ids[: 1 + next((i for i, token in enumerate(ids) if token in self._stops), len(ids))]
        self._left -= len(ids)
        if flight.drafts:
            flight.window.commit(len(ids))
        self._observe(mx.array(ids, mx.uint32) if flight.drafts else flight.said, flight.hidden.first(len(ids)))
        return [Token(token, flight.logprobs[i], i < accepted) for i, token in enumerate(ids)]

    def _observe(self, tokens: mx.array, hidden: Hidden) -> None:
        for drafter in self._drafters:
            drafter.observe(tokens, hidden)

    def _record(self, flight: _Flight, committed: int, commit_seconds: float, steady: bool) -> None:
        """``steady``: plain steps go on, so that this one's time is that of a plain step."""
        times = self._times([flight.draft_seconds, flight.verify_seconds, commit_seconds])
        confidences = tuple(_confidence(step) for step in flight.made)
        record = Round(confidences, len(flight.drafts), flight.accepted, committed, *times)
        if confidences:
            self._pacer.round(record.seconds, committed)
        elif flight.ahead and steady:
            self._pacer.step(record.seconds)
        elif self.rounds:
            self._pacer.change(record.seconds)
        self._retention.learn(record)
        self.rounds.append(record)
        self._summary.add(record)
        if self._on_round:
            self._on_round(record)
        if len(self.rounds) % 256 == 0:
            mx.clear_cache()

    def _wait(self, flight: _Flight, wait: bool = True) -> None:
        arrays = (flight.said, flight.drawn, flight.logprobs, flight.totals, *(step.confidence for step in flight.made))
        evaluate([array for array in arrays if array is not None], f"computing round {len(self.rounds) + 1}", wait=wait)

    def _seen(self, flight: _Flight, kept: int) -> mx.array:
        return mx.concatenate([flight.seen, flight.tokens[:kept]]) if self._processors else flight.seen

    def _process(self, seen: mx.array, window: mx.array, logits: mx.array) -> mx.array:
        """Logits ``[1, V]`` after the logits processors, which see the tokens that come before them."""
        tokens = mx.concatenate([seen, window])
        for process in self._processors:
            logits = process(tokens, logits)
        return logits


def _likeliest(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def _confidence(step: Step) -> float:
    evaluate(step.confidence, "drafting")
    return float(np.array(step.confidence))


def _draft_logprobs(drafts: list[Step], vocabulary: int) -> mx.array | None:
    """What drafts were drawn from ``[k, V]``; None where all are certain."""
    if all(step.logprobs is None for step in drafts):
        return None
    ids = mx.arange(vocabulary)
    rows = [mx.where(ids == d.token, 0.0, -mx.inf) if d.logprobs is None else d.logprobs for d in drafts]
    return mx.stack(rows)
