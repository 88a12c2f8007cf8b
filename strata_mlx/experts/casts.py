"""Casts of floating parameters with NumPy, to the bit as MLX's ``astype`` does them.

bfloat16, which NumPy does not have, is given and taken as uint16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# By name in a safetensors header: how it is stored, for NumPy, and MLX's type.
STORED: dict[str, tuple[type[np.generic], mx.Dtype]] = {
    "U8": (np.uint8, mx.uint8),
    "U32": (np.uint32, mx.uint32),
    "BF16": (np.uint16, mx.bfloat16),
    "F16": (np.float16, mx.float16),
    "F32": (np.float32, mx.float32),
}
_NUMPY = {dtype: kind for kind, dtype in STORED.values()}


class Caster:
    """Memory in which fields of one stored type are cast together: one call casts all, so that small ones cost little.

    stored: by field, where to read it to. cast: by field, where it is after run().
    """

    def __init__(self, stored: mx.Dtype, wanted: mx.Dtype, shapes: Sequence[tuple[int, ...]]):
        sizes = [int(np.prod(shape)) for shape in shapes]
        self._source = np.empty(sum(sizes), _NUMPY[stored])
        if (stored, wanted) == (mx.bfloat16, mx.float32):
            # The upper halves of float32 are bfloat16, so that a copy between zeros is the cast.
            halves = np.zeros((len(self._source), 2), np.uint16)
            self._cast, self._target, made = np.copyto, halves[:, 1], halves.view(np.float32)[:, 0]
        else:
            self._cast = _CASTS.get((stored, wanted), np.copyto)
            made = self._target = np.empty(len(self._source), _NUMPY[wanted])
        ends = np.cumsum(sizes)[:-1]
        self.stored = [part.reshape(shape) for part, shape in zip(np.split(self._source, ends), shapes, strict=True)]
        self.cast = [part.reshape(shape) for part, shape in zip(np.split(made, ends), shapes, strict=True)]

    def run(self) -> None:
        self._cast(self._target, self._source)


def _to_bfloat16(into: NDArray[Any], source: NDArray[Any]) -> None:
    """Round to the nearest, to even on a tie; NaN becomes the one that MLX writes."""
    wide = source.astype(np.float32, copy=False)
    bits = wide.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    into[...] = np.where(np.isnan(wide), np.uint32(0x7FC0), rounded)


def _to_float16(into: NDArray[Any], source: NDArray[Any]) -> None:
    with np.errstate(over="ignore"):
        np.copyto(into, source, casting="same_kind")


def _bfloat16_to_float16(into: NDArray[Any], source: NDArray[Any]) -> None:
    _to_float16(into, (source.astype(np.uint32) << np.uint32(16)).view(np.float32))


_CASTS: dict[tuple[mx.Dtype, mx.Dtype], Callable[[NDArray[Any], NDArray[Any]], None]] = {
    (mx.float32, mx.bfloat16): _to_bfloat16,
    (mx.float16, mx.bfloat16): _to_bfloat16,
    (mx.float32, mx.float16): _to_float16,
    (mx.bfloat16, mx.float16): _bfloat16_to_float16,
}
