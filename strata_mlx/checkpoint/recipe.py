"""How a parameter of the model is made from tensors of a checkpoint. Loading, converting and validating all use
this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import mlx.core as mx


@dataclass(frozen=True)
class Recipe:
    """The source tensors of one parameter and what happens to them, in the order of the fields.

    sources: names in the checkpoint; several are stacked along a new first axis (one tensor per expert).
    half: 0 or 1 takes that half of the second-to-last axis (fused ``gate_up_proj``).
    heads: split the first axis into so many parts along a new first axis (projections of all heads in one matrix).
    rows: take ``rows[0]`` up to ``rows[1]`` of the second-to-last axis.
    swap: exchange the last two axes (PyTorch's convolution layout ``[C, 1, K]`` to MLX's ``[C, K, 1]``).
    shift: add one (RMSNorm weights that are stored around zero).
    """

    sources: tuple[str, ...]
    half: int | None = None
    heads: int = 1
    rows: tuple[int, int] | None = None
    swap: bool = False
    shift: bool = False

    def shape(self, sources: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The parameter's shape, given those of the sources; raises ValueError where the recipe cannot be applied."""
        if len(set(sources)) != 1:
            raise ValueError("the experts' shapes differ")
        shape = list(sources[0]) if len(sources) == 1 else [len(sources), *sources[0]]
        if self.half is not None:
            if len(shape) < 2 or shape[-2] % 2:
                raise ValueError("it cannot be split into two halves")
            shape[-2] //= 2
        if self.heads > 1 or self.rows:
            if len(shape) < 2 or shape[0] % self.heads:
                raise ValueError(f"it cannot be split into {self.heads} heads")
            shape = [self.heads, shape[0] // self.heads, *shape[1:]]
        if self.rows:
            if self.rows[1] > shape[-2]:
                raise ValueError(f"it has {shape[-2]} rows for each head, fewer than {self.rows[1]}")
            shape[-2] = self.rows[1] - self.rows[0]
        if self.swap:
            if len(shape) < 2:
                raise ValueError("it has fewer than two axes")
            shape[-2:] = shape[:-3:-1]
        return tuple(shape)

    def share(self, sources: Sequence[tuple[int, ...]]) -> Fraction:
        """How much of the sources' bytes becomes the parameter."""
        return Fraction(math.prod(self.shape(sources)), max(sum(map(math.prod, sources)), 1))

    def build(self, read: Callable[[str], mx.array], dtype: mx.Dtype | None = None) -> mx.array:
        """The parameter as a lazy array. ``read`` returns a source by name; ``dtype`` is what floating sources are
        cast to.
        """
        arrays = [read(name) for name in self.sources]
        array = arrays[0] if len(arrays) == 1 else mx.stack(arrays)
        if dtype is not None and mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(dtype)  # before the shift: 1 + w loses digits of w in bfloat16
        if self.half is not None:
            rows = array.shape[-2] // 2
            array = mx.contiguous(array[..., self.half * rows : (self.half + 1) * rows, :])
        if self.heads > 1 or self.rows:
            array = mx.unflatten(array, 0, (self.heads, -1))
        if self.rows:
            array = mx.contiguous(array[..., self.rows[0] : self.rows[1], :])
        if self.swap:
            array = mx.contiguous(array.swapaxes(-1, -2))
        return array + 1 if self.shift else array
