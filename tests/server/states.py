"""States of an engine that a test makes up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from strata_mlx.errors import Fault
from strata_mlx.experts.traffic import Traffic
from strata_mlx.server.jobs import Job
from strata_mlx.server.state import ExpertState, LayerState, MemoryState, RequestState, State, Totals
from strata_mlx.server.streams import Item
from tests.server.scripted import ScriptedEngine

LAYERS, EXPERTS = 3, 20  # 20 bits are not whole bytes


def a_state(**changes: Any) -> State:
    """Of an engine that has done nothing, whose experts are all in memory."""
    state = State(
        at=1.0,
        alive=True,
        trouble=None,
        mode="exact",
        policy="min_p 0.35, chained",
        routing="exact",
        drafting="auto",
        queue=0,
        max_queue=64,
        concurrency=16,
        requests=(),
        totals=Totals(),
        experts=ExpertState(LAYERS, EXPERTS, tuple(range(LAYERS))),
        memory=MemoryState("process memory", 96_500_000, 128_000_000, 1_500_000, 16_000_000, {"weights": 8_343_000}),
    )
    return replace(state, **changes)


def streaming(*resident: tuple[int, ...], traffic: Traffic | None = None) -> ExpertState:
    """The first layers stream, and hold these experts."""
    layers = tuple(LayerState(layer, 8, held) for layer, held in enumerate(resident))
    return ExpertState(LAYERS, EXPERTS, tuple(range(LAYERS)), layers, traffic or Traffic())


def a_request(**changes: Any) -> RequestState:
    request = RequestState(7, "decoding", 1234, 1234, 1000, 12, 512, alone=True, seconds=1.5)
    return replace(request, **changes)


def some_totals() -> Totals:
    totals = Totals(prompt_tokens=1234, cached_tokens=1000, completion_tokens=40, windows=25, drafted=30)
    totals.requests["stop"], totals.requests["refused"] = 5, 2
    totals.verified[:2], totals.accepted[:2] = [20, 10], [15, 4]
    totals.seconds["prompt"], totals.seconds["verify"] = 0.25, 0.75
    for seconds in (0.04, 0.2, 0.2, 99.0):
        totals.first_token.add(seconds)
    return totals


class ShownEngine(ScriptedEngine):
    """Its state is what a test shows."""

    def __init__(self, answer: Callable[[Job], Iterable[Item | Fault]] | None = None, **changes: Any):
        super().__init__()
        self.answer = answer or (lambda _: ())
        self._shown = a_state(**changes)

    def show(self, **changes: Any) -> None:
        self._shown = replace(self._shown, **changes)

    def state(self) -> State:
        return replace(self._shown, at=time.monotonic())
