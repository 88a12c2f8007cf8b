"""Gated attention of a few tokens between its projections, over a cache that may have room for more."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..kernels import SIMD, Build, KernelSpec, Launch

CHUNK = 256  # keys that a threadgroup looks at, as many as a cache grows by
SIMDGROUPS = 16
KEYS = 4  # that a simdgroup reads at the same time

_HEADS = KernelSpec(
    "attention_heads",
    ("projected", "q_norm", "k_norm", "frequencies", "offset"),
    (("queries", None), ("keys", None), ("values", None)),
)
_ATTEND = KernelSpec(
    "attend",
    ("queries", "keys", "values", "offset"),
    (("partial", mx.float32), ("shares", mx.float32)),
)
_JOIN = KernelSpec("attend_join", ("partial", "shares", "projected"), (("y", None),))


@dataclass(frozen=True)
class Heads:
    """A layer's norms ``[D]`` of q and k, its rotations ``[R]`` per position in radians, and its sizes."""

    q_norm: mx.array
    k_norm: mx.array
    frequencies: mx.array
    eps: float
    scale: float
    heads: int
    groups: int
    dim: int

    @classmethod
    def of(cls, layer: nn.Module) -> Heads | None:
        """Those of a gated attention layer; None where the kernels do not take it."""
        rope = layer.rope
        if layer.head_dim % SIMD or type(rope) is not nn.RoPE or rope.traditional:
            return None
        exponents = np.arange(0, rope.dims, 2) / rope.dims
        return cls(
            layer.q_norm.weight,
            layer.k_norm.weight,
            mx.array((rope.scale * rope.base**-exponents).astype(np.float32)),
            layer.q_norm.eps,
            layer.scale,
            layer.num_attention_heads,
            layer.num_key_value_heads,
            layer.head_dim,
        )


def attention_heads(
    projected: mx.array, offset: mx.array, layer: Heads, *, build: Build | None = None
) -> list[mx.array]:
    """Queries ``[1, H, T, D]``, keys and values ``[1, G, T, D]`` of tokens ``projected [1, T, N]``: q and output gate
    by head, k, v. offset: int32 ``[1]``, the first token's position.
    """
    tokens = projected.shape[1]
    constants = (
        ("H", layer.heads),
        ("G", layer.groups),
        ("D", layer.dim),
        ("ROTATED", layer.frequencies.size),
        ("EPS", float(layer.eps)),
        ("X", projected.dtype),
    )
    keys = (1, layer.groups, tokens, layer.dim)
    launch = Launch(
        constants,
        (SIMD * (layer.heads + 2 * layer.groups), tokens, 1),
        (SIMD, 1, 1),
        ((1, layer.heads, tokens, layer.dim), keys, keys),
        projected.dtype,
    )
    inputs = [projected, layer.q_norm, layer.k_norm, layer.frequencies, offset]
    return _HEADS.run(inputs, launch, build)


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    offset: mx.array,
    projected: mx.array,
    layer: Heads,
    *,
    build: Build | None = None,
) -> mx.array:
    """Causal attention of tokens at ``offset`` and after, behind the output gate in ``projected``: ``[1, T, H * D]``.

    keys, values: ``[1, G, L, D]``, those of the tokens included; what lies behind them is not looked at.
    """
    tokens, chunks = queries.shape[2], -(-keys.shape[2] // CHUNK)
    sizes = (("H", layer.heads), ("D", layer.dim))
    threads = SIMD * SIMDGROUPS
    launch = Launch(
        (
            *sizes,
            ("G", layer.groups),
            ("CHUNK", CHUNK),
            ("KEYS", KEYS),
            ("SCALE", float(layer.scale)),
            ("SIMDGROUPS", SIMDGROUPS),
        ),
        (threads * layer.heads, tokens, chunks),
        (threads, 1, 1),
        ((tokens, layer.heads, chunks, layer.dim), (tokens, layer.heads, chunks, 2)),
    )
    partial, shares = _ATTEND.run([queries, keys, values, offset], launch, build)
    threads = layer.dim
    launch = Launch(
        (*sizes, ("X", queries.dtype)),
        (threads * layer.heads, tokens, 1),
        (threads, 1, 1),
        ((1, tokens, layer.heads * layer.dim),),
        queries.dtype,
    )
    (y,) = _JOIN.run([partial, shares, projected], launch, build)
    return y
