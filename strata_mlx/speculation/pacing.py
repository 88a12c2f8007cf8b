"""When to draft: always, or as long as it pays by the clock."""

from __future__ import annotations

from collections import deque

SHARE = 0.02  # of the time so far, what rounds that did not pay may have cost
FIRST_STEPS = 16  # plain steps before the first round, which measure what a token costs
_RECENT = 16  # rounds by which it is judged whether drafting pays
_SMOOTHING = 32  # plain steps that the cost of a token is averaged over


class Pacer:
    """Measures plain steps and rounds, and says which comes next.

    A round loses what it took beyond the time in which plain steps give as many tokens. Drafting goes on while recent
    rounds have gained. Otherwise it is parked, and a round is tried again only when all losses, its own as expected
    included, stay within SHARE of the time so far: the more a round loses, the rarer it is.

    always: draft in every round, whatever it costs.
    """

    def __init__(self, always: bool = False):
        self._always = always
        self._elapsed = self._loss = 0.0
        self._plain, self._steps = 0.0, 0
        self._losses: deque[float] = deque(maxlen=_RECENT)

    def step(self, seconds: float) -> None:
        """A plain step, overlapped with the one before it, took this long."""
        self._elapsed += seconds
        self._steps += 1
        self._plain += (seconds - self._plain) / min(self._steps, _SMOOTHING)

    def round(self, seconds: float, tokens: int) -> None:
        """A round took this long, drafting included, and gave so many tokens."""
        loss = seconds - tokens * self._plain
        self._elapsed += seconds
        self._loss = max(0.0, self._loss + loss)  # what was gained is kept, not spent
        self._losses.append(loss)

    @property
    def drafting(self) -> bool:
        """Whether the next round should draft."""
        if self._always:
            return True
        if self._steps < FIRST_STEPS:
            return False
        expected = sum(self._losses) / max(len(self._losses), 1)
        if expected < 0 and len(self._losses) > 2:
            return True
        return self._loss + max(expected, 0.0) <= SHARE * self._elapsed
