"""The trade-off of misses and perplexity: documents in lockstep are what streaming does with one after another."""

from __future__ import annotations

import itertools
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from benchmarks.lockstep import log_likelihood, multiply_with_numpy
from benchmarks.residency_tradeoff import EXACT, Setting, measure, pareto, price, replay, settings
from strata_mlx import RoutingPolicy, load, set_routing
from strata_mlx.models.moe import blocks, make_routing
from strata_mlx.models.trunk import Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.routing import verify_window
from strata_mlx.speculation.draft import MTPDrafter
from tests.tiny import make_checkpoint

EXPERTS, SLOTS = 8, 4
TOKENS = np.random.default_rng(0).integers(0, 250, (3, 30)).astype(np.int32)
POLICIES = [
    EXACT,
    RoutingPolicy(1.0),
    RoutingPolicy(1.0, 0.5, protect=2),
    RoutingPolicy(kind="margin", margin=0.2),
    RoutingPolicy(kind="margin", margin=0.1, sure_margin=0.5),
    RoutingPolicy(kind="cache_prior", prior_lambda=0.2, protect=0),
    RoutingPolicy(kind="max_rank", max_rank=4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tradeoff") / "model", layout="stacked", mtp="stacked")


@pytest.fixture(scope="module")
def model(folder: Path) -> nn.Module:
    return multiply_with_numpy(load(folder, mtp=True)[0])


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_documents_in_lockstep_are_streamed_ones(folder: Path, model: nn.Module, policy: RoutingPolicy) -> None:
    found, _ = measure(model, TOKENS, Setting(policy, "lrfu", SLOTS))
    for document, tokens in enumerate(TOKENS):
        streamed = load(folder, slots=SLOTS, eviction="lrfu", mtp=True)[0]
        set_routing(streamed, make_routing(streamed, policy, None))
        trunk, cache, nats = Trunk(streamed), make_cache(streamed), []
        head = MTPDrafter(streamed) if policy.sure_margin is not None else None
        for token, following in itertools.pairwise([*tokens.tolist(), 0]):
            made = list(itertools.islice(head.steps(), 1)) if head else []
            with verify_window([step.confidence for step in made]):
                hidden = trunk(mx.array([[token]]), cache)
            nats.append(-log_likelihood(trunk.logits(hidden.after)[:, 0], np.array([following]))[0])
            if head:
                head.observe(mx.array([following]), hidden)
        traffic = streamed.streaming.traffic()
        layers = 3 if head else 2
        picks = 2 * len(tokens) * blocks(streamed)[0].router.top_k  # of the trunk's two layers
        assert found.misses[document] == traffic.misses / picks
        assert found.evicting[document] == (traffic.misses - layers * SLOTS) / picks
        assert np.allclose(found.nats[document], nats[:-1], atol=1e-4)


@pytest.mark.parametrize("eviction", ["lru", "frequency", "lrfu"])
def test_a_replay_counts_as_a_run_does(model: nn.Module, eviction: str) -> None:
    exact, routing = measure(model, TOKENS, Setting(EXACT, "lru", EXPERTS))
    found, _ = measure(model, TOKENS, Setting(EXACT, eviction, SLOTS))
    assert (replay(routing.ids, Setting(EXACT, eviction, SLOTS), EXPERTS, exact).misses == found.misses).all()


def test_a_price_is_the_rise_of_the_perplexity(model: nn.Module) -> None:
    exact, _ = measure(model, TOKENS, Setting(EXACT, "lru", SLOTS))
    assert price(exact, exact) == (0.0, [0.0, 0.0])
    biased, _ = measure(model, TOKENS, Setting(RoutingPolicy(3.0), "lru", SLOTS))
    rise, (low, high) = price(biased, exact)
    assert rise == pytest.approx(np.exp(biased.nats.mean()) / np.exp(exact.nats.mean()) - 1)
    assert low < rise < high
    assert biased.changed > 0
    assert biased.extra_kl > 0


def test_the_front_has_no_point_that_another_beats() -> None:
    rows = [{"misses": m, "price": p} for m, p in ((0.5, 0.0), (0.3, 0.02), (0.4, 0.03), (0.2, 0.04))]
    assert pareto(rows) == [(20.0, 4.0), (30.0, 2.0), (50.0, 0.0)]


def test_every_setting_is_compared_once() -> None:
    every = settings([32, 64])
    assert len(set(every)) == len(every)
    assert {setting.slots for setting in every} == {32, 64}
