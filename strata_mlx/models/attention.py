"""The gated attention layer of the Qwen3-Next families, with windows that cost a GPU no plan for each key length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from ..device import plans_each_length

_CHILDREN = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rope")
_SIZES = ("num_key_value_heads", "num_attention_heads", "head_dim", "scale")
LARGEST_WINDOW = 8  # rows; longer chunks of a prompt, which are few, are worth a plan


class Attention(nn.Module):
    """Takes over an mlx-lm gated attention layer, parameters and their names included."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        for name in _CHILDREN:
            self[name] = layer[name]
        for name in _SIZES:
            setattr(self, name, getattr(layer, name))

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None) -> mx.array:
        B, T, _ = x.shape
        q, gate = mx.split(self.q_proj(x).reshape(B, T, self.num_attention_heads, -1), 2, axis=-1)
        q = self.q_norm(q).transpose(0, 2, 1, 3)
        k = self.k_norm(self.k_proj(x).reshape(B, T, self.num_key_value_heads, -1)).transpose(0, 2, 1, 3)
        v = self.v_proj(x).reshape(B, T, self.num_key_value_heads, -1).transpose(0, 2, 1, 3)
        offset = 0 if cache is None else cache.offset
        q, k = self.rope(q, offset=offset), self.rope(k, offset=offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        split = 1 < T <= LARGEST_WINDOW and isinstance(mask, str) and not hasattr(cache, "bits") and plans_each_length()
        if split:
            y = attend_by_row(q, k, v, self.scale)
        else:
            y = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(y.transpose(0, 2, 1, 3).reshape(B, T, -1) * mx.sigmoid(gate.reshape(B, T, -1)))


def attend_by_row(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Causal attention of the last T tokens, each by the call that a step of plain decoding makes.

    q: ``[B, H, T, D]``; k, v: ``[B, G, L, D]``, of which row t sees the first L - T + 1 + t. Returns ``[B, H, T, D]``.
    """
    first = k.shape[2] - q.shape[2] + 1
    rows = [
        mx.fast.scaled_dot_product_attention(q[:, :, t : t + 1], k[:, :, :end], v[:, :, :end], scale=scale)
        for t, end in enumerate(range(first, k.shape[2] + 1))
    ]
    return mx.concatenate(rows, axis=2)


def take_over_attention(layers: Sequence[nn.Module]) -> None:
    """Put an Attention in the place of mlx-lm's in each of ``layers`` that has one."""
    for layer in layers:
        if not layer.is_linear:
            layer.self_attn = Attention(layer.self_attn)
