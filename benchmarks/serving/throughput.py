"""Who gives more tokens per second, at one stream and at many."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from .client import Answer, Prompt, ask, client
from .processes import Server

MOST_DROPPED = 100  # connections in one turn, after which a server is given up


@dataclass(frozen=True)
class Turn:
    """What one server did with its prompts: ``streams`` of them at a time. cpu_seconds: of all its threads; None where
    that is not known. dropped: connections that it closed before it had answered; the request was sent again.
    """

    server: str
    streams: int
    answers: list[Answer]
    seconds: float
    cpu_seconds: float | None
    dropped: int = 0

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_ms_per_token(self) -> float | None:
        """What is left of a speed on a machine that others use too."""
        return None if self.cpu_seconds is None else 1e3 * self.cpu_seconds / self.tokens


async def turn(server: Server, streams: int, prompts: Sequence[Prompt]) -> Turn:
    """Ask for all ``prompts``, ``streams`` at a time; a stream that is done goes on with the next prompt."""
    left = iter(enumerate(prompts))
    answers: dict[int, Answer] = {}
    dropped = 0
    async with client() as http:

        async def stream() -> None:
            nonlocal dropped
            for number, prompt in left:
                while number not in answers:
                    try:
                        answers[number] = await ask(http, server.url, prompt)
                    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
                        dropped += 1
                        if dropped > MOST_DROPPED or not server.running:
                            raise

        start, before = time.perf_counter(), server.cpu_seconds()
        await asyncio.gather(*(stream() for _ in range(streams)))
        seconds, after = time.perf_counter() - start, server.cpu_seconds()
    used = None if before is None or after is None else after - before
    return Turn(server.name, streams, [answers[number] for number in range(len(prompts))], seconds, used, dropped)


def race(
    servers: Sequence[Server],
    prompts: Iterator[Prompt],
    streams: Sequence[int],
    rounds: int,
    each: int,
    report: Callable[[int], object] = lambda _: None,
) -> list[list[Turn]]:
    """Turns of all ``servers`` on the same prompts, which nobody has seen before: those that belong together, by
    number of streams and round; the first of each number warms up and is left out. each: prompts for each stream.
    report: told how many requests have been answered.
    """
    result = []
    for count in streams:
        for number in range(rounds + 1):
            mine = [next(prompts) for _ in range(count * each)]
            turns = {}
            for server in servers[:: -1 if number % 2 else 1]:
                turns[server.name] = asyncio.run(turn(server, count, mine))
                report(len(mine))
            if number:
                result.append([turns[server.name] for server in servers])
    return result


def rows(turns: Sequence[Sequence[Turn]]) -> list[dict[str, Any]]:
    """By number of streams and server: the median speed, and that over pairs of turns of ours over the other's."""
    result = []
    for count in dict.fromkeys(pair[0].streams for pair in turns):
        pairs = [pair for pair in turns if pair[0].streams == count]
        for place, server in enumerate(turn.server for turn in pairs[0]):
            own = [pair[place] for pair in pairs]
            answers = [answer for each in own for answer in each.answers]
            result.append(
                {
                    "streams": count,
                    "server": server,
                    "tokens_per_s": statistics.median(each.tokens_per_s for each in own),
                    "range": [min(each.tokens_per_s for each in own), max(each.tokens_per_s for each in own)],
                    "of_mlx_lm": statistics.median(pair[place].tokens_per_s / pair[-1].tokens_per_s for pair in pairs),
                    "cpu_ms_per_token": _median([each.cpu_ms_per_token for each in own]),
                    "dropped": sum(each.dropped for each in own),
                    "first_token_ms": 1e3 * statistics.median(answer.first or 0.0 for answer in answers),
                    "same_text": sum(
                        mine.text == other.text
                        for pair in pairs
                        for mine, other in zip(pair[place].answers, pair[-1].answers, strict=True)
                    )
                    / len(answers),
                }
            )
    return result


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
