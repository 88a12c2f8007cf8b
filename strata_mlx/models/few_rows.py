"""The product of a few rows with a large matrix on the CPU, where MLX's takes a time that is linear in the rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from ..device import evaluate, on_cpu

_ALONE = 1 << 18  # multiplications up to which OpenBLAS, which NumPy brings, does not wait for other threads
_STEP = 16  # columns that it takes at a time
_TOGETHER = 4  # rows from which it is faster with all than with one after another


def takes(linear: Any) -> bool:
    """Whether multiply() is the faster way to what a module computes."""
    return on_cpu() and type(linear) is nn.Linear and "bias" not in linear and linear.weight.dtype == mx.float32


def multiply(x: mx.array, weight: mx.array) -> mx.array:
    """``x @ weight.T``, for float32 ``[..., D]`` and ``[V, D]``, up to rounding, by NumPy. Evaluates both."""
    evaluate((x, weight), "computing hidden states")
    rows: NDArray[Any] = np.array(x, copy=False).reshape(-1, x.shape[-1])
    result = product(rows, np.array(weight, copy=False).T)
    return mx.array(result.reshape(*x.shape[:-1], -1))


def product(rows: NDArray[Any], columns: NDArray[Any]) -> NDArray[np.float32]:
    """``rows @ columns``, for float32 ``[T, D]`` and ``[D, V]``.

    It goes by blocks of columns so small that each is a single thread's: where the cores have other work to do, waiting
    for a second thread takes longer than the whole product.
    """
    (count, inputs), outputs = rows.shape, columns.shape[1]
    each = rows[:, None] if count < _TOGETHER else rows[None]  # [T, 1, D] or [1, T, D]
    width = max(_STEP, _ALONE // (inputs * each.shape[1]) // _STEP * _STEP)
    whole = outputs // width * width
    if whole <= width:
        return np.matmul(each, columns).reshape(count, outputs)
    result = np.empty((count, outputs), np.float32)
    blocks = columns[:, :whole].reshape(inputs, whole // width, width).swapaxes(0, 1)  # [N, D, width]
    products = np.matmul(each, blocks[:, None]).reshape(-1, count, width)
    result[:, :whole] = products.swapaxes(0, 1).reshape(count, whole)
    result[:, whole:] = np.matmul(each, columns[:, whole:]).reshape(count, -1)
    return result
