"""The matrices of a layer as the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..models.moe import Gate


@dataclass(frozen=True)
class Norm:
    """weight ``[D]`` and eps of an RMS normalisation."""

    weight: mx.array
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> Norm:
        return cls(module.weight, float(module.eps))


BITS = (2, 4, 8)  # that divide a word
_SPAN = 4  # columns of a dense matrix that a lane takes at a time


@dataclass(frozen=True)
class Matrix:
    """Weights ``[..., N, D]``, dense (bits 0, scales and biases are the weights again) or affine: words
    ``[..., N, D * bits / 32]``, scales and biases ``[..., N, D / group]``.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int = 0
    group: int = 1

    @property
    def arrays(self) -> list[mx.array]:
        return [self.weight, self.scales, self.biases]

    @property
    def stacked(self) -> Matrix:
        """A stack of it alone."""
        return Matrix(self.weight[None], self.scales[None], self.biases[None], self.bits, self.group)

    def columns(self, start: int, stop: int) -> Matrix:
        """A copy of the columns from ``start`` to ``stop``, both multiples of the span and of the group."""
        weight = mx.contiguous(self.weight[..., start // self.span : stop // self.span])
        if not self.bits:
            return Matrix(weight, weight, weight)
        groups = slice(start // self.group, stop // self.group)
        scales, biases = (mx.contiguous(array[..., groups]) for array in (self.scales, self.biases))
        return Matrix(weight, scales, biases, self.bits, self.group)

    @property
    def outputs(self) -> int:
        return self.weight.shape[-2]

    @property
    def span(self) -> int:
        """Columns in a word."""
        return 32 // self.bits if self.bits else 1

    @property
    def kind(self) -> tuple[object, ...]:
        """What code for it depends on. MLX binds small arrays in another way."""
        small = mx.metal.is_available() and any(array.size < 8 for array in self.arrays)
        return self.bits, self.group, small, *(array.dtype for array in self.arrays)

    def constants(self, prefix: str = "", suffix: str = "") -> tuple[tuple[str, int], ...]:
        return (f"{prefix}BITS{suffix}", self.bits), (f"{prefix}GROUP{suffix}", self.group)


def matrix_of(module: nn.Module) -> Matrix | None:
    """That of a linear module, or of a switched one; None where the kernels do not take it."""
    if "bias" in module:
        return None
    if isinstance(module, nn.QuantizedLinear | QuantizedSwitchLinear | nn.QuantizedEmbedding):
        if module.mode != "affine" or module.bits not in BITS or module.weight.shape[-1] < 1:
            return None
        return Matrix(module.weight, module.scales, module.biases, module.bits, module.group_size)
    if isinstance(module, nn.Linear | SwitchLinear | Gate) and module.weight.shape[-1] % _SPAN == 0:
        return Matrix(module.weight, module.weight, module.weight)
    return None


def matrices_of(*modules: nn.Module) -> list[Matrix] | None:
    """Those of several modules; None where one has none."""
    found = [matrix for module in modules if (matrix := matrix_of(module)) is not None]
    return found if len(found) == len(modules) else None


def names(*matrices: str) -> tuple[str, ...]:
    """Of the arrays of ``matrices``, as inputs of kernels."""
    return tuple(f"{matrix}_{kind}" for matrix in matrices for kind in "wsb")
