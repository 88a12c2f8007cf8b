"""Quantised weights that are kept as float32, where the CPU multiplies those faster and gives the same bits.

On x86-64 MLX multiplies a quantised row element by element. The matrix product of its wheel takes the same sums in the
same order, and reads weights that are stored input-major twice as fast. It costs four to eight times the memory, so
that only what is small is kept like this, and nothing where memory has a budget.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..device import arrange, evaluate, on_cpu

LIMIT = 256 << 20  # bytes that a model's dequantised weights may take
_KINDS = {nn.QuantizedLinear: nn.Linear, QuantizedSwitchLinear: SwitchLinear}  # in the order in which they are taken


def dequantise(model: nn.Module) -> None:
    """Put float32 weights in the place of those quantised ones of a loaded ``model`` that the CPU multiplies slower.

    Raises Fault where memory gives out.
    """
    for path, module in _chosen(model):
        weight = mx.dequantize(
            module.weight, module.scales, module.biases, group_size=module.group_size, bits=module.bits
        )
        faster = _KINDS[type(module)](*(1,) * (weight.ndim), bias=False)
        faster.weight = arrange(faster, weight)
        evaluate(faster.weight, f"dequantising {path}")
        model.update_modules(tree_unflatten([(path, faster)]))


def dequantised_bytes(model: nn.Module) -> dict[str, int]:
    """What dequantise() makes of each parameter of ``model``, loaded or planned, that it would take the place of, by
    name: the bytes of the float32 weight for a weight, and 0 for what goes with it.
    """
    sizes: dict[str, int] = {}
    for path, module in _chosen(model):
        sizes |= {f"{path}.scales": 0, f"{path}.biases": 0, f"{path}.weight": _bytes(module)}
    return sizes


def _chosen(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """By kind, as long as all of that kind have room."""
    left = LIMIT if on_cpu() else 0
    for kind in _KINDS:
        found = [(path, module) for path, module in model.named_modules() if type(module) is kind and _same(module)]
        left -= sum(_bytes(module) for _, module in found)
        if left < 0:
            return
        yield from found


def _bytes(module: nn.Module) -> int:
    return 4 * module.scales.size * module.group_size


def _same(module: nn.Module) -> bool:
    """Whether ``module`` computes the same with a float32 weight. (A bias would be added in another order.)"""
    affine = module.mode == "affine" and module.scales.dtype == mx.float32 and "bias" not in module
    return affine and _same_bits(module.group_size, module.bits)


@functools.cache
def _same_bits(group_size: int, bits: int) -> bool:
    """Whether this machine's products with dequantised weights have the bits of those with quantised ones."""
    random = np.random.default_rng(0)
    x = mx.array(random.standard_normal((5, 1, 4 * group_size)), mx.float32)
    packed, scales, biases = mx.quantize(
        mx.array(random.standard_normal((5, 48, 4 * group_size)), mx.float32), group_size=group_size, bits=bits
    )
    weights = mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)
    precision: Any = {"transpose": True, "group_size": group_size, "bits": bits}
    experts, rows = arrange(SwitchLinear(1, 1, 1), weights), mx.arange(5)
    products = mx.gather_mm(x, experts.swapaxes(1, 2), rhs_indices=rows)
    same = [mx.array_equal(products, mx.gather_qmm(x, packed, scales, biases, rhs_indices=rows, **precision))]
    weight = arrange(nn.Linear(1, 1), weights[0])
    for some in (x[:1, 0], x[:, 0]):
        quantised = mx.quantized_matmul(some, packed[0], scales[0], biases[0], **precision)
        same.append(mx.array_equal(some @ weight.T, quantised))
    return all(bool(answer.item()) for answer in same)
