"""Retention: how many of a round's drafts enter the verify window. A validated value, and the one stop rule.

Needs nothing but the standard library, so that ``--help`` stays quick.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import reprlib
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import Any, Protocol, SupportsFloat

from ..errors import InputError
from ..values import json_object, known
from .record import Round

SCHEDULE_VARIABLE = "STRATA_METAL_SPEC_MIN_P_SCHEDULE"
CUMULATIVE_VARIABLE = "STRATA_METAL_SPEC_MIN_CUM_P"
PATHS = ("chained", "stepwise")
MAX_SCHEDULE = 8


class _Array(Protocol):
    """An array of NumPy or MLX."""

    def tolist(self) -> Any: ...


class Gate(Protocol):
    """One round of a policy: offer the confidences of the drafts in order, then ask how many are kept.

    kept: how many of those offered so far. open: whether another one may be worth making, should that cost something.
    """

    @property
    def kept(self) -> int: ...

    @property
    def open(self) -> bool: ...

    def offer(self, p: SupportsFloat) -> bool:
        """Whether the next draft, of confidence ``p``, is among those kept so far. Raises InputError: not a number."""


class Controller(Protocol):
    """A policy at work on one text.

    keeps_all: whether every draft is verified, whatever its confidence, so that nobody need wait for that.
    """

    @property
    def keeps_all(self) -> bool: ...

    def depth(self, most: int) -> int:
        """How many drafts, up to ``most``, to make for the next round; 0 is a plain step."""

    def gate(self, path: str = "chained") -> Gate:
        """The rule for one round. path: how the drafts are made, one of PATHS; another raises InputError."""

    def learn(self, latest: Round) -> None:
        """Take note of a round, or of a plain step."""


class Retention(Protocol):
    """A policy: a value, of which start() makes what follows a text."""

    def start(self) -> Controller: ...


@dataclass(frozen=True)
class RetentionPolicy:
    """Which drafts are worth a row of the verify window, judged by the head's probability of its own candidates.

    Args:
        min_p: floor of every candidate's probability, where no schedule is given. In 0..1.
        schedule: one to eight floors, one per step, each in 0..1 and in any order; the last repeats. Replaces min_p.
        min_cum_p: floor of the product ``p_0 * ... * p_j``, in double precision. In 0..1; 0 is off.

    A candidate stays where it passes both floors; equality passes, and the first that fails ends the window. A schedule
    (``0`` too) or a positive min_cum_p opts in to the new rule, in which a probability that is not finite or not in
    0..1 fails. Without either, ``p >= min_p`` alone decides, as it always did.

    Raises:
        InputError: a value of the wrong type or out of its range, or a schedule that is empty or too long.
    """

    min_p: float = 0.0
    schedule: tuple[float, ...] | None = None
    min_cum_p: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_p", _probability("min_p", self.min_p))
        object.__setattr__(self, "min_cum_p", _probability("min_cum_p", self.min_cum_p))
        if self.schedule is not None:
            object.__setattr__(self, "schedule", _schedule(self.schedule))

    @property
    def opted_in(self) -> bool:
        """Whether the new rule is on."""
        return self.schedule is not None or self.min_cum_p > 0

    @property
    def keeps_all(self) -> bool:
        """Without any floor. Confidences are not looked at then, so that one which is no number ends nothing either."""
        return not self.opted_in and self.min_p == 0

    def floor(self, step: int) -> float:
        """What the candidate of this step (0, 1, ...) must reach by itself."""
        return self.min_p if self.schedule is None else self.schedule[min(step, len(self.schedule) - 1)]

    def start(self) -> RetentionPolicy:
        """Itself, as its rule is the same throughout a text."""
        return self

    def depth(self, most: int) -> int:
        """All drafts that are wanted."""
        return most

    def learn(self, latest: Round) -> None:
        """Nothing."""

    def gate(self, path: str = "chained") -> FloorGate:
        """The rule for one round, to be asked candidate by candidate.

        Args:
            path: how the drafts are made, "chained" or "stepwise".

        Raises:
            InputError: another path.
        """
        if path not in PATHS:
            raise InputError(f"retention: path is {path!r}, expected one of {', '.join(PATHS)}")
        return FloorGate(self, path)

    def retain(self, probs: Iterable[SupportsFloat] | _Array, path: str = "chained") -> int:
        """How many of a round's drafts to verify.

        Args:
            probs: ``[k]`` the head's probability of each of its candidates in turn; any sequence or 1-D array.
            path: "chained" or "stepwise". They differ only where the policy has not opted in: the stepwise path then
                keeps the first candidate below the floor as its last.

        Returns:
            The length of the prefix, 0..k.

        Raises:
            InputError: another path, or probabilities that are no numbers.
        """
        gate = self.gate(path)
        values: Iterable[Any] = probs.tolist() if hasattr(probs, "tolist") else probs
        for p in values:
            gate.offer(p)
            if not gate.open:
                break
        return gate.kept

    def to_json(self) -> str:
        """The policy as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RetentionPolicy:
        """The policy that ``to_json`` wrote, or that a person did: absent fields have their defaults.

        Raises:
            InputError: not a JSON object, an unknown or repeated key, or a value that the policy refuses.
        """
        return cls(**known("retention policy", json_object("retention policy", text), cls))

    @classmethod
    def from_env(cls, min_p: float = 0.0, environ: Mapping[str, str] | None = None) -> RetentionPolicy:
        """The caller's ``min_p``, with the schedule and the cumulative floor that the environment sets.

        Where either variable is malformed, both are ignored, one line on standard error says so, and ``min_p`` applies.

        Args:
            min_p: the caller's floor.
            environ: read instead of the process's environment, which is parsed once: a change needs a restart.

        Raises:
            InputError: a ``min_p`` out of range.
        """
        policy = cls(min_p)
        settings = _read(environ) if environ is not None else _read_process()
        return replace(policy, **settings)

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds the flags that ``from_args`` reads."""
        group = parser.add_argument_group("retention", "which drafts are worth verifying")
        group.add_argument("--spec-min-p", metavar="P", help="floor of a draft's probability (0: every draft)")
        group.add_argument(
            "--spec-min-p-schedule", metavar="P,...", help="floors of draft 1, 2, ... instead; the last repeats"
        )
        group.add_argument("--spec-min-cum-p", metavar="P", help="floor of the product of probabilities (0: off)")

    @classmethod
    def from_args(cls, args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> RetentionPolicy:
        """The policy of a command line: each flag over its variable of the environment.

        Raises:
            InputError: a malformed flag; the message names it. (A malformed variable is no error, see ``from_env``.)
        """
        given: dict[str, Any] = {}
        for flag, (name, parse) in _FLAGS.items():
            text = getattr(args, flag[2:].replace("-", "_"))
            if text is not None:
                try:
                    given[name] = parse(text)
                except ValueError as error:
                    raise InputError(f"{flag} {reprlib.repr(text)}: {error}") from None
        return replace(cls.from_env(environ=environ), **given)

    def __str__(self) -> str:
        floor = f"min_p {self.min_p}" if self.schedule is None else f"schedule {','.join(map(str, self.schedule))}"
        parts = [floor] if self.min_p or self.schedule else []
        parts += [f"cumulative {self.min_cum_p}"] if self.min_cum_p else []
        return " and ".join(parts) or "every draft"


class FloorGate:
    """One round of a RetentionPolicy: offer the candidates in order, stop when it is no longer open."""

    def __init__(self, policy: RetentionPolicy, path: str) -> None:
        self.kept = 0
        self.open = True
        self._policy = policy
        self._legacy = not policy.opted_in
        self._keeps_first_failure = self._legacy and path == "stepwise"
        self._product = 1.0  # a Python float is a double

    def offer(self, p: SupportsFloat) -> bool:
        """Whether the next candidate, of probability ``p``, is kept. ``open`` says whether another one may be.

        Raises:
            InputError: not a number.
        """
        if not self.open:
            return False
        self.open = self._passes(observed(p))
        keep = self.open or self._keeps_first_failure
        self.kept += keep
        return keep

    def _passes(self, p: float) -> bool:
        floor = self._policy.floor(self.kept)
        if self._legacy:
            return p >= floor
        self._product *= p
        return 0 <= p <= 1 and p >= floor and self._product >= self._policy.min_cum_p  # NaN is in no range


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_SPACE = " \t\n\r\f\v"


def _parse_probability(text: str) -> float:
    """Stricter than float(), which also takes underscores and the digits of other scripts."""
    text = text.strip(_SPACE)
    if not text:
        raise ValueError("a number is missing")
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{reprlib.repr(text)} is not a finite decimal number")
    return _in_range(float(text))


def _parse_schedule(text: str) -> tuple[float, ...]:
    return _of_length(tuple(_parse_probability(part) for part in text.split(",")))


_FLAGS = {
    "--spec-min-p": ("min_p", _parse_probability),
    "--spec-min-p-schedule": ("schedule", _parse_schedule),
    "--spec-min-cum-p": ("min_cum_p", _parse_probability),
}
_VARIABLES = {
    SCHEDULE_VARIABLE: ("schedule", _parse_schedule),
    CUMULATIVE_VARIABLE: ("min_cum_p", _parse_probability),
}


def _read(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the environment sets; nothing, and one line on standard error, where any of it is malformed."""
    settings, problems = {}, []
    for variable, (name, parse) in _VARIABLES.items():
        if variable in environ:
            try:
                settings[name] = parse(environ[variable])
            except ValueError as error:
                problems.append(f"{variable}={reprlib.repr(environ[variable])}: {error}")
    if not problems:
        return settings
    if sys.stderr:  # closed, print would write to standard output
        print(f"warning: {'; '.join(problems)}; both settings are ignored and min_p alone applies", file=sys.stderr)
    return {}


_once = threading.Lock()
_process_settings: dict[str, Any] | None = None


def _read_process() -> dict[str, Any]:
    global _process_settings
    with _once:
        if _process_settings is None:
            _process_settings = _read(os.environ)
        return _process_settings


def _schedule(values: Sequence[float]) -> tuple[float, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InputError(f"retention policy: schedule is {reprlib.repr(values)}, expected a sequence of probabilities")
    try:
        return _of_length(tuple(_probability(f"schedule[{i}]", value) for i, value in enumerate(values)))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"retention policy: schedule: {error}") from None


def _probability(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"retention policy: {name} is {reprlib.repr(value)}, expected a number")
    try:
        return _in_range(float(value))
    except (ValueError, OverflowError):
        message = f"retention policy: {name} is {reprlib.repr(value)}, expected a probability from 0 to 1"
        raise InputError(message) from None


def _in_range(value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{value} is not a probability from 0 to 1")
    return value


def _of_length(schedule: tuple[float, ...]) -> tuple[float, ...]:
    if not 1 <= len(schedule) <= MAX_SCHEDULE:
        raise ValueError(f"{len(schedule)} probabilities, expected 1 to {MAX_SCHEDULE}")
    return schedule


def observed(p: SupportsFloat) -> float:
    """A confidence as a double. Raises InputError: not a number."""
    try:
        return float(p)
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError):
        raise InputError(f"retention: a draft's probability is {reprlib.repr(p)}, expected a number") from None
