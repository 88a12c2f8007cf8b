"""Drafts by NumPy are those of the head itself, up to rounding; what NumPy does not know is left to the head."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from strata_mlx import load
from strata_mlx.models import numpy_head
from strata_mlx.models.mtp import DraftHead
from strata_mlx.models.numpy_head import NumPyHead, for_drafts
from strata_mlx.models.trunk import Trunk
from strata_mlx.routing import Routing
from strata_mlx.server.prefixes import frozen, thawed
from tests.experts.streamed import checkpoint, streamed
from tests.tiny import TINY, make_checkpoint

FAMILIES = ("qwen3_next", "qwen3_5_moe")
OTHERS = tuple(family for family, tiny in TINY.items() if tiny.layer)
ROWS = (70, 1, 3, 1, 2, 9, 64, 1, 65, 1, 50, 1, 1)  # beyond the first growth of a cache, by either way


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    root: Path = tmp_path_factory.mktemp("numpy_head")
    folders = {family: make_checkpoint(root / family, family, "stacked", mtp="stacked") for family in FAMILIES}
    loaded = {family: load(folder, mtp=True)[0] for family, folder in folders.items()}
    return {**loaded, "embedded": load(mtp=True)[0]}


@pytest.fixture(params=(*FAMILIES, "embedded"))
def model(request: pytest.FixtureRequest, models: dict[str, nn.Module]) -> nn.Module:
    return models[request.param]


def inputs(model: nn.Module, rows: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Tokens ``[T]`` and hidden states ``[1, T, D]``, lazy as those of a window are."""
    trunk, random = Trunk(model), np.random.default_rng(seed)
    tokens = mx.array(random.integers(0, trunk.embed.weight.shape[0], rows), mx.uint32)
    states = random.standard_normal((1, rows + 1, model.mtp.norm.weight.size))
    return tokens, mx.array(states, mx.float32)[:, :rows]


def run(head: DraftHead, model: nn.Module, cache: list[Any], rows: int, seed: int) -> np.ndarray[Any, Any]:
    tokens, hidden = inputs(model, rows, seed)
    return np.array(head.read(Trunk(model), tokens[None], hidden, cache)[:, -1:])


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-3)


def test_it_computes_what_the_head_does(model: nn.Module) -> None:
    head, fast = model.mtp, for_drafts(model.mtp)
    assert isinstance(fast, NumPyHead)
    one, other = head.make_cache(), fast.make_cache()
    for seed, rows in enumerate(ROWS):
        close(run(fast, model, other, rows, seed), run(head, model, one, rows, seed))
        if seed % 3 == 1:  # a chain is taken back
            for cache, which in ((one, head), (other, fast)):
                run(which, model, cache, 1, 100 + seed)
                assert [layer.trim(1) for layer in cache] == [1] * len(cache)
    assert [layer.offset for layer in other] == [sum(ROWS)] * len(other)
    close(other[0].keys[..., : sum(ROWS), :], one[0].keys[..., : sum(ROWS), :])


def test_rows_of_a_head_of_several_layers_do_not_see_later_ones(models: dict[str, nn.Module]) -> None:
    model, single = models["qwen3_next"], models["qwen3_next"].mtp.layers
    model.mtp.layers = [*single, *models["qwen3_5_moe"].mtp.layers]
    try:
        own, fast = ([run(head, model, cache, rows, rows) for rows in (5, 1, 3)] for head, cache in caches(model))
    finally:
        model.mtp.layers = single
    close(fast, own)


def caches(model: nn.Module) -> list[tuple[DraftHead, list[Any]]]:
    return [(head, head.make_cache()) for head in (model.mtp, for_drafts(model.mtp))]


def test_what_is_kept_of_a_cache_stays_as_it_is(model: nn.Module) -> None:
    head = for_drafts(model.mtp)
    cache = head.make_cache()
    run(head, model, cache, 20, 0)
    kept = frozen(cache)
    before = [np.array(array) for layer in kept for array in (layer.keys, layer.values)]
    first = run(head, model, cache, 3, 1)
    again = thawed(kept)
    close(run(head, model, again, 3, 1), first)
    run(head, model, again, 1, 2)
    for array, known in zip([array for layer in kept for array in (layer.keys, layer.values)], before, strict=True):
        np.testing.assert_array_equal(np.array(array), known)


def test_the_likeliest_token_is_that_of_the_logits(model: nn.Module) -> None:
    trunk, (_, hidden) = Trunk(model), inputs(model, 1)
    expected = np.array(trunk.logits(hidden))[0, 0]
    for head in (model.mtp, for_drafts(model.mtp)):
        token, probability = head.likeliest(trunk, hidden)
        assert (token.dtype, probability.dtype) == (mx.uint32, mx.float32)
        assert np.array(token).tolist() == [expected.argmax()]
        np.testing.assert_allclose(np.array(probability), np.exp(expected.max() - np.logaddexp.reduce(expected)), 1e-4)
        np.testing.assert_allclose(np.array(head.logits(trunk, hidden))[0, 0], expected, atol=2e-4)


def test_another_output_head_is_left_to_mlx(models: dict[str, nn.Module]) -> None:
    model = models["qwen3_next"]
    trunk, (_, hidden) = Trunk(model), inputs(model, 1)
    trunk.head = nn.QuantizedLinear.from_linear(trunk.head, 32, 8)
    results = [head.likeliest(trunk, hidden) for head in (model.mtp, for_drafts(model.mtp))]
    assert all(mx.array_equal(*pair) for pair in zip(*results, strict=True))


def test_logits_that_are_not_numbers_have_no_probability(model: nn.Module) -> None:
    hidden = mx.full((1, 1, model.mtp.norm.weight.size), float("nan"))
    assert np.isnan(np.array(for_drafts(model.mtp).likeliest(Trunk(model), hidden)[1]))


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_embeddings_are_those_of_the_trunk(model: nn.Module, bits: int) -> None:
    trunk = Trunk(model)
    trunk.embed = nn.QuantizedEmbedding(trunk.embed.weight.shape[0], model.mtp.norm.weight.size, 32, bits)
    tokens, hidden = inputs(model, 5)
    own, fast = (head.read(trunk, tokens[None], hidden)[:, -1:] for head in (model.mtp, for_drafts(model.mtp)))
    close(np.array(fast), np.array(own))


def test_what_an_observer_watches_has_the_bits_of_the_head(model: nn.Module) -> None:
    block, seen = model.mtp.layers[0].mlp, list[mx.array]()
    before, block.routing = block.routing, Routing(observer=lambda _, ids: seen.append(ids))
    try:
        heads = model.mtp, for_drafts(model.mtp)
        own, fast = (run(head, model, head.make_cache(), 3, 0) for head in heads)
        drafts = [head.likeliest(Trunk(model), mx.array(own)) for head in heads]
    finally:
        block.routing = before
    np.testing.assert_array_equal(own, fast)
    assert all(mx.array_equal(*pair) for pair in zip(*drafts, strict=True))
    assert seen[0].shape == seen[1].shape
    assert mx.array_equal(seen[0], seen[1])


def test_a_router_that_prefers_residents_is_followed(models: dict[str, nn.Module]) -> None:
    """Whoever routes, by whatever policy, decides: here somebody who always takes the first experts."""
    model = models["qwen3_next"]
    block = model.mtp.layers[0].mlp

    class First(Routing):
        def _select(self, _: int, logits: mx.array, router: Any, *__: Any) -> tuple[mx.array, mx.array]:
            shape = (*logits.shape[:-1], router.top_k)
            return mx.broadcast_to(mx.arange(router.top_k, dtype=mx.uint32), shape), mx.full(shape, 0.5)

    before, block.routing = block.routing, First()
    try:
        own, fast = (run(head, model, head.make_cache(), 2, 0) for head in (model.mtp, for_drafts(model.mtp)))
    finally:
        block.routing = before
    close(fast, own)
    assert np.abs(run(model.mtp, model, model.mtp.make_cache(), 2, 0) - own).max() > 1e-2


@pytest.mark.parametrize("family", OTHERS)
def test_heads_of_other_families_stay(tmp_path: Path, family: str) -> None:
    head = load(make_checkpoint(tmp_path / "model", family, mtp="separate"), mtp=True)[0].mtp
    assert for_drafts(head) is head


def test_what_is_not_dense_float32_or_not_in_memory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "model")
    head = streamed(folder, 4, mtp=True).mtp
    assert for_drafts(head) is head
    head = load(folder, mtp=True)[0].mtp
    assert for_drafts(head) is not head
    head.norm.weight = head.norm.weight.astype(mx.bfloat16)
    assert for_drafts(head) is head
    head = load(folder, mtp=True)[0].mtp
    head.fc = nn.Linear(*reversed(head.fc.weight.shape))  # with a bias
    assert for_drafts(head) is head
    head = load(folder, mtp=True)[0].mtp
    nn.quantize(head, 32, 8, class_predicate=lambda path, _: path == "fc")
    assert for_drafts(head) is head
    head = load(folder, mtp=True)[0].mtp
    monkeypatch.setattr(numpy_head, "on_cpu", lambda: False)
    assert for_drafts(head) is head


def test_its_caches_are_those_of_the_head(model: nn.Module) -> None:
    assert [type(layer) for layer in for_drafts(model.mtp).make_cache()] == [KVCache] * len(model.mtp.layers)
