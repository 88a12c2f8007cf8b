"""What the turns of the contestants say: speed, exactness, where the time went, and whether the goals are met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .process import Turn


@dataclass(frozen=True)
class Goal:
    """The speed of one contestant is to be at least ``least`` times that of another."""

    name: str
    of: str
    against: str
    least: float


def speed(turns: Sequence[Turn]) -> float:
    """Tokens per second, the median over the turns."""
    return statistics.median(turn.tokens_per_s for turn in turns)


def ratio(turns: Sequence[Turn], others: Sequence[Turn]) -> float:
    """How many times as fast as others, the median over pairs that decoded the same prompt in the same round, so that a
    slow spell of the machine hits both.
    """
    return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in zip(turns, others, strict=True))


def common(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens come before the first that differs; what follows it answers another text."""
    pairs = enumerate(zip(tokens, expected, strict=True))
    return next((i for i, (token, other) in pairs if token != other), len(tokens))


def agreement(turns: Sequence[Turn], expected: Sequence[Turn]) -> float:
    """The share of tokens that come before a difference from those that are expected."""
    same = sum(common(turn.tokens, other.tokens) for turn, other in zip(turns, expected, strict=True))
    return same / sum(len(turn.tokens) for turn in expected)


def total(turns: Sequence[Turn], name: str) -> float:
    return sum(turn.traffic.get(name, 0) for turn in turns)


def per_token(turns: Sequence[Turn], name: str) -> float | None:
    """A counter per decoded token; None where the contestant does not count it."""
    if not all(name in turn.traffic for turn in turns):
        return None
    return total(turns, name) / sum(len(turn.tokens) - 1 for turn in turns)


def shares(turns: Sequence[Turn]) -> dict[str, float]:
    """Of the time of decoding. ``compute``, ``stall`` and ``host`` follow each other, ``rest`` is outside the streamed
    layers and ``read``, that of all threads, lies beside them.
    """
    wall = sum(turn.seconds[-1] - turn.seconds[0] for turn in turns)
    found = {name: total(turns, f"{name}_seconds") / wall for name in ("compute", "stall", "host", "read")}
    return {**found, "rest": 1 - found["compute"] - found["stall"] - found["host"]}


def overlap(turns: Sequence[Turn]) -> float | None:
    """The share of the time of reading that was hidden behind computing, in which the device had experts to compute.
    None where nothing was read.
    """
    read = total(turns, "read_seconds")
    return max(0.0, 1 - total(turns, "stall_seconds") / read) if read else None


def cpu_ms(turns: Sequence[Turn]) -> float:
    """Milliseconds of all cores together per token: what is left of a speed on a machine that others use too."""
    return statistics.median(1e3 * turn.cpu_seconds / (len(turn.tokens) - 1) for turn in turns)


def judge(goal: Goal, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """The goal, what was reached, and whether that is enough."""
    reached = ratio(turns[goal.of], turns[goal.against])
    return {
        "goal": goal.name,
        "of": goal.of,
        "against": goal.against,
        "least": goal.least,
        "reached": reached,
        "met": reached >= goal.least,
    }
