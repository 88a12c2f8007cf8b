"""From tokens to rows, and from logits to tokens, in a launch each."""

from __future__ import annotations

from math import prod

import mlx.core as mx

from ..kernels import SIMD, Build, KernelSpec, Launch
from .matrix import Matrix

_EMBED = KernelSpec("embed", ("tokens", "weight", "scales", "biases"), (("y", None),))
_LIKELIEST = KernelSpec("likeliest", ("logits",), (("token", mx.uint32), ("probability", mx.float32)))
_SIMDGROUPS = 16


def embed(tokens: mx.array, matrix: Matrix, *, build: Build | None = None) -> mx.array:
    """Rows ``[..., D]`` of an affine embedding ``[V, D]`` for ``tokens`` ``[...]``, integers below V."""
    width, dtype = matrix.weight.shape[-1] * matrix.span, matrix.scales.dtype
    threads = SIMD * -(-matrix.weight.shape[-1] // SIMD)
    threads = min(threads, 256)
    launch = Launch(
        (*matrix.constants(), ("Y", dtype)),
        (tokens.size * threads, 1, 1),
        (threads, 1, 1),
        ((*tokens.shape, width),),
        dtype,
    )
    (y,) = _EMBED.run([tokens, *matrix.arrays], launch, build)
    return y


def likeliest(logits: mx.array, *, build: Build | None = None) -> tuple[mx.array, mx.array]:
    """The place of the largest of each row of ``logits [..., V]``, uint32 ``[...]``, and its probability, float32. Of
    equal ones, the first; a row with NaN has no probability.
    """
    lead = logits.shape[:-1]
    rows = prod(lead)
    threads = SIMD * _SIMDGROUPS
    launch = Launch((("SIMDGROUPS", _SIMDGROUPS),), (rows * threads, 1, 1), (threads, 1, 1), (lead, lead))
    token, probability = _LIKELIEST.run([logits.reshape(rows, -1) if len(lead) != 1 else logits], launch, build)
    return token, probability
