"""The product of a few rows with a large matrix on the CPU, where MLX's takes a time that is linear in the rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..device import evaluate

_ALONE = 1 << 18  # multiplications up to which OpenBLAS, which NumPy brings, does not wait for other threads
_STEP = 16  # columns that it takes at a time


def multiply(x: mx.array, weight: mx.array) -> mx.array:
    """``x @ weight``, for float32 ``[..., D]`` and ``[D, V]``, up to rounding, by NumPy. Evaluates both.

    It goes by blocks of columns so small that each is a single thread's: where the cores have other work to do, waiting
    for a second thread takes longer than the whole product.
    """
    evaluate((x, weight), "computing hidden states")
    rows: NDArray[Any] = np.array(x, copy=False).reshape(-1, x.shape[-1])
    columns: NDArray[Any] = np.array(weight, copy=False)
    width = max(_STEP, _ALONE // rows.size // _STEP * _STEP)
    whole = columns.shape[1] // width * width
    result = np.empty((len(rows), columns.shape[1]), np.float32)
    blocks = columns[:, :whole].reshape(len(columns), whole // width, width).swapaxes(0, 1)  # [N, D, width]
    result[:, :whole] = np.matmul(rows, blocks).swapaxes(0, 1).reshape(len(rows), whole)
    result[:, whole:] = rows @ columns[:, whole:]
    return mx.array(result).reshape(*x.shape[:-1], -1)
