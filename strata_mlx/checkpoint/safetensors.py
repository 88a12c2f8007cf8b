"""Safetensors headers without the data: where every tensor lies in its file, checked against the file's size.

Format: 8 bytes little-endian header length N, N bytes of JSON ``{name: {dtype, shape, data_offsets}}``, then the data
without gaps. MLX reads the data itself; the byte ranges serve validation, ``inspect`` and streaming.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError, Fault

# Bytes per element, for every dtype that MLX can read.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8,
}  # fmt: skip
FLOATING = frozenset({"F16", "BF16", "F32"})
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: bytes ``[start, stop)`` of ``file``, row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to ``nbytes`` of its bytes from ``offset`` on. Raises Fault where the file cannot be read."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.start + offset)
                return file.read(min(nbytes, self.nbytes - offset))
        except OSError as error:
            raise Fault(f"{self.file}: cannot be read: {error.strerror or error}") from error


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one safetensors file by name.

    Raises CheckpointError, naming file and tensor, when the file is truncated or the header is larger than the file, is
    not JSON, names an unknown dtype, or when byte ranges overlap, leave gaps or disagree with the shapes.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: not a complete safetensors file: the header should take {length} bytes, the file has "
                    f"{size}; "
                    "download or convert it again"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the header is not valid JSON ({error}); download or convert it again"
        ) from error
    metadata = header.pop("__metadata__", None)  # MLX writes null when it has none
    if isinstance(metadata, dict) and not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: the header's __metadata__ does not map names to texts")
    data_start = _LENGTH_BYTES + length
    entries = [_entry(path, name, fields, data_start) for name, fields in header.items()]
    _check_layout(path, entries, data_start, size)
    return {entry.name: entry for entry in entries}


def write_header(file: BinaryIO, tensors: Iterable[tuple[str, str, tuple[int, ...]]], align: int = 8) -> None:
    """Write the header of tensors, given by name, dtype and shape, whose data are to follow in this order.

    The data begin at a multiple of ``align`` bytes; spaces at the header's end, which the format allows, see to it.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    stop = 0
    for name, dtype, shape in tensors:
        start, stop = stop, stop + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % align)
    file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
    file.write(text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(result := dict(pairs)) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} occurs twice")
    return result


def _entry(path: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        numbers = (*shape, start, stop)
        if not isinstance(dtype, str) or not all(map(_is_length, numbers)) or start > stop:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{path}: the header's entry for {name!r} is malformed: {reprlib.repr(fields)}") from None
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype!r}, which MLX cannot read (known: {known})")
    entry = TensorEntry(name, dtype, shape, path, data_start + start, data_start + stop)
    if entry.nbytes != entry.size * DTYPE_BYTES[dtype]:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(shape)} and dtype {dtype} needs {entry.size * DTYPE_BYTES[dtype]} "
            f"bytes, but its range holds {entry.nbytes}"
        )
    return entry


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_layout(path: Path, entries: list[TensorEntry], data_start: int, size: int) -> None:
    end, previous = data_start, "the header"
    for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
        if entry.start < end:
            raise CheckpointError(f"{path}: the byte range of tensor {entry.name!r} overlaps that of {previous!r}")
        if entry.start > end:
            raise CheckpointError(f"{path}: {entry.start - end} stray bytes before tensor {entry.name!r}")
        end, previous = entry.stop, entry.name
    if end > size:
        raise CheckpointError(
            f"{path}: truncated: tensor {previous!r} ends at byte {end}, the file has {size}; download or convert it "
            f"again"
        )
    if end < size:
        raise CheckpointError(f"{path}: {size - end} stray bytes after the last tensor, {previous!r}")
