"""Requests that are served turn by turn in the thread of a test, so that who meets whom is known."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from strata_mlx.experts.streaming import streaming_of
from strata_mlx.policy import Policy
from strata_mlx.server.jobs import End, Job, Piece, Token, Usage
from strata_mlx.server.prefixes import Prefixes
from strata_mlx.server.scheduler import Scheduler, speculation_of
from strata_mlx.server.sequences import Sequence
from strata_mlx.server.state import Totals
from strata_mlx.server.streams import Item

TURNS = 2000  # in which every test must be done


def prompt(number: int, size: int) -> tuple[int, ...]:
    """``size`` bytes; each number has others."""
    return tuple((i * i * 31 + 7 * i + 97 * number) % 256 for i in range(size))


class Served:
    """A Scheduler over ``model``, which drafts where ``mtp`` is "on"."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        *,
        mtp: str = "off",
        policy: Policy | None = None,
        prefix_bytes: int = 0,
        step_size: int = 2048,
    ):
        self.prefixes, self.totals = Prefixes(prefix_bytes), Totals()
        speculation = speculation_of(model, mtp, policy or Policy())
        self.scheduler = Scheduler(model, tokenizer, self.prefixes, self.totals, speculation, step_size)
        self.tokenizer, self._streams, self._count = tokenizer, streaming_of(model) is not None, 0

    def add(self, job: Job) -> Sequence:
        self._count += 1
        sequence = Sequence(self._count, job, self.tokenizer, job.max_tokens, "exact", self._streams)
        self.scheduler.add(sequence)
        return sequence

    def finish(self) -> None:
        """Turn until nobody is served."""
        for _ in range(TURNS):
            if not self.scheduler.busy:
                return
            self.scheduler.turn()
        raise AssertionError("the requests do not end")

    def together(self, jobs: Seq[Job]) -> list[list[Item]]:
        sequences = [self.add(job) for job in jobs]
        self.finish()
        return [list(sequence.stream) for sequence in sequences]

    def one_by_one(self, jobs: Seq[Job]) -> list[list[Item]]:
        return [self.together([job])[0] for job in jobs]

    def until(self, sequence: Sequence, tokens: int) -> None:
        """Turn until ``sequence`` has so many tokens, or has ended."""
        for _ in range(TURNS):
            if len(sequence.tokens) >= tokens or sequence.outcome is not None:
                return
            self.scheduler.turn()
        raise AssertionError("the request does not come so far")


def text_of(items: list[Item]) -> str:
    return "".join(item.text for item in items if isinstance(item, Piece))


def end_of(items: list[Item]) -> End:
    end = items[-1]
    assert isinstance(end, End)
    return end


def usage_of(items: list[Item]) -> Usage:
    return end_of(items).usage


def tokens_of(items: list[Item]) -> list[Token]:
    return [token for item in items if isinstance(item, Piece) for token in item.tokens]


def told(items: list[Item]) -> tuple[Any, ...]:
    """All that a client is told, save what it cost."""
    return text_of(items), tokens_of(items), end_of(items).reason, end_of(items).stop, usage_of(items).completion_tokens
