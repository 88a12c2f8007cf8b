"""Guessing the next layer's experts: what next_layer.py counts, and what its bound says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.next_layer import gain, rankings, replay, rows
from strata_mlx import load
from strata_mlx.experts.eviction import make_eviction
from strata_mlx.experts.table import SlotTable
from strata_mlx.models.moe import blocks
from strata_mlx.routing import Routing
from tests.tiny import make_checkpoint

EXPERTS, TOP_K, SLOTS = 12, 3, 6
CHOSEN = np.argsort(np.random.default_rng(0).random((40, EXPERTS)), axis=-1)


def table() -> SlotTable:
    return SlotTable(EXPERTS, SLOTS, make_eviction("lru", EXPERTS))


def test_guesses_that_are_right_leave_nothing_to_read_on_demand() -> None:
    found = replay(CHOSEN[:, :TOP_K], CHOSEN[:, :TOP_K], table())
    nothing = replay(CHOSEN[:, :TOP_K], CHOSEN[:, :0], table())
    assert (found["misses"], found["right"]) == (0, found["picks"])
    assert found["ahead"] == found["useful"] == nothing["misses"] > 0
    assert nothing["ahead"] == nothing["guesses"] == 0


def test_guesses_that_are_wrong_are_read_for_nothing() -> None:
    found = replay(CHOSEN[:, :TOP_K], CHOSEN[:, -TOP_K:], table())
    assert found["useful"] == found["right"] == 0
    assert found["ahead"] > 0
    assert found["misses"] > replay(CHOSEN[:, :TOP_K], CHOSEN[:, :0], table())["misses"]  # they took others' places


def test_a_layer_is_guessed_by_what_the_one_before_saw(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path / "model", layout="stacked"))[0]
    gates = [block.gate for block in blocks(model)]
    chosen: list[Any] = []
    for block in blocks(model):
        block.routing = Routing(observer=lambda _, ids: chosen.append(ids[0].tolist()))
    found = rankings(model, [1, 2, 3, 4])
    assert [block.gate for block in blocks(model)] == gates
    assert len(found) == len(gates) - 1
    top_k = blocks(model)[0].router.top_k
    for (actual, guessed), ids in zip(found, chosen[1:], strict=True):
        assert [set(row[:top_k]) for row in actual.tolist()] == [set(row) for row in ids]
        assert actual.shape == guessed.shape
        assert (actual != guessed).any()


def test_the_rows_compare_with_what_streaming_does() -> None:
    first, *others = rows([[(CHOSEN, CHOSEN)]], TOP_K, SLOTS)
    assert first["guesses"] == first["ahead"] == 0
    assert {value for name, value in first.items() if name.startswith("gain")} == {1.0}
    for row in others:
        assert row["precision"] == pytest.approx(min(1, TOP_K / min(row["guesses"], EXPERTS)))


def test_the_bound_by_hand() -> None:
    assert gain(before=5, misses=2, ahead=4, read_time=0.25) == (1 + 1.25) / (1 + 0.5)
    assert gain(before=5, misses=2, ahead=8, read_time=1) == 6 / 10
