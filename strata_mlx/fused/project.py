"""Several linear layers over the same few rows in one launch, with the normalisation before and the addition after."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from ..kernels import SIMD, Build, Constants, KernelSpec, Launch
from .matrix import Matrix, Norm

MAX_ROWS = 9  # the last committed token and as many drafts as there may be
SIMDGROUPS = 8
MAX_MATRICES = 4


@cache
def _spec(matrices: int, norm: bool, residual: bool) -> tuple[KernelSpec, Constants]:
    """The kernel with the inputs that it needs, and names for the others."""
    inputs = ["x", *(["norm"] if norm else []), *(["residual"] if residual else [])]
    given_names = [f"{kind}{i}" for i in range(matrices) for kind in "wsb"]
    aliases = [(name, "x") for name in ("norm", "residual") if name not in inputs]
    aliases += [(f"{kind}{i}", f"{kind}0") for i in range(matrices, MAX_MATRICES) for kind in ("w", "s", "b")]
    aliases += [(f"w{i}_shape", "w0_shape") for i in range(matrices, MAX_MATRICES)]
    return KernelSpec("project", (*inputs, *given_names), (("y", None),)), tuple(aliases)


def row_class(rows: int) -> int:
    """The number of rows that a kernel is compiled for: a power of two."""
    return 1 << (rows - 1).bit_length()


def outputs_at_a_time(outputs: int) -> int:
    """Of a simdgroup: few where there are few, so that all of the device has work."""
    return 4 if outputs >= 8192 else 2 if outputs >= 2048 else 1


def project(
    x: mx.array,
    matrices: Sequence[Matrix],
    *,
    norm: Norm | None = None,
    residual: mx.array | None = None,
    dtype: mx.Dtype | None = None,
    build: Build | None = None,
) -> mx.array:
    """``[B, T, N]``: the outputs of all ``matrices`` side by side, for a few rows ``x [B, T, D]``.

    norm: an RMS normalisation of x. residual: ``[B, T, N]``, added. dtype: of the result; by default that of x.
    """
    outputs = sum(matrix.outputs for matrix in matrices)
    at_a_time = outputs_at_a_time(outputs)
    filled = [*matrices, *[matrices[0]] * (MAX_MATRICES - len(matrices))]
    spec, aliases = _spec(len(matrices), norm is not None, residual is not None)
    constants: Constants = (
        ("ROWS", row_class(x.shape[0] * x.shape[1])),
        ("OUT", at_a_time),
        ("SIMDGROUPS", SIMDGROUPS),
        ("MATRICES", len(matrices)),
        ("ALIKE", len({matrix.kind for matrix in matrices}) == 1),
        ("NORM", norm is not None),
        ("RESIDUAL", residual is not None),
        ("EPS", norm.eps if norm else 0.0),
        ("Y", dtype or x.dtype),
        *(constant for i, matrix in enumerate(filled) for constant in matrix.constants(suffix=str(i))),
        *aliases,
    )
    blocks = sum(-(-matrix.outputs // at_a_time) for matrix in matrices)
    threads = SIMD * SIMDGROUPS
    launch = Launch(
        constants,
        (-(-blocks // SIMDGROUPS) * threads, 1, 1),
        (threads, 1, 1),
        ((*x.shape[:-1], outputs),),
        dtype or x.dtype,
    )
    inputs = [x, *([norm.weight] if norm else []), *([] if residual is None else [residual])]
    (y,) = spec.run([*inputs, *(array for matrix in matrices for array in matrix.arrays)], launch, build)
    return y
