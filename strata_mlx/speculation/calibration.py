"""How likely a draft is to be accepted, judged by the head's confidences. Plain numbers; ``fitting`` makes them.

Confidence is not acceptance: the head is too sure down its own chain, and too unsure of what is easy. Needs nothing but
the standard library, and a few microseconds for a draft.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ..errors import InputError
from ..values import items, json_object, known, number, numbers

SMALLEST = 1e-7  # confidences, and products of them, are kept this far from 0 and 1
MAX_POSITIONS = 8
_EXTREME = 700.0  # exp() of more overflows


@dataclass(frozen=True)
class Curve:
    """Of one chain position: the acceptance as a function of the score

        bias + confidence * log(p / (1 - p)) + product * log(p_0 * ... * p_(j-1))

    Without knots it is ``1 / (1 + exp(-score))``; with them it is ``values``, ascending, at the scores ``knots``, in
    between on a straight line, and beyond them what the nearest has.

    bias, confidence, product: finite; the last two not negative, so that more confidence never means less acceptance.

    Raises:
        InputError: numbers of the wrong type or range, or knots and values that do not ascend together.
    """

    bias: float = 0.0
    confidence: float = 1.0
    product: float = 0.0
    knots: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("bias", "confidence", "product"):
            object.__setattr__(self, name, _finite(name, getattr(self, name)))
        for name in ("knots", "values"):
            object.__setattr__(self, name, numbers(f"calibration: {name}", getattr(self, name)))
        if self.confidence < 0 or self.product < 0:
            raise InputError("calibration: confidence and product must not be negative, or less would count for more")
        if len(self.knots) != len(self.values):
            raise InputError(f"calibration: {len(self.knots)} knots need as many values, found {len(self.values)}")
        if any(a >= b for a, b in pairwise(self.knots)) or any(a > b for a, b in pairwise(self.values)):
            raise InputError("calibration: knots must ascend, and values must not descend")
        if any(not 0 <= value <= 1 for value in self.values):
            raise InputError("calibration: values must be probabilities from 0 to 1")

    def score(self, p: float, before: float) -> float:
        """Of a draft of confidence ``p`` after drafts whose confidences multiply to ``before``."""
        p = min(max(p, SMALLEST), 1 - SMALLEST)
        return (
            self.bias + self.confidence * math.log(p / (1 - p)) + self.product * math.log(min(max(before, SMALLEST), 1))
        )

    def __call__(self, score: float) -> float:
        """The acceptance, in 0..1."""
        if not self.knots:
            return 1 / (1 + math.exp(min(-score, _EXTREME)))
        place = bisect_right(self.knots, score)
        if place in (0, len(self.knots)):
            return self.values[place and -1]
        left, right = self.knots[place - 1], self.knots[place]
        low, high = self.values[place - 1], self.values[place]
        # Rounding must not lead out of the interval, and so out of order.
        return min(max(low + (high - low) * (score - left) / (right - left), low), high)


@dataclass(frozen=True)
class Calibration:
    """Curves of the chain positions 0, 1, ...; the last one goes on for deeper ones.

    Raises:
        InputError: no curves, more than MAX_POSITIONS, or something else than curves.
    """

    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "curves", tuple(_curve(curve) for curve in items("calibration: curves", self.curves)))
        if not 1 <= len(self.curves) <= MAX_POSITIONS:
            raise InputError(f"calibration: {len(self.curves)} curves, expected 1 to {MAX_POSITIONS}")

    def acceptance(self, position: int, p: float, before: float = 1.0) -> float:
        """The probability that draft ``position`` is accepted once those before it were.

        p: the head's confidence in it. before: the product of the confidences before it. The acceptance ascends with
        both. One that is not finite or not in 0..1 gives 0.
        """
        if not (0 <= p <= 1 and 0 <= before <= 1):  # NaN is in no range
            return 0.0
        curve = self.curves[min(position, len(self.curves) - 1)]
        return curve(curve.score(p, before))

    def acceptances(self, confidences: Iterable[float]) -> list[float]:
        """Of all drafts of a chain."""
        result, before = [], 1.0
        for position, p in enumerate(confidences):
            result.append(self.acceptance(position, p, before))
            before *= p
        return result

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """As one JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """What ``to_json`` wrote. Raises InputError for anything else."""
        return cls.from_dict(json_object("calibration", text))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Calibration:
        """As from_json(), parsed already."""
        return cls(**known("calibration", values, cls, required=("curves",)))


def _finite(name: str, value: object) -> float:
    return number(f"calibration: {name}", value)


def _curve(value: object) -> Curve:
    return value if isinstance(value, Curve) else Curve(**known("calibration: a curve", value, Curve))
