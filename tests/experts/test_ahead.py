"""The host prepares a layer before the experts of the one before are known, and nothing is computed too early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from strata_mlx import load
from strata_mlx.engine import generate_step
from strata_mlx.experts.ahead import Ahead, a_layer_ahead
from strata_mlx.experts.stream import StreamedExperts
from strata_mlx.experts.streaming import streaming_of
from strata_mlx.models.moe import blocks, set_routing
from strata_mlx.models.trunk import Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.routing import LiveResidency, Price, Residency, Routing, RoutingPolicy
from tests.experts.streamed import EXPERTS, TEXT, TOP_K, checkpoint, logits, same, splitting, streamed

FEW = (9, 1, 2, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("ahead") / "model", layout="stacked")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    return logits(load(folder)[0], FEW)


@pytest.fixture(autouse=True)
def quick_reads() -> Iterator[None]:
    with splitting(False):
        yield


@pytest.fixture
def left_behind() -> Iterator[list[object]]:
    """The windows that were left behind."""
    windows: list[object] = []

    def put(self: Ahead, window: Any, original: Callable[..., None] = Ahead.put) -> None:
        windows.append(window)
        original(self, window)

    with patch.object(Ahead, "put", put):
        yield windows


def test_a_token_leaves_each_layer_behind_but_the_last(
    folder: Path, expected: list[Any], left_behind: list[object]
) -> None:
    model = streamed(folder, 2 * TOP_K)  # which has room for any two rows
    assert same(logits(model, FEW), expected)
    assert len(left_behind) == 3 * (len(streaming_of(model).layers) - 1)  # type: ignore[union-attr]
    left_behind.clear()
    for _ in generate_step(mx.array(TEXT[:3]), model, max_tokens=4):
        pass
    assert len(left_behind) == 4


def test_without_a_block_no_layer_is_left_behind(folder: Path, left_behind: list[object]) -> None:
    model = streamed(folder, TOP_K + 1)
    assert same([np.array(model(mx.array([TEXT[:2]])))], [np.array(load(folder)[0](mx.array([TEXT[:2]])))])
    assert not left_behind


def test_slow_reads_and_windows_that_may_have_no_room_leave_nothing_behind(
    folder: Path, expected: list[Any], left_behind: list[object]
) -> None:
    with splitting(True):
        assert same(logits(streamed(folder, TOP_K + 1), FEW), expected)
        assert not left_behind
    assert same(logits(streamed(folder, TOP_K), (2, 3)), logits(load(folder)[0], (2, 3)))
    assert not left_behind


def test_who_looks_at_selections_sees_the_models_own(folder: Path) -> None:
    """An observer may compute what it is shown."""

    def selections(model: nn.Module) -> list[Any]:
        seen: list[Any] = []
        set_routing(model, Routing(observer=lambda _, ids: seen.append(np.sort(np.array(ids), axis=-1))))
        logits(model, FEW)
        return seen

    assert same(selections(streamed(folder, TOP_K + 1)), selections(load(folder)[0]))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("deep") / "model", layout="stacked", num_hidden_layers=4)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("slots", [TOP_K + 1, [TOP_K + 1, EXPERTS, EXPERTS, TOP_K + 1]], ids=["all", "some"])
@pytest.mark.parametrize("policy", [RoutingPolicy(moce_bonus=0.5), RoutingPolicy(kind="cache_prior", prior_lambda=0.1)])
def test_biased_routing_leaves_layers_behind_and_selects_the_same(
    policy: RoutingPolicy, slots: Any, static: bool, deep: Path, left_behind: list[object]
) -> None:
    """Its price, which is sampled, is that of layers that go one by one too; also where some layers do not stream."""

    def run() -> tuple[list[Any], Price]:
        model = streamed(deep, slots)
        known = {b.layer: b.switch_mlp.known for b in blocks(model) if isinstance(b.switch_mlp, StreamedExperts)}
        residency = Residency({layer: np.arange(EXPERTS) % 3 == 0 for layer in range(4)})
        routing = Routing(policy, residency if static else LiveResidency(known))
        set_routing(model, routing)
        return logits(model, (9, *[1] * 30)), routing.price

    ahead = run()
    assert left_behind
    with patch.object(StreamedExperts, "_can_wait", lambda *_: False):
        one_by_one = run()
    assert same(ahead[0], one_by_one[0])
    assert ahead[1] == one_by_one[1]
    assert ahead[1].sampled_rows
    assert ahead[1].changed


def test_a_forward_that_ends_early_is_safe_to_compute(folder: Path, left_behind: list[object]) -> None:
    def first_layer(model: nn.Module) -> list[Any]:
        trunk, cache, x = Trunk(model), make_cache(model), mx.array([TEXT[:1]])
        with a_layer_ahead(streaming_of(model)):
            x = trunk.layers[0](trunk.embed(x), mask=None, cache=cache[0])
        return [np.array(x)]

    plain = first_layer(load(folder)[0])
    assert not left_behind
    assert same(first_layer(streamed(folder, TOP_K + 1)), plain)
    assert len(left_behind) == 1


def test_a_trunk_that_begins_layers_early_leaves_those_that_stream_alone(
    folder: Path, left_behind: list[object]
) -> None:
    def begun(model: nn.Module) -> list[Any]:
        trunk, cache = Trunk(model), make_cache(model)
        windows = ([TEXT[:9]], [TEXT[9:10]], [TEXT[10:12]])
        return [np.array(trunk(mx.array(tokens), cache, begin=True).after) for tokens in windows]

    assert same(begun(streamed(folder, 2 * TOP_K)), begun(load(folder)[0]))
    assert len(left_behind) == 2


def test_what_was_cut_short_is_not_gone_on_with(folder: Path, expected: list[Any], left_behind: list[object]) -> None:
    model = streamed(folder, TOP_K + 1)
    trunk, cache = Trunk(model), make_cache(model)

    def interrupted() -> None:
        with a_layer_ahead(streaming_of(model)):
            trunk.layers[0](trunk.embed(mx.array([TEXT[:1]])), mask=None, cache=cache[0])
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert same(logits(model, FEW), expected)
    assert left_behind


def told_after_the_next(self: StreamedExperts, *window: Any, original: Any = StreamedExperts._serve) -> mx.array:
    behind = self._ahead.take()
    result: mx.array = original(self, *window)
    if behind:
        behind.keep()
        behind.end()
    return result


def nobody_is_told(self: Ahead, *_: Any) -> None:
    self.open, self._behind = False, None


@pytest.mark.parametrize(
    ("owner", "name", "mutant"), [(StreamedExperts, "_serve", told_after_the_next), (Ahead, "take", lambda _: None)]
)
def test_mutants_die(folder: Path, expected: list[Any], owner: type, name: str, mutant: Any) -> None:
    with patch.object(owner, name, mutant):
        assert not same(logits(streamed(folder, TOP_K + 1), FEW), expected)


def test_a_block_that_tells_nobody_would_be_noticed(folder: Path, left_behind: list[object]) -> None:
    with patch.object(Ahead, "__exit__", nobody_is_told), pytest.raises(AssertionError):
        test_a_forward_that_ends_early_is_safe_to_compute(folder, left_behind)
