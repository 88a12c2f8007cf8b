"""Bootstrap intervals over documents: tokens of a document depend on each other, documents do not."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
_LEVELS = (0.025, 0.975)

Floats = NDArray[np.float64]


def resampled(sums: NDArray[Any], seed: int = 0) -> Floats:
    """Totals ``[RESAMPLES, n]`` of as many documents, drawn with replacement from ``sums [D, n]``.

    The same number of documents gives the same draws, so that two results of the same documents can be compared pair
    by pair.
    """
    documents = len(sums)
    drawn = np.random.default_rng(seed).integers(0, documents, (RESAMPLES, documents))
    counts = np.stack([np.bincount(row, minlength=documents) for row in drawn])
    return np.asarray(counts @ np.asarray(sums, np.float64))


def interval(values: Floats) -> tuple[float, float]:
    """In which 95 % of ``values`` lie."""
    low, high = np.quantile(values, _LEVELS)
    return float(low), float(high)
