"""What a layer computes with the experts that a window has selected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

# With the slots' module, rows [..., D] and the slots uint32 [..., K] that they use.
Compute = Callable[[nn.Module, mx.array, mx.array], mx.array]


def apply(experts: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
    """mlx-lm's own call: ``[..., K, D]`` of rows ``[..., D]`` and indices ``[..., K]``."""
    result: mx.array = experts(x, indices)
    return result


@dataclass(frozen=True)
class Work:
    """mix: what follows on the experts' outputs ``[B, T, K, D]``, by rank. meanwhile: what it needs besides, and the
    device is to compute while the host waits for the ids and for reads. pairs: what is computed with the experts, pair
    by pair: their outputs; by default mlx-lm's call. whole: what gives the bits of ``mix`` on ``pairs`` in less time,
    where all experts of a window are in memory.
    """

    mix: Callable[[mx.array], mx.array]
    meanwhile: Sequence[mx.array] = ()
    pairs: Compute = apply
    whole: Compute | None = None

    def result(self, experts: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        """The layer's, of a window whose experts are all in memory. Itself a Compute."""
        return self.whole(experts, x, indices) if self.whole else self.mix(self.pairs(experts, x, indices))
