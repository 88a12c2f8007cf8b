"""Caches as arrays, to compare them."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, RotatingKVCache


def contents(cache: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """Convolution tails and states of recurrent layers, keys and values of attention layers that are in use: of a
    sliding window those that the next token sees, in the order of the tokens.
    """
    arrays: list[mx.array] = []
    for layer in cache:
        if isinstance(layer, RotatingKVCache):
            ordered = (layer._temporal_order(array) for array in (layer.keys, layer.values))
            arrays += [array[..., -(layer.max_size - 1) :, :] for array in ordered]
        else:
            arrays += layer.cache if isinstance(layer, ArraysCache) else layer.keys_and_values()
    return [np.array(array) for array in arrays]


def difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    """The largest difference of two caches; infinite where they hold different numbers of tokens."""
    largest = 0.0
    for a, b in zip(contents(one), contents(other), strict=True):
        largest = max(largest, float(np.abs(a - b).max()) if a.shape == b.shape else np.inf)
    return largest
