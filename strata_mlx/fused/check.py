"""Whether fused layers compute what the layers' own operations do: asked on devices where nobody has tried yet."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import StrataError

ROWS = (12, 1, 2, 3, 5, 9)  # a prompt, which goes the layer's own way, and what has kernels of its own
TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}  # of the largest value


def agree(
    own: Sequence[nn.Module],
    fused: Sequence[nn.Module],
    caches: Sequence[Sequence[Any]],
    others: Sequence[tuple[mx.array, mx.array]] = (),
) -> bool:
    """Whether layers give the same ``fused`` as on their ``own``, up to rounding. Warns where they do not, or where a
    kernel does not run. caches: two for each layer, empty. others: what else should be the same, lazily.
    """
    try:
        wrong = [f"layer {i}" for i, each in enumerate(zip(own, fused, strict=True)) if not _same(*each, *caches[i])]
        wrong += ["the embedding or the output head" for expected, got in others if not _near(expected, got)]
    except StrataError:
        raise
    except Exception as error:  # whatever a backend raises for a kernel that it does not take
        reason = f"they do not run: {str(error).strip() or type(error).__name__}"
    else:
        if not wrong:
            return True
        reason = f"{wrong[0]} gives other values"
    warnings.warn(
        f"the kernels for windows of a few rows are not used on this GPU ({reason}). The text is right without them, "
        "but slower; please report this",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def _same(own: nn.Module, fused: nn.Module, own_cache: Any, fused_cache: Any) -> bool:
    dtype = own.input_layernorm.weight.dtype
    for rows in ROWS:
        noise = mx.random.normal((1, rows, own.input_layernorm.weight.size), key=mx.random.key(rows)).astype(dtype)
        mask = None if rows == 1 or "linear_attn" in own else "causal"
        expected, got = own(noise, mask, own_cache), fused(noise, mask, fused_cache)
        if not _near(expected, got):
            return False
    return True


def _near(expected: mx.array, got: mx.array) -> bool:
    tolerance = TOLERANCE[expected.dtype] * mx.maximum(mx.abs(expected).max(), 1)
    return bool((mx.abs(got - expected) <= tolerance).all().item())
