"""What is kept of earlier prompts: what is found, what goes, and that nothing changes it."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from numpy.typing import NDArray

from strata_mlx import load
from strata_mlx.prefill import make_cache
from strata_mlx.server.prefixes import LEAST_TOKENS, Prefixes, Snapshot, thawed
from tests.tiny import make_checkpoint

TOKENS = np.array([(i * i * 31 + 7 * i) % 256 for i in range(120)], np.int32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    root = tmp_path_factory.mktemp("models")
    families = {"recurrent": "qwen3_next", "attention": "qwen3_moe", "sliding": "mimo_v2_flash"}
    return {name: load(make_checkpoint(root / name, family, "stacked"))[0] for name, family in families.items()}


@pytest.fixture
def recurrent(models: dict[str, nn.Module]) -> nn.Module:
    return models["recurrent"]


def read(model: nn.Module, tokens: NDArray[np.int32], cache: list[Any] | None = None) -> list[Any]:
    """Caches that hold ``tokens``, after what ``cache`` holds."""
    cache = make_cache(model) if cache is None else cache
    model(mx.array(tokens)[None], cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


def contents(cache: list[Any]) -> list[NDArray[Any]]:
    arrays: list[mx.array] = []
    for layer in cache:
        if hasattr(layer, "keys"):
            arrays += [layer.keys[..., : layer.offset, :], layer.values[..., : layer.offset, :]]
        else:
            arrays += layer.cache
    return [np.array(array, copy=True) for array in arrays]


def same(a: list[NDArray[Any]], b: list[NDArray[Any]]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def found(prefixes: Prefixes, tokens: NDArray[np.int32]) -> Snapshot:
    snapshot, _ = prefixes.find(tokens)
    assert snapshot is not None
    return snapshot


@pytest.mark.parametrize("name", ["recurrent", "attention", "sliding"])
def test_a_prompt_goes_on_from_a_snapshot_as_if_it_had_been_read(models: dict[str, nn.Module], name: str) -> None:
    model, prefixes = models[name], Prefixes(10**9)
    prefixes.keep(TOKENS[:50], read(model, TOKENS[:50]))
    snapshot = found(prefixes, TOKENS)
    cache = read(model, TOKENS[50:], thawed(snapshot.cache))
    assert same(contents(cache), contents(read(model, TOKENS[50:], read(model, TOKENS[:50]))))


@pytest.mark.parametrize("name", ["recurrent", "attention"])
def test_nothing_that_goes_on_from_a_snapshot_changes_it(models: dict[str, nn.Module], name: str) -> None:
    model, prefixes = models[name], Prefixes(10**9)
    source = read(model, TOKENS[:50])
    prefixes.keep(TOKENS[:50], source)
    before = contents(found(prefixes, TOKENS).cache)
    read(model, TOKENS[50:], source)
    first, second = (thawed(found(prefixes, TOKENS).cache) for _ in range(2))
    for token in TOKENS[50:54]:
        read(model, np.array([token], np.int32), first)
    read(model, TOKENS[60:90], second)
    batch = [layer.merge([layer, layer]) for layer in thawed(found(prefixes, TOKENS).cache)]
    mx.eval(model(mx.array([[1], [2]]), cache=batch))
    assert same(contents(found(prefixes, TOKENS).cache), before)


def test_the_longest_that_fits_is_found_and_one_token_is_left_to_read(recurrent: nn.Module) -> None:
    prefixes = Prefixes(10**9)
    for size in (20, 40, 60):
        prefixes.keep(TOKENS[:size], read(recurrent, TOKENS[:size]))
    assert len(found(prefixes, TOKENS[:59]).tokens) == 40
    assert len(found(prefixes, TOKENS[:60]).tokens) == 40
    assert len(found(prefixes, TOKENS[:61]).tokens) == 60
    assert prefixes.find(TOKENS[:20])[0] is None
    assert prefixes.find(TOKENS[1:])[0] is None


def test_a_recurrent_state_is_not_taken_back_but_where_prompts_part_is_told(recurrent: nn.Module) -> None:
    prefixes = Prefixes(10**9)
    prefixes.keep(TOKENS[:60], read(recurrent, TOKENS[:60]))
    other = TOKENS.copy()
    other[30] += 1
    assert prefixes.find(other) == (None, 30)


def test_attention_is_taken_back_to_where_prompts_part(models: dict[str, nn.Module]) -> None:
    model, prefixes = models["attention"], Prefixes(10**9)
    prefixes.keep(TOKENS[:60], read(model, TOKENS[:60]))
    other = TOKENS.copy()
    other[30] += 1
    snapshot = found(prefixes, other)
    assert snapshot.tokens.tolist() == TOKENS[:30].tolist()
    assert same(contents(snapshot.cache), contents(read(model, TOKENS[:30])))
    again = found(prefixes, TOKENS)
    assert same(contents(again.cache), contents(read(model, TOKENS[:60])))


def test_what_was_of_use_longest_ago_goes_and_the_budget_holds(recurrent: nn.Module) -> None:
    cache = read(recurrent, TOKENS[:40])
    one = Snapshot(TOKENS[:40], cache).nbytes
    prefixes = Prefixes(0)
    prefixes.keep(TOKENS[:40], cache)
    assert len(prefixes) == prefixes.nbytes == 0
    prefixes = Prefixes(3 * one)  # the caches at hand are padded: three copies fit
    prompts = [np.roll(TOKENS, shift) for shift in range(5)]
    for prompt in prompts[:3]:
        prefixes.keep(prompt[:40], read(recurrent, prompt[:40]))
    assert len(prefixes) == 3
    copies = prefixes.nbytes
    prefixes.budget = copies
    assert found(prefixes, prompts[0])
    prefixes.keep(prompts[3][:40], read(recurrent, prompts[3][:40]))
    assert prefixes.nbytes == copies
    assert prefixes.find(prompts[1])[0] is None
    assert all(found(prefixes, prompts[number]) for number in (0, 2, 3))


def test_bytes_are_those_of_copies_and_not_of_the_batch_that_a_row_was_in(recurrent: nn.Module) -> None:
    cache = read(recurrent, TOKENS[:40])
    batch = [layer.merge([layer] * 8) for layer in cache]
    mx.eval([layer.state for layer in batch])
    prefixes = Prefixes(10**9)
    before = mx.get_active_memory()
    prefixes.keep(TOKENS[:40], [layer.extract(3) for layer in batch])
    del batch
    grown = mx.get_active_memory() - before
    assert grown <= prefixes.nbytes + (1 << 16)


def test_what_is_known_already_and_what_is_short_is_not_copied(recurrent: nn.Module) -> None:
    prefixes = Prefixes(10**9)
    for size in (40, 40, LEAST_TOKENS - 1):
        prefixes.keep(TOKENS[:size], read(recurrent, TOKENS[:size]))
    assert len(prefixes) == 1
    assert prefixes.nbytes == found(prefixes, TOKENS).nbytes
