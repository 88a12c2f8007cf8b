"""Memory budgets for tiny checkpoints, whose experts weigh little beside the process that runs the tests."""

from pathlib import Path

import pytest

from strata_mlx.checkpoint import Checkpoint
from strata_mlx.experts import needs, system
from strata_mlx.experts.needs import needs_of
from strata_mlx.models.plan import plan_model

CONTEXT = 64
PROCESS = 10_000_000


def count_a_small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process that runs the tests count as PROCESS bytes, and never as too much."""
    monkeypatch.setattr(needs, "_process", lambda _: PROCESS)
    monkeypatch.setattr(system, "footprint", lambda: 0)


def memory_for(folder: Path, slots: int, mtp: bool = False, context: int = CONTEXT, rows: int = 2048) -> int:
    """The budget, in bytes, that gives ``slots`` under count_a_small_process()."""
    need = needs_of(plan_model(Checkpoint.open(folder), mtp=mtp), context=context, step_size=rows)
    if slots == need.experts:
        return need.resident
    low, high = need.smallest, need.resident
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if need.fit(middle).slots < slots else (low, middle)
    assert need.fit(low).slots == slots
    return low
