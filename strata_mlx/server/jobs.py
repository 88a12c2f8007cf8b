"""What is asked of the engine, and what it answers: the contract between the protocols and the generation thread."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import InputError
from ..values import number

MAX_TOP_LOGPROBS = 20


class JobError(InputError):
    """A value that a job cannot have. ``field``: its name in Job."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


@contextmanager
def told_as(field: str, name: str) -> Iterator[None]:
    """Where a field of a Job has another ``name`` in what a client has sent, it is told of that."""
    try:
        yield
    except JobError as error:
        if error.field != field:
            raise
        raise JobError(name, str(error).replace(field, name, 1)) from None


class Busy(Exception):
    """The queue is full. ``retry_after``: seconds after which there may be room, at least 1."""

    def __init__(self, retry_after: int):
        super().__init__(f"the server has as many requests waiting as it may; try again in {retry_after} s")
        self.retry_after = retry_after


@dataclass(frozen=True)
class Job:
    """One text to be generated.

    prompt: token ids, at least one. max_tokens: at least 1. temperature: 0 takes the likeliest token always. top_p:
    0 keeps the likeliest token alone, 1 is off. top_k, min_p: 0 is off. seed: repeats a sampled text, whatever else is
    decoded at the same time. repetition_penalty: more than 0, 1 is off; presence_penalty, frequency_penalty: -2 to 2,
    0 is off; all three are about the latest tokens, the prompt's too. logit_bias: by token id, -100 to 100, added to
    logits. stop: the text is cut before the first of them that it comes to. top_logprobs: alternatives of each token,
    0 to 20; None asks for no log-probabilities at all.

    Raises:
        JobError: a value of the wrong type or out of its range. Ids are compared with the vocabulary by the engine.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise JobError("prompt", "the prompt is empty; give it at least one token")
        self._whole("max_tokens", 1)
        self._whole("top_k", 0)
        self._number("temperature", 0, 100)
        self._number("top_p", 0, 1)
        self._number("min_p", 0, 1)
        self._number("repetition_penalty", 0, 100)
        if self.repetition_penalty == 0:
            raise JobError("repetition_penalty", "repetition_penalty is 0, expected more than 0; 1 is off")
        self._number("presence_penalty", -2, 2)
        self._number("frequency_penalty", -2, 2)
        if self.seed is not None:
            self._whole("seed", -(2**63), 2**64 - 1)
        if self.top_logprobs is not None:
            self._whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
        for token, bias in self.logit_bias.items():
            _number("logit_bias", f"logit_bias[{token}]", bias, -100, 100)
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise JobError("stop", f"stop is {reprlib.repr(list(self.stop))}, expected texts that are not empty")

    def _whole(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise JobError(name, f"{name} is {reprlib.repr(value)}, expected a whole number")
        if value < low or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"{low} to {high}"
            raise JobError(name, f"{name} is {value}, expected {allowed}")

    def _number(self, name: str, low: float, high: float) -> None:
        _number(name, name, getattr(self, name), low, high)


def _number(name: str, what: str, value: object, low: float, high: float) -> None:
    try:
        within = low <= number(what, value) <= high
    except InputError as error:
        raise JobError(name, str(error)) from None
    if not within:
        raise JobError(name, f"{what} is {value}, expected {low} to {high}")


@dataclass(frozen=True)
class Token:
    """A token with its log-probability under the model and the penalties, before temperature and what is cut off.

    text: what it stands for by itself. top: (id, text, log-probability) of the likeliest tokens, the likeliest first.
    """

    id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """More of the text, possibly empty. tokens: those that were decoded since the piece before, where log-probabilities
    were asked for; else none.
    """

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Usage:
    """What a request has cost.

    prompt_tokens: all of the prompt; cached_tokens: those of them that were not read again. completion_tokens: decoded,
    the last one included, be it the end of the text. drafted, accepted: tokens that a draft head proposed, and that
    the model confirmed. mode: "exact", or "biased" where routing prefers what is in memory. hits, misses, bytes_read:
    experts in memory and read from disk for the windows that this request took part in, and the bytes of the reads,
    each window's shared evenly among its requests; None where all experts are in memory. seconds_prompt: from the
    request's arrival to its first token; seconds_total: to its end.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    mode: str = "exact"
    hits: int | None = None
    misses: int | None = None
    bytes_read: int | None = None
    seconds_prompt: float = 0.0
    seconds_total: float = 0.0


@dataclass(frozen=True)
class End:
    """How a text ended, and always the last thing that a stream gives.

    reason: "stop" (an end-of-sequence token or a stop string), "length" (max_tokens) or "cancelled". stop: the stop
    string that was met, which the text does not contain.
    """

    reason: str
    stop: str | None
    usage: Usage
