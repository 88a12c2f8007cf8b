"""Fused layers inside models, their kernels on the test host."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from strata_mlx import RetentionPolicy, SpeculativeDecoder, load, loading
from strata_mlx.engine import generate_step
from strata_mlx.experts.slots import SlotPool, UnifiedSlots
from strata_mlx.fused import layer
from strata_mlx.fused.draft import FusedHead
from strata_mlx.fused.layer import FusedEmbedding, FusedLayer, FusedQuantizedLinear, fuse
from strata_mlx.fused.project import MAX_ROWS
from strata_mlx.models.moe import blocks, set_routing
from strata_mlx.models.mtp import MTPHead
from strata_mlx.models.trunk import Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.routing import Residency, Routing, RoutingPolicy
from strata_mlx.speculation.window import Window
from tests.experts.staged import at_once
from tests.experts.streamed import checkpoint, logits, same, splitting, streamed
from tests.host.host import HostBuild
from tests.tiny import FAMILIES, WITH_HEAD

PROMPT = [5, 80, 200, 13, 7, 90, 41, 3, 9, 77, 120]  # more rows than are fused


class ToldAtOnce(UnifiedSlots):
    """The test host computes at once, before a promise could be kept."""

    def promise(self, *_: Any) -> None:  # type: ignore[override]
        return None


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("fused")
    return {family: checkpoint(path / family, family, "stacked", num_hidden_layers=2) for family in FAMILIES}


def fused(folder: Path, **options: Any) -> nn.Module:
    model, _ = load(folder, **options)
    fuse(model, HostBuild())
    return model


def states(cache: list[Any]) -> list[mx.array]:
    """What the layers keep, attention only as far as it is filled."""
    found: list[mx.array] = []
    for each in cache:
        kept = each.cache if hasattr(each, "cache") else [x[:, :, : each.offset] for x in (each.keys, each.values)]
        found += kept
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_gives_the_logits_of_its_own_way(family: str, folders: dict[str, Path]) -> None:
    own, _ = load(folders[family])
    model = fused(folders[family])
    caches = make_cache(own), make_cache(model)
    for tokens in (PROMPT, [17], [44, 2, 91], [8]):
        expected = own(mx.array([tokens]), cache=caches[0])
        got = model(mx.array([tokens]), cache=caches[1])
        assert np.abs(np.array(got - expected)).max() < 2e-5


def test_the_embedded_model_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "dequantise", lambda _: None)  # which a GPU does not
    own, _ = load()
    model, _ = load()
    fuse(model, HostBuild())
    assert isinstance(model.lm_head, FusedQuantizedLinear)
    assert isinstance(model.model.embed_tokens, FusedEmbedding)
    assert all(isinstance(layer, FusedLayer) for layer in model.layers)
    caches = make_cache(own), make_cache(model)
    for tokens in (PROMPT, [17], [44, 2]):
        expected = own(mx.array([tokens]), cache=caches[0])
        got = model(mx.array([tokens]), cache=caches[1])
        assert np.abs(np.array(got - expected)).max() < 5e-5


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_a_window_is_as_many_steps_to_the_bit_and_can_be_taken_back(family: str, folders: dict[str, Path]) -> None:
    model = fused(folders[family])
    trunk, drafts = Trunk(model), [44, 2, 91, 60]
    for kept in range(5):
        whole, stepped = make_cache(model), make_cache(model)
        for cache in (whole, stepped):
            trunk(mx.array([PROMPT]), cache)
        window = Window(whole, 4)
        rows = trunk.logits(trunk(mx.array([drafts]), window.layers).after)
        for i in range(4):
            row = trunk.logits(trunk(mx.array([drafts[i : i + 1]]), stepped).after) if i < kept else None
            assert row is None or mx.array_equal(row[0, 0], rows[0, i]).item()
        window.commit(kept)
        for got, expected in zip(states(whole), states(stepped), strict=True):
            assert mx.array_equal(got, expected).item()


@pytest.mark.parametrize("kind", [ToldAtOnce, at_once])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("slots", [4, 9])
def test_streamed_experts_give_the_bits_of_resident_ones(
    slots: int, split: bool, kind: Callable[..., SlotPool], folders: dict[str, Path]
) -> None:
    windows = (11, 1, 4, 1, 4, 1)
    expected = logits(fused(folders["qwen3_next"], mtp=True), windows)
    with splitting(split):
        model = streamed(folders["qwen3_next"], slots, kind=kind, mtp=True)
        fuse(model, HostBuild())
        assert same(logits(model, windows), expected)


def test_a_policy_that_cannot_act_changes_no_bit(folders: dict[str, Path]) -> None:
    model = fused(folders["qwen3_next"])
    expected = logits(model, (11, 1, 3))
    layers = {block.layer: np.ones(16, np.bool_) for block in blocks(model)}
    set_routing(model, Routing(RoutingPolicy(moce_bonus=1e-9), Residency(layers)))  # a factor of 1
    assert same(logits(model, (11, 1, 3)), expected)
    set_routing(model, Routing(RoutingPolicy(moce_bonus=3.0), Residency({0: np.arange(16) < 5})))
    assert not same(logits(model, (11, 1, 3)), expected)


def test_the_observer_is_told_what_the_kernels_chose(folders: dict[str, Path]) -> None:
    own, _ = load(folders["qwen3_next"])
    model, seen = fused(folders["qwen3_next"]), []
    for each in (own, model):
        ids: dict[int, list[int]] = {}

        def observe(layer: int, chosen: mx.array, ids: dict[int, list[int]] = ids) -> None:
            ids[layer] = np.sort(np.array(chosen).ravel()).tolist()

        set_routing(each, Routing(observer=observe))
        cache = make_cache(each)
        each(mx.array([PROMPT]), cache=cache)
        each(mx.array([[17]]), cache=cache)
        seen.append(ids)
    assert seen[0] == seen[1]


def test_greedy_speculation_is_plain_decoding(folders: dict[str, Path]) -> None:
    model = fused(folders["qwen3_next"], mtp=True)
    plain = [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=12)]
    decoder = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=12, max_steps=3, retention=RetentionPolicy(0.0))
    assert [token.token for token in decoder] == plain
    assert decoder.summary.drafted > 0


@pytest.mark.parametrize("family", WITH_HEAD)
def test_a_fused_head_drafts_what_its_own_way_drafts(family: str, folders: dict[str, Path]) -> None:
    """Prompts, the rows after them, and a chain of one row each."""
    own, _ = load(folders[family], mtp=True)
    other = fused(folders[family], mtp=True)
    assert isinstance(other.mtp, FusedHead) == (type(own.mtp) is MTPHead)
    hidden = Trunk(own)(mx.array([PROMPT]), make_cache(own)).after
    found = []
    for model in (own, other):
        cache, states = model.mtp.make_cache(), []
        for start, stop in ((0, MAX_ROWS + 1), (MAX_ROWS + 1, len(PROMPT))):
            tokens = mx.array([PROMPT[start:stop]])
            states.append(model.mtp.read(Trunk(model), tokens, hidden[:, start:stop], cache))
        token, probability = model.mtp.likeliest(Trunk(model), states[-1][:, -1:])
        states.append(model.mtp.read(Trunk(model), token[None], states[-1][:, -1:], cache))
        found.append((mx.concatenate(states, axis=1), token.item(), probability))
    assert found[0][1] == found[1][1]
    assert mx.allclose(found[0][0], found[1][0], rtol=1e-4, atol=1e-4).item()
    assert mx.allclose(found[0][2], found[1][2], rtol=1e-4).item()


def test_a_fused_model_goes_when_nobody_has_it(folders: dict[str, Path]) -> None:
    """At once, and its memory with it."""
    model = fused(folders["qwen3_next"], mtp=True)
    model.mtp.read(Trunk(model), mx.array([[1]]), mx.zeros((1, 1, 64)), model.mtp.make_cache())
    there = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert there() is None
    finally:
        gc.enable()


def test_the_output_head_follows_its_weights(folders: dict[str, Path]) -> None:
    """As adapters and load_weights() change them."""
    model = fused(folders["qwen3_next"])
    hidden = mx.ones((1, 1, 64))
    assert mx.abs(model.lm_head(hidden)).max().item() != 0
    model.lm_head.update({"weight": mx.zeros_like(model.lm_head.weight)})
    for rows in (1, 12):
        assert mx.abs(model.lm_head(mx.ones((1, rows, 64)))).max().item() == 0


def test_graphs_for_ever_other_caches_are_not_kept(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "MAX_GRAPHS", 3)
    steps = layer._Steps(fused(folders["qwen3_next"]).layers[1], HostBuild())
    for size in range(10):
        steps.renew((1, 2, size, 32))
    assert len(steps._sizes) <= 3
