"""Replays policies on a recording in virtual time: what SpeculativeDecoder would have done, round by round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..experts.eviction import DEFAULT_EVICTION
from ..speculation.draft import CAUGHT_UP
from ..speculation.record import Round
from ..speculation.retention import PATHS, Controller, Gate, Retention
from .costs import Clock, CostModel, Storage
from .recording import Document, Recording
from .slots import ModelSlots

_PREFILL_ROWS = 2048

Counts = NDArray[np.int32]  # by layer; [2, layers] are the experts that are needed, and those of them that are read


@dataclass(frozen=True, eq=False)
class Replayed:
    """What a policy came to. Arrays have an entry per round, of all documents one after another; the first round of
    each is the plain step that gives its first token.

    document: its number. rounds: as the decoder records them, with virtual seconds. misses: int32 ``[R, L + H]``,
    experts that were read by each layer, the head's last; of the round that the head drafted for. prompt_misses:
    ``[D, L + H]`` by document, those of its prompt but its last token. Without slots, all are 0.
    """

    document: NDArray[np.int32]
    rounds: tuple[Round, ...]
    misses: NDArray[np.int32]
    prompt_misses: NDArray[np.int32]

    @cached_property
    def later(self) -> list[Round]:
        """The rounds after the first of each document."""
        first = np.diff(self.document, prepend=-1) != 0
        return [each for each, opens in zip(self.rounds, first, strict=True) if not opens]

    @property
    def tokens(self) -> int:
        """Committed after the first one of each document."""
        return sum(each.committed for each in self.later)

    @property
    def seconds(self) -> float:
        """In which they were made."""
        return sum(each.seconds for each in self.later)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-12)

    def by_document(self) -> NDArray[np.float64]:
        """Tokens and seconds of each document, ``[D, 2]``, its first token apart; what is resampled for intervals."""
        result = np.zeros((len(self.prompt_misses), 2))
        opens = np.diff(self.document, prepend=-1) != 0
        np.add.at(result, self.document[~opens], [(each.committed, each.seconds) for each in self.later])
        return result

    def to_dict(self) -> dict[str, Any]:
        """Totals, ready for JSON; of rounds after the first of each document where seconds or tokens are counted."""
        later = self.later
        return {
            "rounds": len(self.rounds),
            "drafted": sum(each.drafted for each in later),
            "retained": sum(each.retained for each in later),
            "accepted": sum(each.accepted for each in later),
            "tokens": self.tokens,
            "misses": int(self.misses.sum()),
            "misses_by_layer": self.misses.sum(axis=0).tolist(),
            "prompt_misses": int(self.prompt_misses.sum()),
            "draft_seconds": sum(each.draft_seconds for each in later),
            "verify_seconds": sum(each.verify_seconds for each in later),
            "commit_seconds": sum(each.commit_seconds for each in later),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def replay(
    recording: Recording,
    retention: Retention,
    costs: CostModel,
    *,
    steps: int | None = None,
    drafting: str = "chained",
    slots: int | Sequence[int] | None = None,
    eviction: str = DEFAULT_EVICTION,
    storage: Storage | None = None,
    prefill_step_size: int = _PREFILL_ROWS,
) -> Replayed:
    """What SpeculativeDecoder would do with each document's prompt and ``max_tokens`` of N + 1, ``auto`` off.

    The same arguments give the same result. Misses are exact where every committed token goes through the head, as it
    does in rounds that draft; after more than CAUGHT_UP plain steps the head misses tokens, which a recording cannot
    know: what it drafts is taken to be the same.

    Args:
        recording, retention, costs: of which documents, by which policy, at what cost.
        steps: the decoder's max_steps, at most those of the recording, which are the default.
        drafting: "chained" or "stepwise".
        slots: in memory per MoE layer, for all or for each, the head's last; None is everything.
        eviction: of a full layer. The slots go on from one document to the next.
        storage: what a miss costs; None is as it was measured.
        prefill_step_size: the decoder's.

    Raises:
        InputError: arguments out of range, or costs that lack what the arguments need.
    """
    header = recording.header
    steps = header.steps if steps is None else steps
    if not 1 <= steps <= header.steps:
        raise InputError(f"replay: steps is {steps}, expected 1 to the {header.steps} that were recorded")
    if drafting not in PATHS:
        raise InputError(f"replay: drafting is {drafting!r}, expected one of {', '.join(PATHS)}")
    memory = None
    if slots is not None:
        memory = _make_slots(recording, slots, eviction)
    clock = costs.clock(streamed=memory is not None, storage=storage)
    documents: list[int] = []
    rounds: list[Round] = []
    misses: list[Counts] = []
    prompt_misses: list[Counts] = []
    for number, document in enumerate(recording.documents):
        text = _Text(document, memory, clock, drafting)
        prompt_misses.append(text.read_prompt(prefill_step_size))
        for each, missed in text.decode(retention.start(), steps):
            documents.append(number)
            rounds.append(each)
            misses.append(missed)
    width = len(header.layers) + len(header.head_layers)
    return Replayed(
        np.array(documents, np.int32),
        tuple(rounds),
        np.array(misses, np.int32).reshape(len(documents), width),
        np.array(prompt_misses, np.int32).reshape(len(prompt_misses), width),
    )


def _make_slots(recording: Recording, slots: int | Sequence[int], eviction: str) -> tuple[ModelSlots, ModelSlots]:
    """Those of trunk and head."""
    header = recording.header
    trunk, head = len(header.layers), len(header.head_layers)
    counts = [slots] * (trunk + head) if isinstance(slots, int) else list(slots)
    if len(counts) != trunk + head:
        raise InputError(f"replay: slots are given for {len(counts)} layers, but there are {trunk + head}")
    if min(counts) < header.top_k:
        raise InputError(f"replay: {min(counts)} slots, but a token needs {header.top_k} experts of a layer")
    return ModelSlots(header.experts, counts[:trunk], eviction), ModelSlots(header.experts, counts[trunk:], eviction)


class _Text:
    """One document on its way."""

    def __init__(self, document: Document, memory: tuple[ModelSlots, ModelSlots] | None, clock: Clock, drafting: str):
        self._document, self._memory, self._clock, self._path = document, memory, clock, drafting
        self._p = document.p.tolist()
        # Of each chain, how many drafts the trunk confirms.
        self._right = np.cumprod(document.agree, axis=1, dtype=np.intp).sum(axis=1).tolist()
        self._waiting: list[range] = []  # positions that the head has yet to read, by the round that committed them
        self._nothing = np.zeros((2, document.experts.shape[2]), np.int32)
        self._nothing_of_head = np.zeros((2, document.head_experts.shape[1]), np.int32)

    def read_prompt(self, step_size: int) -> Counts:
        """By layer, the misses of the prompt, its last token apart."""
        document, trunk, head = self._document, self._nothing, self._nothing_of_head
        if self._memory:
            for start in range(0, document.prompt - 1, step_size):
                rows = slice(start, min(start + step_size, document.prompt - 1))
                trunk = trunk + self._memory[0].window(document.prompt_experts[rows])
                head = head + self._memory[1].window(document.head_prompt_experts[rows])
        return np.concatenate([trunk[1], head[1]])

    def decode(self, controller: Controller, steps: int) -> Iterator[tuple[Round, Counts]]:
        """The decoder's own order: a plain step is begun before the one that it follows has landed, and the number of
        drafts is chosen before the latest round is learned from.
        """
        document, clock = self._document, self._clock
        left, position = document.positions + 1, -1
        made: list[float] = []
        retained, ahead, draft_seconds, replayed = 0, False, 0.0, False
        drafting = self._nothing_of_head
        window = self._verify(position, 0)
        while True:
            verify_seconds = clock.verify(1 + retained, window, ahead=ahead, replayed=replayed)
            follows = not retained and left > 1 and not controller.depth(steps)
            accepted = min(self._right[position], retained) if retained else 0
            committed = 1 + accepted
            left -= committed
            self._observe(range(position + 1, position + 1 + committed))
            depth = None
            if left and not follows and controller.depth(steps):
                depth = controller.depth(min(steps, left - 1))
            latest = Round(tuple(made), retained, accepted, committed, draft_seconds, verify_seconds, clock.commit)
            controller.learn(latest)
            yield latest, np.concatenate([window[1], drafting[1]])
            if not left:
                return
            replayed, ahead = committed < 1 + retained, follows
            position += committed
            made, retained, draft_seconds, drafting = [], 0, 0.0, self._nothing_of_head
            if depth is not None:
                made, retained, draft_seconds, drafting = self._draft(position, controller.gate(self._path), depth)
            window = self._verify(position, retained)

    def _observe(self, positions: range) -> None:
        """As MTPDrafter does."""
        waiting = self._waiting
        waiting.append(positions)
        while sum(map(len, waiting)) - len(waiting[0]) >= CAUGHT_UP:
            waiting.pop(0)

    def _draft(self, position: int, gate: Gate, depth: int) -> tuple[list[float], int, float, Counts]:
        """The confidences of the drafts that are made, how many are retained, the seconds, and what the head needs."""
        made = []
        for p in self._p[position][:depth]:
            made.append(p)
            gate.offer(p)
            if self._path == "stepwise" and not gate.open:
                break
        counts, rows = self._nothing_of_head, 0
        if made:
            read = [position for waiting in self._waiting for position in waiting]
            rows = len(read)
            self._waiting.clear()
            if self._memory:
                head = self._memory[1]
                counts = head.window(self._document.head_experts[read])
                for step in range(len(made) - 1):
                    counts = counts + head.window(self._document.chain_experts[position, step : step + 1])
        return made, gate.kept, self._clock.draft(len(made), rows, counts), counts

    def _verify(self, position: int, retained: int) -> Counts:
        """What each layer of the trunk needs and misses."""
        if self._memory is None:
            return self._nothing
        document = self._document
        rows = document.prompt_experts[-1:] if position < 0 else document.experts[position, : 1 + retained]
        return self._memory[0].window(rows)
