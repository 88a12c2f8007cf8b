"""The experts of a checkpoint on disk, read into memory one by one, with the bits that loading gives.

Files stay open and reads are positional: a file that is replaced in its folder keeps its old content here, and one that
is changed in place is found out.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import mlx.core as mx
from numpy.typing import NDArray

from ..errors import Fault
from ..models.plan import ModelPlan
from .casts import Caster
from .disk import DiskSettings, settings_for
from .files import ReadError, WeightFile
from .ranges import Field, Layer, Run, find_layers, workload
from .reads import Job, Pool, Reads

_LARGE = 128 << 10  # bytes of an expert: smaller ones are soon in the page cache, and asking only takes time


class ExpertStore:
    """layers: paths of the model's MoE modules, an MTP head's last; a layer is named by its index there."""

    def __init__(self, layers: Sequence[Layer], sizes: dict[Path, int], settings: DiskSettings):
        """sizes: the bytes that each file must have. Raises what open() does."""
        self.layers = tuple(layer.path for layer in layers)
        self.settings = settings
        self._layers = layers
        self._scattered = [_scattered(layer.runs[0]) for layer in layers]
        self._files: list[WeightFile] = []
        self._local = threading.local()  # .casting: by layer
        self._pool: Pool | None = None
        self._latest: Reads | None = None
        self._closed = False
        try:
            for file, size in sizes.items():
                self._files.append(WeightFile(file, size, settings.direct))
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, plan: ModelPlan, cast: mx.Dtype | None, settings: DiskSettings | None = None) -> ExpertStore:
        """Open the files with the experts of ``plan``. Floating parameters are cast to ``cast``, if it is given.

        settings: None takes those that were measured on this device, at first use for some two seconds. Raises
        CheckpointError for a file that has become shorter than its header says, and Fault for one that cannot be
        opened.
        """
        layers, sizes = find_layers(plan, cast)
        return cls(layers, sizes, settings or settings_for(workload(layers, sizes)))

    def fields(self, layer: int) -> tuple[Field, ...]:
        return self._layers[layer].fields

    def expert_bytes(self, layer: int) -> int:
        """Of one expert, in memory."""
        return sum(field.nbytes for field in self._layers[layer].fields)

    def read(self, layer: int, expert: int, into: Sequence[NDArray[Any]]) -> int:
        """Read one expert into one writable, C-contiguous array per field, of its shape; return the bytes read.

        bfloat16 goes into uint16. Several threads may call this. Raises Fault, naming file, tensor and offset, when the
        disk fails or a file was changed; what is in ``into`` is undefined then.
        """
        nbytes = self._read(layer, expert, into)
        self._check_unchanged(layer)
        return nbytes

    def start(self, layer: int, jobs: Sequence[Job]) -> Reads:
        """Begin to read experts, each with the arrays that its fields go to, as in read()."""
        self._latest = reads = Reads(partial(self._read, layer), partial(self._check_unchanged, layer), jobs)
        if self.settings.threads > 1 and not self._closed:
            if self._pool is None:
                self._pool = Pool(self.settings.threads - 1)  # and the thread that waits
            self._pool.start(reads, len(jobs))
        return reads

    def fetch(self, layer: int, jobs: Sequence[Job]) -> tuple[int, float]:
        """Read experts, as start() and wait() do; return the bytes read and the seconds that threads spent on it."""
        if self.settings.threads > 1 and len(jobs) > 1:  # for one, waking a thread would only take time
            reads = self.start(layer, jobs)
            reads.wait()
            return reads.nbytes, reads.seconds
        start = perf_counter()
        nbytes = sum([self._read(layer, *job) for job in jobs])
        self._check_unchanged(layer)
        return nbytes, perf_counter() - start

    def drain(self) -> None:
        """Give up what start() began last, and return when no read writes to its memory any more."""
        if self._latest:
            self._latest.drain()

    def close(self) -> None:
        """Wait for reads in flight and close the files."""
        self._closed = True
        if self._pool:
            self._pool.close()
            self._pool = None
        while self._files:
            self._files.pop().close()

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, layer: int, expert: int, into: Sequence[NDArray[Any]]) -> int:
        if self._closed:
            raise ValueError("this store of experts is closed")
        targets = list(into)
        casting = self._casting(layer)
        for caster, fields in casting:
            for i, array in zip(fields, caster.stored, strict=True):
                targets[i] = array
        total, runs = 0, self._layers[layer].runs[expert]
        missing = partial(self._expect, runs[1:], expert) if self._scattered[layer] else None
        for run in runs:
            try:
                self._files[run.file].read(run.pick(targets), run.offset + expert * run.stride, run.nbytes, missing)
            except ReadError as error:
                raise self._fault(run, expert, error) from error
            total, missing = total + run.nbytes, None
        for caster, fields in casting:
            caster.deliver([into[i] for i in fields])
        return total

    def _expect(self, runs: Sequence[Run], expert: int) -> None:
        """Small reads in turn would leave the disk idle between them."""
        for run in runs:
            self._files[run.file].expect(run.offset + expert * run.stride, run.nbytes)

    def _fault(self, run: Run, expert: int, error: ReadError) -> Fault:
        reached = run.offset + expert * run.stride
        for piece in run.pieces:
            reached += piece.nbytes
            if error.offset < reached:
                break
        return Fault(
            f"{self._files[run.file].path}: tensor {piece.tensor!r}, expert {expert}, byte {error.offset}: "
            f"{error.reason}; check the disk and load the model again"
        )

    def _casting(self, layer: int) -> list[tuple[Caster, list[int]]]:
        """This thread's casters for a layer, and the fields that each casts."""
        try:
            return self._local.casting[layer]
        except AttributeError:
            self._local.casting = {}
        except KeyError:
            pass
        described, made = self._layers[layer], []
        groups: dict[tuple[mx.Dtype, mx.Dtype], list[int]] = {}
        for i, (field, dtype) in enumerate(zip(described.fields, described.stored, strict=True)):
            if field.dtype != dtype:
                groups.setdefault((dtype, field.dtype), []).append(i)
        for types, group in groups.items():
            shapes, places = [described.fields[i].shape for i in group], [described.places[i] for i in group]
            made.append((Caster(*types, shapes, places), group))
        self._local.casting[layer] = made
        return made

    def _check_unchanged(self, layer: int) -> None:
        for number in self._layers[layer].files:
            self._files[number].check_unchanged()


def _scattered(runs: Sequence[Run]) -> bool:
    """Whether reading an expert is worth telling the disk beforehand."""
    return len(runs) > 1 and sum(run.nbytes for run in runs) >= _LARGE
