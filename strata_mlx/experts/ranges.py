"""Where the bytes of every expert lie, from the headers of a checkpoint and the recipes of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ..checkpoint import TensorEntry
from ..checkpoint.safetensors import FLOATING
from ..models.moe import MoEBlock
from ..models.plan import ModelPlan
from .casts import STORED
from .disk import Workload
from .files import PAGE

_LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class Field:
    """One parameter of the experts of one layer.

    name: under ``switch_mlp``, such as ``gate_proj.weight``. shape: of one expert. dtype: in memory, after the cast
    that loading would do. nbytes: of one expert, in memory. place: the address modulo PAGE at which memory for
    consecutive experts is filled from the page cache the fastest.

    The kernel copies fastest where source and target are equal modulo 64, and at a third of that where the target is a
    little ahead modulo PAGE. Large arrays of NumPy and MLX begin 16 or 24 bytes after a page, and often are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    nbytes: int
    place: int = 0


class Piece(NamedTuple):
    """The bytes ``[offset + e * stride, ... + nbytes)`` of a file: those of one field of expert ``e``.

    tensor: that they are of, or its first one of several experts'.
    """

    file: int
    offset: int
    stride: int
    nbytes: int
    tensor: str


class Run(NamedTuple):
    """Pieces of one expert that follow each other in a file, so that one read fetches them.

    pick: takes the arrays of ``fields``, in the order of the file, out of a list of one by field.
    """

    file: int
    offset: int
    stride: int
    nbytes: int
    pick: Callable[[list[Any]], Sequence[Any]]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layer:
    """The experts of one MoE layer.

    stored: by field, the type on disk. places: by field, where its experts lie modulo PAGE, as far as they agree.
    runs: by expert; all share one tuple where each tensor holds all experts.
    """

    path: str
    fields: tuple[Field, ...]
    stored: tuple[mx.Dtype, ...]
    places: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    files: tuple[int, ...]


def find_layers(plan: ModelPlan, cast: mx.Dtype | None) -> tuple[tuple[Layer, ...], dict[Path, int]]:
    """The MoE layers of ``plan``, an MTP head's last, and the files that they number, with the bytes that each must
    have. ``cast`` is what floating parameters are cast to, if it is given.
    """
    blocks = [(block.layer, path) for path, block in plan.model.named_modules() if isinstance(block, MoEBlock)]
    files: dict[Path, int] = {}
    layers = tuple(_layer(plan, path, cast, files) for _, path in sorted(blocks))
    return layers, files


def workload(layers: Sequence[Layer], files: Iterable[Path]) -> Workload:
    """What streaming these layers asks of the disk."""
    reads = [run.nbytes for layer in layers for of_expert in layer.runs for run in of_expert]
    total = sum(reads)
    return Workload(tuple(files), sum(nbytes * nbytes for nbytes in reads) // max(total, 1), total)


def _layer(plan: ModelPlan, path: str, cast: mx.Dtype | None, files: dict[Path, int]) -> Layer:
    prefix = f"{path}.switch_mlp."
    fields, stored, places, pieces = [], [], [], []
    numbers = {file: number for number, file in enumerate(files)}
    for name, recipe in plan.recipes.items():
        if not name.startswith(prefix):
            continue
        entries = [plan.checkpoint.tensors[source] for source in recipe.sources]
        shape = recipe.shape([entry.shape for entry in entries])[1:]
        dtype = STORED[entries[0].dtype][1]
        wanted = cast if cast is not None and entries[0].dtype in FLOATING else dtype
        for entry in entries:
            numbers.setdefault(entry.file, len(numbers))
            files[entry.file] = max(files.get(entry.file, 0), entry.stop)
        pieces.append([_piece(entry, numbers[entry.file], recipe.half, len(entries) == 1) for entry in entries])
        places.append(_place(pieces[-1], dtype.size))
        stored.append(dtype)
        place = places[-1] if wanted == dtype else 0
        fields.append(Field(name.removeprefix(prefix), shape, wanted, math.prod(shape) * wanted.size, place))
    experts = plan.args.num_experts
    if all(len(of_field) == 1 for of_field in pieces):
        runs = (_coalesce([of_field[0] for of_field in pieces]),) * experts
    else:
        runs = tuple(_coalesce([_of_expert(of_field, expert) for of_field in pieces]) for expert in range(experts))
    used = {run.file for of_expert in runs for run in of_expert}
    return Layer(path, tuple(fields), tuple(stored), tuple(places), runs, tuple(sorted(used)))


def _place(pieces: list[Piece], itemsize: int) -> int:
    if pieces[0].stride % _LINE or len({piece.offset % _LINE for piece in pieces}) > 1:
        return 0
    return pieces[0].offset % PAGE // itemsize * itemsize


def _piece(entry: TensorEntry, file: int, half: int | None, stacked: bool) -> Piece:
    stride = entry.nbytes // entry.shape[0] if stacked else 0
    nbytes = (stride if stacked else entry.nbytes) // (1 if half is None else 2)
    return Piece(file, entry.start + (half or 0) * nbytes, stride, nbytes, entry.name)


def _of_expert(pieces: list[Piece], expert: int) -> Piece:
    if len(pieces) > 1:
        return pieces[expert]
    return pieces[0]._replace(offset=pieces[0].offset + expert * pieces[0].stride, stride=0)


def _coalesce(pieces: list[Piece]) -> tuple[Run, ...]:
    """``pieces``, one by field, as runs."""
    runs: list[list[int]] = []
    end = None
    for i in sorted(range(len(pieces)), key=lambda i: pieces[i][:2]):
        file, offset, stride, nbytes, _ = pieces[i]
        if (file, offset, stride) == end:
            runs[-1].append(i)
        else:
            runs.append([i])
        end = file, offset + nbytes, stride
    return tuple(_run([pieces[i] for i in fields], _picker(tuple(fields))) for fields in runs)


def _run(pieces: list[Piece], pick: Callable[[list[Any]], Sequence[Any]]) -> Run:
    first = pieces[0]
    return Run(first.file, first.offset, first.stride, sum(piece.nbytes for piece in pieces), pick, tuple(pieces))


def _picker(fields: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    if fields == tuple(range(fields[0], fields[-1] + 1)):  # also because itemgetter(i) alone would give no sequence
        return itemgetter(slice(fields[0], fields[-1] + 1))
    return itemgetter(*fields)
