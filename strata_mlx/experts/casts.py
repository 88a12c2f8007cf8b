"""Casts of floating parameters with NumPy, to the bit as MLX's ``astype`` does them.

bfloat16, which NumPy does not have, is given and taken as uint16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .files import memory_at

# By name in a safetensors header: how it is stored, for NumPy, and MLX's type.
STORED: dict[str, tuple[type[np.generic], mx.Dtype]] = {
    "U8": (np.uint8, mx.uint8),
    "U32": (np.uint32, mx.uint32),
    "BF16": (np.uint16, mx.bfloat16),
    "F16": (np.float16, mx.float16),
    "F32": (np.float32, mx.float32),
}
HOST_TYPES = {dtype: kind for kind, dtype in STORED.values()}
_SHIFT = np.array(16, np.uint32)
_TOGETHER = 1 << 14  # elements: below, calls cost more than the second copy


class Caster:
    """Memory to read fields of one stored type into, and their cast. stored: by field, that memory.

    places: where the fields lie on disk modulo PAGE, and large ones in that memory too.
    """

    def __init__(
        self, stored: mx.Dtype, wanted: mx.Dtype, shapes: Sequence[tuple[int, ...]], places: Sequence[int] = ()
    ):
        sizes, kind = [math.prod(shape) for shape in shapes], HOST_TYPES[stored]
        self._cast = _CASTS.get((stored, wanted), np.copyto)
        self._small = sum(sizes) < _TOGETHER
        if not self._small:
            rooms = (memory_at(place, size * stored.size) for size, place in zip(sizes, places, strict=True))
            self.stored = [room.view(kind).reshape(shape) for room, shape in zip(rooms, shapes, strict=True)]
            return
        self._source = np.empty(sum(sizes), kind)
        self.stored = _split(self._source, shapes)
        if (stored, wanted) == (mx.bfloat16, mx.float32):
            # The upper half of a float32 is a bfloat16, so that a copy to between zeros is the cast.
            halves = np.zeros((len(self._source), 2), np.uint16)
            self._cast, self._target = np.copyto, halves[:, 1]
            self._made = _split(halves.view(np.float32)[:, 0], shapes)
        else:
            self._target = np.empty(len(self._source), HOST_TYPES[wanted])
            self._made = _split(self._target, shapes)

    def deliver(self, into: Sequence[NDArray[Any]]) -> None:
        """Cast what was read into ``stored`` and write it to ``into``."""
        if self._small:
            self._cast(self._target, self._source)
            for array, made in zip(into, self._made, strict=True):
                array[...] = made
        else:
            for array, source in zip(into, self.stored, strict=True):
                self._cast(array, source)


def _split(flat: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends), shapes, strict=True)]


def _to_float32(into: NDArray[Any], source: NDArray[Any]) -> None:
    np.left_shift(source, _SHIFT, into.view(np.uint32))  # _SHIFT's type counts: 32 bits


def _to_bfloat16(into: NDArray[Any], source: NDArray[Any]) -> None:
    """Round to the nearest, to even on a tie; NaN becomes the one that MLX writes."""
    wide = source.astype(np.float32, copy=False)
    bits = wide.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> _SHIFT) & np.uint32(1))) >> _SHIFT
    into[...] = np.where(np.isnan(wide), np.uint32(0x7FC0), rounded)


def _to_float16(into: NDArray[Any], source: NDArray[Any]) -> None:
    with np.errstate(over="ignore"):
        np.copyto(into, source, casting="same_kind")


def _bfloat16_to_float16(into: NDArray[Any], source: NDArray[Any]) -> None:
    wide = np.empty(source.shape, np.float32)
    _to_float32(wide, source)
    _to_float16(into, wide)


_CASTS: dict[tuple[mx.Dtype, mx.Dtype], Callable[[NDArray[Any], NDArray[Any]], None]] = {
    (mx.bfloat16, mx.float32): _to_float32,
    (mx.float32, mx.bfloat16): _to_bfloat16,
    (mx.float16, mx.bfloat16): _to_bfloat16,
    (mx.float32, mx.float16): _to_float16,
    (mx.bfloat16, mx.float16): _bfloat16_to_float16,
}
