"""The Gated DeltaNet layer of the Qwen3-Next families, with a log from which a window can be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

_PROJECTIONS = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
_CHILDREN = (*_PROJECTIONS, "conv1d", "dt_bias", "A_log", "norm")
_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "key_dim", "value_dim", "conv_dim")


@dataclass(frozen=True)
class RecurrenceLog:
    """What one layer computed for a window of T tokens before and beside its recurrence.

    conv_input: ``[B, K-1+T, C]``, the convolution's tail before the window and the window's inputs. q, k
    ``[B, T, Hk, Dk]``, v ``[B, T, Hv, Dv]``, a, b ``[B, T, Hv]``: what gated_delta_update() took, with the layer's
    A_log and dt_bias ``[Hv]`` and the state before the window, ``[B, Hv, Dv, Dk]`` float32 or None.
    """

    conv_input: mx.array
    q: mx.array
    k: mx.array
    v: mx.array
    a: mx.array
    b: mx.array
    A_log: mx.array
    dt_bias: mx.array
    state: mx.array | None

    def after(self, tokens: int) -> list[mx.array]:
        """The layer's cache, convolution tail and recurrent state, as ``tokens`` plain steps (1 to T) leave it."""
        q, k, v, a, b = (x[:, :tokens] for x in (self.q, self.k, self.v, self.a, self.b))
        _, state = gated_delta_update(q, k, v, a, b, self.A_log, self.dt_bias, self.state)
        tail = self.conv_input.shape[1] - self.q.shape[1]
        return [mx.contiguous(self.conv_input[:, tokens : tokens + tail]), state]


class Log(Protocol):
    """What a window leaves behind, so that a part of it can be kept."""

    def after(self, tokens: int) -> list[mx.array]:
        """The layer's cache, convolution tail and recurrent state, as ``tokens`` plain steps (1 to T) leave it."""


class LoggingCache(ArraysCache):
    """The cache of one recurrent layer for one window: it starts where ``before`` stands, and leaves that as it is."""

    def __init__(self, before: ArraysCache):
        super().__init__(0)
        self.cache = list(before.cache)
        self.log: Log | None = None


class GatedDeltaNet(nn.Module):
    """Takes over an mlx-lm Gated DeltaNet layer, parameters and their names included. Its cache holds the
    convolution's tail ``[B, K-1, C]`` and the recurrent state; a LoggingCache gets a RecurrenceLog as well.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        for name in _CHILDREN:
            if name in layer:
                self[name] = layer[name]
        for name in _SIZES:
            setattr(self, name, getattr(layer, name))
        self.tail: int = layer.conv_kernel_size - 1

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: ArraysCache | None = None) -> mx.array:
        qkv, z, b, a = self._project(x)
        if mask is not None:
            qkv = mx.where(mask[..., None], qkv, 0)
        tail, state = (None, None) if cache is None else (cache[0], cache[1])
        if tail is None:
            tail = mx.zeros((x.shape[0], self.tail, self.conv_dim), dtype=x.dtype)
        conv_input = mx.concatenate([tail, qkv], axis=1)
        q, k, v = self._convolve(conv_input)
        y, after = gated_delta_update(
            q, k, v, a, b, self.A_log, self.dt_bias, state, mask, use_kernel=not self.training
        )
        if cache is not None:
            cache[0], cache[1] = self._new_tail(conv_input, cache), after
            cache.advance(x.shape[1])
            if isinstance(cache, LoggingCache):
                cache.log = RecurrenceLog(conv_input, q, k, v, a, b, self.A_log, self.dt_bias, state)
        return self.out_proj(self.norm(y, z).reshape(*x.shape[:2], -1))

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """The convolution's input ``[B, T, C]``, the output gate z ``[B, T, Hv, Dv]``, and b and a ``[B, T, Hv]``."""
        if "in_proj_qkv" in self:  # Qwen3.5
            z = self.in_proj_z(x).reshape(*x.shape[:2], self.num_v_heads, self.head_v_dim)
            return self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x)
        reorder = Qwen3NextGatedDeltaNet.fix_query_key_value_ordering
        q, k, v, z, b, a = reorder(self, self.in_proj_qkvz(x), self.in_proj_ba(x))
        return mx.concatenate([t.reshape(*x.shape[:2], -1) for t in (q, k, v)], axis=-1), z, b, a

    def _convolve(self, conv_input: mx.array) -> list[mx.array]:
        """q and k, normalised, ``[B, T, Hk, Dk]``, and v ``[B, T, Hv, Dv]``."""
        parts = mx.split(nn.silu(self.conv1d(conv_input)), [self.key_dim, 2 * self.key_dim], axis=-1)
        heads = (self.num_k_heads, self.num_k_heads, self.num_v_heads)
        q, k, v = (part.reshape(*part.shape[:2], count, -1) for part, count in zip(parts, heads, strict=True))
        return [*normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6), v]

    def _new_tail(self, conv_input: mx.array, cache: ArraysCache) -> mx.array:
        """The last K-1 inputs, of each sequence where their lengths differ."""
        if cache.lengths is None:
            return mx.contiguous(conv_input[:, -self.tail :])
        ends = mx.clip(cache.lengths, 0, conv_input.shape[1] - self.tail)
        return mx.take_along_axis(conv_input, (ends[:, None] + mx.arange(self.tail))[..., None], axis=1)


def take_over_recurrence(layers: Sequence[nn.Module]) -> None:
    """Put a GatedDeltaNet in the place of mlx-lm's in each of ``layers`` that has one."""
    for layer in layers:
        if layer.is_linear:
            layer.linear_attn = GatedDeltaNet(layer.linear_attn)
