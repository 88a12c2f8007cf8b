"""What the device in use computes well: the compute type and the memory layout of dense weights.

Both were chosen by measurement (benchmarks/generate_vs_mlx_lm.py prints the table): MLX's CPU backend multiplies
quantised weights several times faster with float32 activations than with bfloat16 ones, cannot multiply unquantised
bfloat16 experts at all, and its matrix product reads a weight faster when it is stored input-major.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from .errors import Fault, InputError

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def on_cpu() -> bool:
    return bool(mx.default_device() == mx.cpu)


def compute_dtype(name: str = "auto") -> mx.Dtype | None:
    """The type that floating parameters are cast to, or None to keep the checkpoint's.

    ``auto``: float32 on the CPU, the checkpoint's own on Metal and CUDA. Raises InputError for an unknown name.
    """
    if name == "auto":
        return mx.float32 if on_cpu() else None
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is unknown; choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def compute_dtype_of(model: nn.Module) -> str:
    """The name of the type that a loaded model computes in: that of its last normalisation."""
    dtype = getattr(model, "language_model", model).model.norm.weight.dtype
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def arrange(module: nn.Module, parameter: mx.array) -> mx.array:
    """A parameter of ``module``, with the same values and shape, in the memory layout that the device multiplies
    faster.
    """
    if arranges(module) and parameter.ndim == module.weight.ndim:
        return mx.contiguous(parameter.swapaxes(-1, -2)).swapaxes(-1, -2)
    return parameter


def arranges(module: nn.Module) -> bool:
    """Whether arrange() changes the layout of the weight of ``module``.

    A layer with a bias keeps its own: its product is another operation, which rounds differently in the other layout.
    """
    return on_cpu() and isinstance(module, nn.Linear | SwitchLinear) and "bias" not in module


def plans_each_length() -> bool:
    """Whether attention over several rows builds a plan for each number of keys: cuDNN's does, which takes 48 ms for
    two layers (H200), while it reads a row at a time as fast.
    """
    return not on_cpu() and mx.cuda.is_available()


def evaluate(arrays: Any, doing: str, *, wait: bool = True) -> None:
    """Compute ``arrays``, or have them computed while the caller goes on if ``wait`` is false.

    Raises Fault, saying what was being done, when memory or a file gives out.
    """
    try:
        (mx.eval if wait else mx.async_eval)(arrays)
    except (RuntimeError, MemoryError) as error:
        raise Fault(f"{doing}: {error}") from error


def numbers(array: mx.array, doing: str) -> list[int]:
    """The values of an array of integers, which are computed first. Raises what evaluate() does."""
    try:
        values: Any = array.tolist()
    except (RuntimeError, MemoryError) as error:
        raise Fault(f"{doing}: {error}") from error
    while values and isinstance(values[0], list):
        values = [value for row in values for value in row]
    return values


def integer(array: mx.array) -> int:
    """The value of a scalar array of integers."""
    value = array.item()
    assert isinstance(value, int)
    return value
