"""After any number of kept tokens, every cache is the one that plain decoding leaves."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from strata_mlx import InputError
from strata_mlx.models.gated_delta import RecurrenceLog
from strata_mlx.models.trunk import Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.speculation.window import Window, check_rollback
from tests.errors import refuses
from tests.speculation.caches import difference

PROMPT = mx.array([[72, 3, 200, 3, 15, 99, 0, 31]])
TOKENS = mx.array([[5, 17, 200, 3, 4, 9, 1, 30]])
TOLERANCE = 1e-5


def plain(model: nn.Module, kept: int, prompt: mx.array = PROMPT) -> list[Any]:
    """The cache after the prompt and ``kept`` tokens, one by one."""
    cache = make_cache(model)
    model(prompt, cache=cache)
    for i in range(kept):
        model(TOKENS[:, i : i + 1], cache=cache)
    return cache


def window(model: nn.Module, rows: int, prompt: mx.array = PROMPT) -> tuple[Window, list[Any]]:
    cache = make_cache(model)
    model(prompt, cache=cache)
    result = Window(cache, rows)
    mx.eval(Trunk(model)(TOKENS[:, :rows], result.layers))
    return result, cache


def test_the_trunk_computes_the_models_own_logits(model: nn.Module) -> None:
    trunk = Trunk(model)
    logits = trunk.logits(trunk(PROMPT, make_cache(model)).after)
    np.testing.assert_array_equal(logits, model(PROMPT, cache=make_cache(model)))


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_every_cache_is_as_after_plain_steps(model: nn.Module, rows: int) -> None:
    for kept in range(rows + 1):
        taken, cache = window(model, rows)
        taken.commit(kept)
        assert difference(cache, plain(model, kept)) <= TOLERANCE


def test_a_window_over_the_growth_of_a_cache_is_taken_back(model: nn.Module) -> None:
    prompt = mx.array([[7] * 254])
    for kept in (0, 1, 2, 3, 8):
        taken, cache = window(model, 8, prompt)
        taken.commit(kept)
        assert difference(cache, plain(model, kept, prompt)) <= TOLERANCE


def test_less_may_be_kept_later(model: nn.Module) -> None:
    taken, cache = window(model, 8)
    for kept in (8, 5, 5, 2, 0):
        taken.commit(kept)
        assert difference(cache, plain(model, kept)) <= TOLERANCE


def test_decoding_goes_on_from_a_committed_window(model: nn.Module) -> None:
    taken, cache = window(model, 8)
    taken.commit(3)
    after = Window(cache, 3)
    model(TOKENS[:, 3:6], cache=after.layers)
    after.commit(2)
    assert difference(cache, plain(model, 5)) <= TOLERANCE


def test_the_state_of_a_recurrent_layer_does_not_change_before_the_commit(model: nn.Module) -> None:
    _, cache = window(model, 8)
    recurrent = [layer for layer in cache if isinstance(layer, ArraysCache)]
    expected = [layer for layer in plain(model, 0) if isinstance(layer, ArraysCache)]
    assert difference(recurrent, expected) == 0


def test_a_window_on_empty_caches_can_be_taken_back(model: nn.Module) -> None:
    cache = make_cache(model)
    taken = Window(cache, 8)
    model(TOKENS, cache=taken.layers)
    taken.commit(2)
    expected = make_cache(model)
    model(TOKENS[:, :1], cache=expected)
    model(TOKENS[:, 1:2], cache=expected)
    assert difference(cache, expected) <= TOLERANCE
    taken.commit(0)
    assert all(layer.empty() for layer in cache if isinstance(layer, ArraysCache))


def test_a_quantised_cache_is_as_after_plain_steps(model: nn.Module) -> None:
    def quantised(kept: int) -> list[Any]:
        return [c.to_quantized(32, 8) if isinstance(c, KVCache) else c for c in plain(model, kept)]

    for kept in range(8):
        cache = quantised(0)
        taken = Window(cache, 8)
        model(TOKENS, cache=taken.layers)
        taken.commit(kept)
        assert [c.offset for c in cache if isinstance(c, QuantizedKVCache)] == [8 + kept]
        following = TOKENS[:, kept : kept + 1]
        np.testing.assert_allclose(
            model(following, cache=cache), model(following, cache=quantised(kept)), atol=TOLERANCE
        )


KINDS = [RotatingKVCache(16, 4), ChunkedKVCache(16), CacheList(KVCache()), ArraysCache(2, [1])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_cannot_be_rolled_back_is_refused(kind: Any) -> None:
    with refuses(InputError, type(kind).__name__, "mtp=False"):
        check_rollback([KVCache(), kind])


def _one_more(log: RecurrenceLog, tokens: int) -> list[mx.array]:
    return ORIGINAL(log, tokens + 1)


def _old_tail(log: RecurrenceLog, tokens: int) -> list[mx.array]:
    return [log.conv_input[:, :3], ORIGINAL(log, tokens)[1]]


def _latest_tail(log: RecurrenceLog, tokens: int) -> list[mx.array]:
    return [log.conv_input[:, -3:], ORIGINAL(log, tokens)[1]]


def _old_state(log: RecurrenceLog, tokens: int) -> list[mx.array]:
    assert log.state is not None
    return [ORIGINAL(log, tokens)[0], log.state]


ORIGINAL = RecurrenceLog.after


@pytest.mark.parametrize("mutant", [_one_more, _old_tail, _latest_tail, _old_state])
def test_a_wrong_rollback_would_be_seen(model: nn.Module, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrenceLog, "after", mutant)
    taken, cache = window(model, 8)
    taken.commit(4)
    assert difference(cache, plain(model, 4)) > 100 * TOLERANCE
