"""Quantised weights that are kept as float32, where the CPU multiplies those faster and gives the same bits.

On x86-64 MLX multiplies a quantised row element by element. The matrix product of its wheel takes the same sums in the
same order, and reads weights that are stored input-major twice as fast. It costs four to eight times the memory, so
that only what is small is kept like this, and where memory has a budget, only what that has room for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..device import arrange, evaluate, on_cpu

LIMIT = 256 << 20  # bytes that a model's dequantised weights may take
_PART = 1 << 18  # weights that are dequantised at a time
_TEMPORARY = 4  # arrays of such a part that MLX makes of it
KINDS = {nn.QuantizedLinear: nn.Linear, QuantizedSwitchLinear: SwitchLinear}  # in the order in which they are taken


class Growth(NamedTuple):
    """What a float32 weight takes on top of the quantised one in whose place it is put, in bytes. temporary: besides,
    until it is there.
    """

    more: int
    temporary: int


def dequantise(model: nn.Module, room: int | None = None, free: int = 0) -> None:
    """Put float32 weights in the place of those quantised ones of a loaded ``model`` that the CPU multiplies slower.

    room: bytes that they may take on top; None is enough for all of them. free: bytes beside that for a while.
    Raises Fault where memory gives out.
    """
    taken = 0
    for path, module in _chosen(model):
        growth = _growth(module)
        if room is not None and room_for([Growth(taken, 0), growth], free) > room:
            continue
        faster = KINDS[type(module)](*(1,) * module.weight.ndim, bias=False)
        faster.weight = _float32(module, f"dequantising {path}")
        model.update_modules(tree_unflatten([(path, faster)]))
        taken += growth.more


def growths(model: nn.Module) -> tuple[list[Growth], list[Growth]]:
    """Of what dequantise() can take in ``model``, loaded or planned: of linear layers, and of experts."""
    dense, experts = ([_growth(module) for _, module in _chosen(model) if type(module) is kind] for kind in KINDS)
    return dense, experts


def room_for(grown: Sequence[Growth], free: int) -> int:
    """The least ``room`` with which dequantise() takes all of ``grown``, in its order."""
    taken, most = 0, 0
    for each in grown:
        taken += each.more
        most = max(most, taken + max(0, each.temporary - free))
    return most


def dequantised_bytes(model: nn.Module) -> dict[str, int]:
    """What dequantise() makes of each parameter of ``model``, loaded or planned, that it would take the place of, by
    name: the bytes of the float32 weight for a weight, and 0 for what goes with it.
    """
    sizes: dict[str, int] = {}
    for path, module in _chosen(model):
        sizes |= {f"{path}.scales": 0, f"{path}.biases": 0, f"{path}.weight": _bytes(module)}
    return sizes


def _chosen(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """By kind, as long as all of that kind are small enough, and the largest first: when it is made, most is free."""
    left = LIMIT if on_cpu() else 0
    for kind in KINDS:
        found = [(path, module) for path, module in model.named_modules() if type(module) is kind and _same(module)]
        left -= sum(_bytes(module) for _, module in found)
        if left < 0:
            return
        found.sort(key=lambda each: _bytes(each[1]))
        while found:  # what has been yielded may go
            yield found.pop()


def _growth(module: nn.Module) -> Growth:
    quantised = module.weight.nbytes + module.scales.nbytes + module.biases.nbytes
    return Growth(_bytes(module) - quantised, quantised + _TEMPORARY * 4 * max(_PART, _each(module)))


def _each(module: nn.Module) -> int:
    """How many weights there are for one index of the first axis."""
    return math.prod(module.scales.shape[1:]) * module.group_size


def _float32(module: nn.Module, doing: str) -> mx.array:
    """The weight of ``module``, in the layout of device.arrange(). It is made part by part, since MLX makes several
    arrays of the size on its way.
    """
    *first, outputs, groups = module.scales.shape
    stored = mx.zeros((*first, groups * module.group_size, outputs))
    evaluate(stored, doing)
    weight, step = stored.swapaxes(-1, -2), max(1, _PART // _each(module))
    shown = np.array(stored, copy=False).swapaxes(-1, -2)
    for start in range(0, len(shown), step):
        codes, scales, biases = (x[start : start + step] for x in (module.weight, module.scales, module.biases))
        part = mx.dequantize(codes, scales, biases, group_size=module.group_size, bits=module.bits)
        evaluate(part, doing)
        shown[start : start + step] = part
    evaluate(weight, doing)
    return weight


def _bytes(module: nn.Module) -> int:
    return 4 * module.scales.size * module.group_size


def _same(module: nn.Module) -> bool:
    """Whether ``module`` computes the same with a float32 weight. (A bias would be added in another order.)"""
    affine = module.mode == "affine" and module.scales.dtype == mx.float32 and "bias" not in module
    return affine and _same_bits(module.group_size, module.bits)


@functools.cache
def _same_bits(group_size: int, bits: int) -> bool:
    """Whether this machine's products with dequantised weights have the bits of those with quantised ones."""
    keys = mx.random.split(mx.random.key(0))  # NumPy's would take megabytes, which a budget does not have for this
    x = mx.random.normal((5, 1, 4 * group_size), key=keys[0])
    packed, scales, biases = mx.quantize(
        mx.random.normal((5, 48, 4 * group_size), key=keys[1]), group_size=group_size, bits=bits
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
