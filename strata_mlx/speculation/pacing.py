"""When to draft: always, or as long as it pays by the clock."""

from __future__ import annotations

from collections import deque

SHARE = 0.01  # of the time so far, what drafting that did not pay may have cost
TRIAL = 4  # plain steps that it may have cost in any text, however short: a few rounds without luck
FIRST_STEPS = 8  # plain steps before the first round, which measure what a token costs
_RECENT = 16  # rounds by which it is judged whether drafting pays
_SMOOTHING = 32  # plain steps that the cost of a token is averaged over


class Pacer:
    """Measures plain steps and rounds, and says which comes next.

    A round loses what it took beyond the time in which plain steps give as many tokens. What pays by the average of the
    latest rounds goes on. Losses and gains are booked, gains only against earlier losses. What does not pay is tried
    while what was lost, and what a round is expected to lose, stay within SHARE of the time so far, or within TRIAL
    plain steps. So it is tried the more rarely the more it loses, and costs no more than that, and what the latest
    rounds gained where it did pay before.

    always: draft in every round, whatever it costs. plain: seconds of a plain step, where they are known before one
    was measured.
    """

    def __init__(self, always: bool = False, plain: float | None = None):
        self._always = always
        self._elapsed = self._loss = 0.0
        self._plain, self._steps = (0.0, 0) if plain is None else (plain, FIRST_STEPS)
        self._losses: deque[float] = deque(maxlen=_RECENT)

    def step(self, seconds: float) -> None:
        """A plain step, overlapped with the one before it, took this long."""
        self._elapsed += seconds
        self._steps += 1
        self._plain += (seconds - self._plain) / min(self._steps, _SMOOTHING)

    def change(self, seconds: float) -> None:
        """A plain step took this long between drafting and plain steps: what it lost is drafting's."""
        self._book(seconds, 1)

    def round(self, seconds: float, tokens: int) -> None:
        """A round took this long, drafting included, and gave so many tokens."""
        self._losses.append(self._book(seconds, tokens))

    def _book(self, seconds: float, tokens: int) -> float:
        loss = seconds - tokens * self._plain
        self._elapsed += seconds
        self._loss = max(0.0, self._loss + loss)
        return loss

    @property
    def drafting(self) -> bool:
        """Whether the next round should draft."""
        if self._always or self._steps < FIRST_STEPS:
            return self._always
        return self._latest < 0 or self._loss + self._latest <= max(SHARE * self._elapsed, TRIAL * self._plain)

    def affords(self, expected: float) -> bool:
        """Whether a round stays within the share that is expected to lose so many seconds, or as many as the latest
        rounds did, if that is more.
        """
        return self._loss + max(expected, self._latest) <= SHARE * self._elapsed

    @property
    def _latest(self) -> float:
        """Seconds that a round lost, on the average of the latest ones."""
        return sum(self._losses) / max(len(self._losses), 1)
