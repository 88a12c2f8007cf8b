"""The gated attention layer: mlx-lm's own results, and windows that are read a row at a time."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from strata_mlx.models import attention
from strata_mlx.models.attention import LARGEST_WINDOW, Attention, attend_by_row


def layer() -> qwen3_next.Qwen3NextAttention:
    args: dict[str, Any] = dict.fromkeys(qwen3_next.ModelArgs.__dataclass_fields__, 1)
    args |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 1e4}
    args |= {"rms_norm_eps": 1e-6, "partial_rotary_factor": 0.25, "rope_scaling": None, "attention_bias": False}
    args |= {"max_position_embeddings": 512, "num_experts_per_tok": 1, "full_attention_interval": 2}
    mx.random.seed(3)
    return qwen3_next.Qwen3NextAttention(qwen3_next.ModelArgs(**args))


@pytest.mark.parametrize("make", [None, KVCache, lambda: QuantizedKVCache(64, 8)])
@pytest.mark.parametrize("split", [False, True])
def test_it_computes_what_mlx_lm_computes(make: Any, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "plans_each_length", lambda: split)
    theirs = layer()
    ours = Attention(theirs)
    caches = [make() if make else None for _ in range(2)]
    for rows, mask in ((12, "causal"), (1, None), (4, "causal"), (LARGEST_WINDOW + 1, "causal")):
        x = mx.random.normal((1, rows, 32))
        a, b = (module(x, mask, cache) for module, cache in zip((theirs, ours), caches, strict=True))
        np.testing.assert_allclose(np.array(a), np.array(b), atol=2e-6 if split else 0)


def test_a_window_read_by_row_has_the_bits_of_single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "plans_each_length", lambda: True)
    module = Attention(layer())
    k, v = mx.random.normal((1, 2, 40, 64)), mx.random.normal((1, 2, 40, 64))
    q = mx.random.normal((1, 4, 5, 64))
    window = attend_by_row(q, k, v, module.scale)
    for t in range(5):
        step = mx.fast.scaled_dot_product_attention(
            q[:, :, t : t + 1], k[:, :, : 36 + t], v[:, :, : 36 + t], scale=module.scale
        )
        assert mx.array_equal(window[:, :, t : t + 1], step)


@given(rows=st.integers(1, 8), before=st.integers(0, 30), seed=st.integers(0, 2**32 - 1))
def test_attention_by_row_is_causal_attention(rows: int, before: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, 4, rows, 16))
    k, v = rng.normal(size=(2, 2, 2, before + rows, 16))
    found = attend_by_row(mx.array(q, mx.float32), mx.array(k, mx.float32), mx.array(v, mx.float32), 0.25)
    scores = q @ np.repeat(k, 2, axis=1).swapaxes(-1, -2) * 0.25  # [B, H, T, L]
    scores += np.where(np.tri(rows, before + rows, before) > 0, 0, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ np.repeat(v, 2, axis=1)
    np.testing.assert_allclose(np.array(found), expected, atol=1e-5)
