"""What a round came to, and what many did."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Round:
    """One forward of the trunk, a plain step too, for which nothing is drafted.

    confidences: p_j of the drafts that were made. retained: drafts that were verified. accepted: drafts that the trunk
    confirmed. committed: tokens that the round gave; fewer than 1 + accepted where the text ended in the window.
    Seconds that the caller waited: until the window was chosen, until the trunk had run, and until the caches were
    committed and the next drafts asked for. Where no gate waits for them, a GPU makes the drafts in the second.
    """

    confidences: tuple[float, ...]
    retained: int
    accepted: int
    committed: int
    draft_seconds: float
    verify_seconds: float
    commit_seconds: float

    @property
    def drafted(self) -> int:
        return len(self.confidences)

    @property
    def rows(self) -> int:
        """Tokens that the trunk computed."""
        return 1 + self.retained

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.commit_seconds


@dataclass
class Summary:
    """The rounds of a text so far, and of those that drafted: drafts by their fate, and the tokens that they gave.

    parked: whether drafting does not pay at the moment, and is off.
    """

    rounds: int = 0
    drafting_rounds: int = 0
    drafted: int = 0
    retained: int = 0
    accepted: int = 0
    tokens: int = 0
    parked: bool = False

    def add(self, latest: Round) -> None:
        """Count one more round."""
        self.rounds += 1
        if latest.drafted:
            self.drafting_rounds += 1
            self.drafted += latest.drafted
            self.retained += latest.retained
            self.accepted += latest.accepted
            self.tokens += latest.committed

    @property
    def tokens_per_round(self) -> float:
        """Of the rounds that drafted; 0 where none did."""
        return self.tokens / max(self.drafting_rounds, 1)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "tokens_per_round": self.tokens_per_round}

    def __str__(self) -> str:
        return (
            f"MTP: {self.drafting_rounds} of {self.rounds} rounds drafted, {self.drafted} drafted, {self.retained} "
            f"retained, {self.accepted} accepted, {self.tokens_per_round:.2f} tokens per round"
            f"{', parked' if self.parked else ''}"
        )


class Stopwatch:
    """Counts the time between run() and pause(); lap() says how much it was since the last lap. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._counted, self._since = 0.0, clock()

    def run(self) -> None:
        self._since = self._clock()

    def pause(self) -> None:
        self._counted += self._clock() - self._since

    def lap(self) -> float:
        now = self._clock()
        counted, self._counted, self._since = self._counted + now - self._since, 0.0, now
        return counted
