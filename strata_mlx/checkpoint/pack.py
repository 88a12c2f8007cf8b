"""The packed layout: the tensors of one expert next to each other, at the start of a page.

A packed file is an ordinary safetensors file with one tensor per expert and parameter. Its experts come first, each as
one record that starts at a multiple of PAGE bytes, so that one aligned read fetches it; tensors without meaning fill
the gaps. All tensors have MLX's form (norms are not shifted), which is why the experts are not named as in Hugging
Face's layout: ``MOE.switch_mlp.N.gate_proj.weight``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import BinaryIO

import mlx.core as mx
import numpy as np

from .safetensors import write_header

PAGE = 16384  # bytes: Apple silicon's, and a multiple of everybody else's
PADDING = "padding."  # what the names of tensors without meaning begin with
_SWITCH = ".switch_mlp."
_DTYPES = {mx.uint8: "U8", mx.uint32: "U32", mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32"}

_Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype and shape, as in a header


def expert_tensor(parameter: str, expert: int) -> str:
    """The packed name of one expert's part of a parameter such as ``MOE.switch_mlp.gate_proj.weight``."""
    moe, _, rest = parameter.partition(_SWITCH)
    return f"{moe}{_SWITCH}{expert}.{rest}"


def padding(expert_bytes: int) -> int:
    """Bytes from the end of an expert's record to the next page."""
    return -expert_bytes % PAGE


def moe_of(parameter: str) -> str | None:
    """The path of the MoE module whose experts ``parameter`` belongs to, if it does."""
    moe, switch, _ = parameter.partition(_SWITCH)
    return moe if switch else None


def write_packed(file: BinaryIO, parameters: Mapping[str, mx.array]) -> None:
    """Write a packed file with ``parameters``, computed, of which those of experts hold ``[E, ...]``."""
    groups: dict[str | None, dict[str, mx.array]] = {}
    for name, array in parameters.items():
        groups.setdefault(moe_of(name), {})[name] = array
    rest = groups.pop(None, {})
    # Wide elements first, so that all are aligned.
    records = {moe: dict(sorted(group.items(), key=lambda item: -item[1].itemsize)) for moe, group in groups.items()}
    tensors = [tensor for moe, record in records.items() for tensor in _packed(moe, record)]
    write_header(file, [*tensors, *((name, _DTYPES[array.dtype], array.shape) for name, array in rest.items())], PAGE)
    for record in records.values():
        views = [_bytes(array) for array in record.values()]
        gap = bytes(padding(sum(view[0].nbytes for view in views)))
        for expert in range(len(views[0])):
            for view in views:
                file.write(view[expert].data)
            file.write(gap)
    for array in rest.values():
        file.write(_bytes(array).data)


def _packed(moe: str | None, record: dict[str, mx.array]) -> Iterator[_Tensor]:
    gap = padding(sum(array[0].nbytes for array in record.values()))
    for expert in range(len(next(iter(record.values())))):
        for name, array in record.items():
            yield expert_tensor(name, expert), _DTYPES[array.dtype], array.shape[1:]
        if gap:
            yield f"{PADDING}{moe}.{expert}", "U8", (gap,)


def _bytes(array: mx.array) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """The array's own memory."""
    return np.ascontiguousarray(np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False))
