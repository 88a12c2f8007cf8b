"""The parts of a layer that ranks compute, here one after another, add up to what one rank computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from numpy.typing import NDArray

from strata_mlx import InputError, load
from strata_mlx.experts.eviction import make_eviction
from strata_mlx.experts.table import SlotTable
from strata_mlx.models.moe import blocks
from strata_mlx.parallel.experts import Everywhere
from strata_mlx.routing import LiveResidency
from tests.budgets import count_a_small_process, memory_for
from tests.experts.streamed import EXPERTS, TOP_K, checkpoint, splitting

ROWS = (1, 3, 20, 1)


class Lone:
    """A rank that speaks to nobody."""

    group = None

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.leads = rank, size, rank == 0

    def broadcast(self, value: Any) -> Any:
        return value

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def layer(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compare(self, chosen: Any) -> None:
        """There is nothing to compare with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("experts") / "model")


def parts(model: nn.Module) -> list[NDArray[np.float32]]:
    """What windows of ROWS give before anything is added up."""
    block, found = blocks(model)[0], []

    def across(part: mx.array) -> mx.array:
        found.append(part)
        return part

    block.across = across
    rng = np.random.default_rng(0)
    for rows in ROWS:
        mx.eval(block(mx.array(rng.standard_normal((1, rows, 64), np.float32))))
    return [np.array(part) for part in found]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("size", "slots"), [(2, TOP_K), (2, None), (3, TOP_K), (6, None), (16, None)])
def test_the_parts_add_up(folder: Path, size: int, slots: int | None, split: bool) -> None:
    expected = parts(load(folder)[0])
    with splitting(split):
        models = [load(folder, slots=slots, ranks=Lone(rank, size))[0] for rank in range(size)]  # type: ignore[arg-type]
        found = [parts(model) for model in models]
    for window, whole in enumerate(expected):
        of_ranks = [of_rank[window] for of_rank in found]
        np.testing.assert_allclose(sum(of_ranks), whole, rtol=1e-5, atol=1e-6)
    for model in models:
        table = model.streaming.tables[0]
        assert table.slots == min(slots or EXPERTS, -(-EXPERTS // size))
        assert (table.counts == models[0].streaming.tables[0].counts).all()  # all ranks know what was selected
        assert slots or model.streaming.traffic().misses == 0


def test_a_budget_is_spent_on_the_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_a_small_process(monkeypatch)
    memory = memory_for(folder, EXPERTS)
    alone, _ = load(folder, memory=memory, context=64)
    model, _ = load(folder, memory=memory, context=64, ranks=Lone(1, 2))  # type: ignore[arg-type]
    assert alone.streaming is None
    assert (model.fit.slots, model.fit.streams) == (EXPERTS // 2, False)
    assert model.streaming.tables[0].resident.tolist() == [False, True] * (EXPERTS // 2)


def test_a_share_has_no_more_slots_than_a_token_needs_of_it(folder: Path) -> None:
    model, _ = load(folder, slots=2, ranks=Lone(0, 8))  # type: ignore[arg-type]
    assert model.streaming.slots == 2
    with pytest.raises(InputError, match="give at least 2"):
        load(folder, slots=1, ranks=Lone(0, 8))  # type: ignore[arg-type]


def test_options_that_do_not_go_together_are_refused(folder: Path, tmp_path: Path) -> None:
    one: Any = Lone(0, 2)
    with pytest.raises(InputError, match="placement is 'fair', expected one of even, profile"):
        load(folder, placement="fair", ranks=one)
    with pytest.raises(InputError, match="give the expert_profile too"):
        load(folder, placement="profile", ranks=one)
    with pytest.raises(InputError, match="give the ranks too"):
        load(folder, placement="profile", memory="1GB", expert_profile=tmp_path / "profile.json")


def test_a_rank_evicts_by_what_the_router_wants(folder: Path) -> None:
    model, _ = load(folder, slots=TOP_K, ranks=Lone(0, 2))  # type: ignore[arg-type]
    block = blocks(model)[0]
    block.across = lambda part: part
    block.switch_mlp.known.wanted = mx.array([[list(range(TOP_K))]], mx.uint32)
    mx.eval(block(mx.ones((1, 1, 64))))  # routed exactly: nobody says that anything else is wanted
    assert np.flatnonzero(block.switch_mlp.table.eviction.score).tolist() == list(range(TOP_K))
    assert block.switch_mlp.known.wanted is None


def test_residents_of_all_ranks_are_preferred_once_all_slots_have_been_full() -> None:
    tables = [SlotTable(20, slots, make_eviction("lru", 20)) for slots in (2, 3)]
    everywhere = Everywhere(20)
    live = LiveResidency({0: everywhere})
    assert live.of(0) is None
    assert everywhere.asked  # from now on, it is exchanged
    held = [[4, 19], [0, 9, 11]]
    for count, full in ((1, False), (3, True)):
        for table, experts in zip(tables, held, strict=True):
            experts = [expert for expert in experts[:count] if not table.resident[expert]]
            table.commit(table.reserve(experts, np.zeros(0, np.intp)))
        before = live.version(0)
        everywhere.update(mx.array(np.stack([everywhere.pack(table) for table in tables])))
        assert live.version(0) > before
        resident = live.of(0)
        assert (resident is not None) == full
    assert resident is not None
    assert resident.nonzero()[0].tolist() == [0, 4, 9, 11, 19]
