"""A Gated DeltaNet layer between its projections, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..kernels import SIMD, Build, KernelSpec, Launch
from .project import MAX_ROWS, row_class

_SPEC = KernelSpec(
    "gated_delta",
    ("projected", "tail", "state", "conv", "A_log", "dt_bias", "norm"),
    (("y", None), ("new_tail", None), ("new_state", mx.float32)),
)
MAX_SIMDGROUPS = 16
THREADGROUP_BYTES = 30 << 10  # of memory, a little less than Metal has


@dataclass(frozen=True)
class Recurrence:
    """A layer's parameters: conv ``[C, K, 1]``, A_log and dt_bias ``[Hv]``, norm ``[Dv]``, and its sizes.

    interleaved: the projections lie by key head, as Qwen3-Next's, and not one after the other.
    """

    conv: mx.array
    A_log: mx.array
    dt_bias: mx.array
    norm: mx.array
    eps: float
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    interleaved: bool

    @classmethod
    def of(cls, layer: nn.Module) -> Recurrence | None:
        """Those of a GatedDeltaNet; None where the kernel does not take it."""
        held = 4 * row_class(MAX_ROWS) * (2 * layer.head_k_dim + layer.head_v_dim)
        if held > THREADGROUP_BYTES or "bias" in layer.conv1d:
            return None
        if layer.head_k_dim % SIMD or layer.head_v_dim % MAX_SIMDGROUPS:
            return None
        return cls(
            layer.conv1d.weight,
            layer.A_log,
            layer.dt_bias,
            layer.norm.weight,
            layer.norm.eps,
            layer.num_k_heads,
            layer.num_v_heads,
            layer.head_k_dim,
            layer.head_v_dim,
            "in_proj_qkvz" in layer,
        )


def gated_delta(
    projected: mx.array, tail: mx.array, state: mx.array, layer: Recurrence, *, build: Build | None = None
) -> list[mx.array]:
    """Take tokens ``projected [B, T, N]`` (T up to MAX_ROWS), q, k, v, z, b and a, through the recurrence, from the
    convolution's ``tail [B, K-1, C]`` and ``state`` float32 ``[B, Hv, Dv, Dk]``.

    Returns the gated output ``[B, T, Hv * Dv]``, the new tail and the new state.
    """
    sequences, tokens = projected.shape[:2]
    taps = layer.conv.shape[1]
    constants = (
        ("ROWS", row_class(tokens)),
        ("SIMDGROUPS", MAX_SIMDGROUPS),
        ("HK", layer.k_heads),
        ("HV", layer.v_heads),
        ("DK", layer.k_dim),
        ("DV", layer.v_dim),
        ("TAPS", taps),
        ("INTERLEAVED", layer.interleaved),
        ("EPS", float(layer.eps)),
        ("X", projected.dtype),
    )
    threads = SIMD * MAX_SIMDGROUPS
    launch = Launch(
        constants,
        (threads * layer.v_heads, sequences, 1),
        (threads, 1, 1),
        ((sequences, tokens, layer.v_heads * layer.v_dim), tail.shape, state.shape),
        projected.dtype,
    )
    inputs = [projected, tail, state, layer.conv, layer.A_log, layer.dt_bias, layer.norm]
    return _SPEC.run(inputs, launch, build)
