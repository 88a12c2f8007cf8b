"""The live state of the engine as data: what it counts, for the page, the metrics and the health check.

Totals only grow; what happened between two moments is the difference of two states.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..experts.traffic import Traffic
from ..speculation.calibration import MAX_POSITIONS
from ..speculation.record import Round

OUTCOMES = ("stop", "length", "cancelled", "failed", "refused")
PARTS = ("prompt", "draft", "verify", "commit", "batch")
FIRST_TOKEN_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class Histogram:
    """How often a number of seconds was at most each of ``bounds``, and last, more than all. sum: of the seconds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def copy(self) -> Histogram:
        return replace(self, counts=list(self.counts))


@dataclass
class Totals:
    """What the engine has done since it was made.

    requests: by outcome, one of OUTCOMES; refused: the queue was full. prompt_tokens: of the requests that began, and
    of those cached_tokens that were not read again. completion_tokens: decoded. windows: forwards of the model that
    gave tokens, of one request or of a batch. drafted: by a draft head. verified, accepted: by place in the chain, how
    often a draft was verified there, and confirmed. seconds: of the generation thread, by part, one of PARTS: reading
    prompts, a single request's drafting, verifying and committing, and steps of the batch. first_token: from arrival
    to the first token.
    """

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    windows: int = 0
    drafted: int = 0
    verified: list[int] = field(default_factory=lambda: [0] * MAX_POSITIONS)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_POSITIONS)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))

    def round(self, latest: Round) -> None:
        """Count a round of a request that decodes by itself; its tokens are counted when they are given."""
        self.windows += 1
        self.drafted += latest.drafted
        for place in range(latest.retained):
            self.verified[place] += 1
            self.accepted[place] += place < latest.accepted
        self.seconds["draft"] += latest.draft_seconds
        self.seconds["verify"] += latest.verify_seconds
        self.seconds["commit"] += latest.commit_seconds

    def copy(self) -> Totals:
        return replace(
            self,
            requests=dict(self.requests),
            verified=list(self.verified),
            accepted=list(self.accepted),
            seconds=dict(self.seconds),
            first_token=self.first_token.copy(),
        )


@dataclass(frozen=True)
class LayerState:
    """A MoE layer whose experts stream. resident: the ids of those in memory now; one that was not there a moment ago
    has been read since.
    """

    layer: int
    slots: int
    resident: tuple[int, ...]


@dataclass(frozen=True)
class ExpertState:
    """layers, count: MoE layers, an MTP head's last, and experts in each. indices: of these layers among all of the
    model's. streamed: those of which not all experts are in memory; empty where nothing streams. traffic: what reading
    has come to; None where nothing streams.
    """

    layers: int
    count: int
    indices: tuple[int, ...]
    streamed: tuple[LayerState, ...] = ()
    traffic: Traffic | None = None


@dataclass(frozen=True)
class RequestState:
    """phase: "queued", "prompt" or "decoding". read: tokens of the prompt that have been read, cached ones included.
    alone: decodes by itself, so that it may draft. seconds: since it arrived.
    """

    id: int
    phase: str
    prompt_tokens: int
    read: int
    cached_tokens: int
    completion_tokens: int
    max_tokens: int
    alone: bool
    seconds: float


@dataclass(frozen=True)
class MemoryState:
    """Bytes. scope: "process memory" or "GPU memory", of which used and budget are; budget: None without one. prefixes:
    held for prompts to come, of at most prefix_budget. parts: how the budget is spent, by purpose.
    """

    scope: str
    used: int
    budget: int | None
    prefixes: int
    prefix_budget: int
    parts: Mapping[str, int]


@dataclass(frozen=True)
class State:
    """A moment of the engine.

    at: seconds of a clock that never goes back. alive: the generation thread lives; else trouble says why not. mode:
    "exact" or "biased". policy, routing: in words. drafting: whether single requests draft ("on", "off", "auto").
    queue: requests that wait, of at most max_queue; requests: those first that are being served, of at most concurrency
    at a time, then those that wait.
    """

    at: float
    alive: bool
    trouble: str | None
    mode: str
    policy: str
    routing: str
    drafting: str
    queue: int
    max_queue: int
    concurrency: int
    requests: tuple[RequestState, ...]
    totals: Totals
    experts: ExpertState
    memory: MemoryState
