"""What a round came to, and what many did."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One forward of the trunk, a plain step too, for which nothing is drafted.

    confidences: p_j of the drafts that were made. retained: drafts that were verified. accepted: drafts that the trunk
    confirmed. committed: tokens that the round gave; fewer than 1 + accepted where the text ended in the window.
    Seconds that the caller waited: until the window was chosen, until the trunk had run, and until the caches were
    committed and the next drafts asked for.
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


@dataclass(frozen=True)
class Summary:
    """Of the rounds of a text: how many there were and how many of them drafted, drafts by their fate, and the tokens
    that a round which drafted gave on average (0 where none did). parked: whether drafting was off at the end.
    """

    rounds: int
    drafting_rounds: int
    drafted: int
    retained: int
    accepted: int
    tokens_per_round: float
    parked: bool

    @classmethod
    def of(cls, rounds: Sequence[Round], parked: bool) -> Summary:
        drafting = [each for each in rounds if each.drafted]
        return cls(
            rounds=len(rounds),
            drafting_rounds=len(drafting),
            drafted=sum(each.drafted for each in drafting),
            retained=sum(each.retained for each in drafting),
            accepted=sum(each.accepted for each in drafting),
            tokens_per_round=sum(each.committed for each in drafting) / max(len(drafting), 1),
            parked=parked,
        )

    def __str__(self) -> str:
        return (
            f"MTP: {self.drafting_rounds} of {self.rounds} rounds drafted, {self.drafted} drafted, {self.retained} "
            f"retained, {self.accepted} accepted, {self.tokens_per_round:.2f} tokens per round"
            f"{', parked' if self.parked else ''}"
        )


class Stopwatch:
    """Counts the time between run() and pause(); lap() says how much it was since the last lap."""

    def __init__(self) -> None:
        self._counted, self._since = 0.0, time.perf_counter()

    def run(self) -> None:
        self._since = time.perf_counter()

    def pause(self) -> None:
        self._counted += time.perf_counter() - self._since

    def lap(self) -> float:
        now = time.perf_counter()
        counted, self._counted, self._since = self._counted + now - self._since, 0.0, now
        return counted
