"""What mixes tokens in a layer, with the norm before it and what is passed by, for windows of a few rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache

from ..kernels import Build
from ..models.attention import Attention
from ..models.gated_delta import GatedDeltaNet, LoggingCache
from .attention import Heads, attend, attention_heads
from .matrix import Matrix, Norm, matrices_of
from .project import project
from .recurrence import Recurrence, gated_delta

PIECE = 8  # tokens that the recurrence reads at a time from a prompt
Arrays = list[mx.array]
INPUTS = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # in the kernel's order
Compute = Callable[..., Arrays]


def compiled(function: Compute, build: Build | None) -> Compute:
    """``function`` as a graph that is built once for each shape; other builders than MLX's run kernels at once."""
    return function if build else mx.compile(function)


def _unpadded(cache: Any) -> bool:
    return type(cache) in (ArraysCache, LoggingCache) and cache.lengths is None and cache.left_padding is None


@lru_cache(256)
def _position(offset: int) -> mx.array:
    return mx.array([offset], mx.int32)


@dataclass(frozen=True)
class RecurrentLog:
    """What a window's recurrence took: ``projected [1, T, N]``, the tail and the state before it."""

    layer: Recurrence
    build: Build | None
    projected: mx.array
    tail: mx.array
    state: mx.array

    def after(self, tokens: int) -> Arrays:
        """The layer's cache as ``tokens`` plain steps leave it."""
        return gated_delta(self.projected[:, :tokens], self.tail, self.state, self.layer, build=self.build)[1:]


class RecurrentMixer:
    """Gated DeltaNet with norm and residual."""

    def __init__(self, layer: nn.Module, inputs: list[Matrix], output: Matrix, sizes: Recurrence, build: Build | None):
        self._norm = Norm.of(layer.input_layernorm)
        self._inputs, self._output, self._sizes = inputs, output, sizes
        self._build = build

    @classmethod
    def of(cls, layer: nn.Module, build: Build | None) -> RecurrentMixer | None:
        block = layer.linear_attn
        if not isinstance(block, GatedDeltaNet):
            return None
        inputs, output = matrices_of(*(block[name] for name in INPUTS if name in block)), matrices_of(block.out_proj)
        sizes = Recurrence.of(block)
        if inputs is None or output is None or sizes is None:
            return None
        return cls(layer, inputs, output[0], sizes, build)

    def takes(self, x: mx.array, mask: Any, cache: Any) -> bool:
        """A window of a few rows over a cache that holds something, and no padding."""
        known = _unpadded(cache) and cache[1] is not None and cache[1].dtype == mx.float32
        return mask is None and known and cache[0].dtype == x.dtype

    def reads(self, x: mx.array, mask: Any, cache: Any) -> bool:
        """The many rows of a prompt, where mlx-lm has no kernel for them: it has one on Metal."""
        if not (self._build or mx.cuda.is_available()) or isinstance(cache, LoggingCache):
            return False
        begins = mask is None and _unpadded(cache) and cache[1] is None
        return begins or self.takes(x, mask, cache)

    def read(self, x: mx.array, block: nn.Module, cache: Any) -> mx.array:
        """The layer on many rows ``[B, T, D]``: projections by mlx-lm's operations, the recurrence in pieces, for which
        mlx-lm would launch several kernels a token.
        """
        normed = mx.fast.rms_norm(x, self._norm.weight, self._norm.eps)
        projected = mx.concatenate([block[name](normed) for name in INPUTS if name in block], axis=-1)
        sizes = self._sizes
        tail, state = cache[0], cache[1]
        if state is None:
            tail = mx.zeros((x.shape[0], sizes.conv.shape[1] - 1, sizes.conv.shape[0]), x.dtype)
            state = mx.zeros((x.shape[0], sizes.v_heads, sizes.v_dim, sizes.k_dim))
        outputs = []
        for start in range(0, x.shape[1], PIECE):
            piece = projected[:, start : start + PIECE]
            y, tail, state = gated_delta(piece, tail, state, sizes, build=self._build)
            outputs.append(y)
        cache[0], cache[1] = tail, state
        cache.advance(x.shape[1])
        return x + block.out_proj(mx.concatenate(outputs, axis=1))

    def compute(self, x: mx.array, tail: mx.array, state: mx.array) -> Arrays:
        build = self._build
        projected = project(x, self._inputs, norm=self._norm, build=build)
        y, new_tail, new_state = gated_delta(projected, tail, state, self._sizes, build=build)
        return [project(y, [self._output], residual=x, build=build), new_tail, new_state, projected]

    def __call__(self, run: Compute, x: mx.array, cache: Any) -> Arrays:
        tail, state = cache[0], cache[1]
        result, cache[0], cache[1], projected, *rest = run(x, tail, state)
        cache.advance(x.shape[1])
        if isinstance(cache, LoggingCache):
            cache.log = RecurrentLog(self._sizes, self._build, projected, tail, state)
        return [result, *rest]


class AttentionMixer:
    """Gated attention of one sequence, with norm and residual: what comes before the cache, and what comes after."""

    def __init__(self, layer: nn.Module, inputs: list[Matrix], output: Matrix, heads: Heads, build: Build | None):
        self._norm = Norm.of(layer.input_layernorm)
        self._inputs, self._output, self._heads = inputs, output, heads
        self._build = build
        self._prepare = compiled(self._before, build)

    @classmethod
    def of(cls, layer: nn.Module, build: Build | None) -> AttentionMixer | None:
        block = layer.self_attn
        if not isinstance(block, Attention):
            return None
        inputs, output = matrices_of(block.q_proj, block.k_proj, block.v_proj), matrices_of(block.o_proj)
        heads = Heads.of(block)
        if inputs is None or output is None or heads is None:
            return None
        return cls(layer, inputs, output[0], heads, build)

    def takes(self, x: mx.array, mask: Any, cache: Any) -> bool:
        """A window of a few rows of one sequence, over a cache that only grows."""
        plain = type(cache) is KVCache and (cache.keys is None or cache.keys.dtype == x.dtype)
        return x.shape[0] == 1 and plain and (mask is None or isinstance(mask, str))

    def _before(self, x: mx.array, offset: mx.array) -> Arrays:
        build = self._build
        projected = project(x, self._inputs, norm=self._norm, build=build)
        return [*attention_heads(projected, offset, self._heads, build=build), projected]

    def compute(
        self, x: mx.array, queries: mx.array, keys: mx.array, values: mx.array, offset: mx.array, projected: mx.array
    ) -> Arrays:
        y = attend(queries, keys, values, offset, projected, self._heads, build=self._build)
        return [project(y, [self._output], residual=x, build=self._build)]

    def __call__(self, run: Compute, x: mx.array, cache: Any) -> Arrays:
        offset = _position(cache.offset)
        queries, keys, values, projected = self._prepare(x, offset)
        cache.update_and_fetch(keys, values)
        return run(x, queries, cache.keys, cache.values, offset, projected)
