"""The experts of a checkpoint on disk, read into memory one by one, with the bits that loading gives.

Files stay open and reads are positional: a file that is replaced in its folder keeps its old content here, and one that
is changed in place is found out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx
from numpy.typing import NDArray

from ..errors import CheckpointError, Fault
from ..models.plan import ModelPlan
from .casts import Caster
from .disk import DiskSettings
from .ranges import Field, Layer, Run, find_layers
from .reads import Job, Pool, Reads

pread_into = os.preadv  # (descriptor, buffers, offset) -> bytes: every read of an expert goes through this name


class ExpertStore:
    """layers: paths of the model's MoE modules, an MTP head's last; a layer is named by its index there."""

    def __init__(self, layers: Sequence[Layer], files: dict[Path, int], settings: DiskSettings):
        """files: with the bytes that each must have. Raises what open() does."""
        self.layers = tuple(layer.path for layer in layers)
        self.settings = settings
        self._layers = layers
        self._files = tuple(files)
        self._descriptors: list[int] = []
        self._states: list[tuple[int, int]] = []
        self._local = threading.local()  # .casting: by layer
        self._pool: Pool | None = None
        self._closed = False
        try:
            for file, size in files.items():
                self._open(file, size)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, plan: ModelPlan, cast: mx.Dtype | None, settings: DiskSettings | None = None) -> ExpertStore:
        """Open the files with the experts of ``plan``. Floating parameters are cast to ``cast``, if it is given.

        Raises CheckpointError for a file that has become shorter than its header says, and Fault for one that cannot be
        opened.
        """
        return cls(*find_layers(plan, cast), settings or DiskSettings())

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
        reads = Reads(partial(self._read, layer), partial(self._check_unchanged, layer), jobs)
        if self.settings.threads > 1 and not self._closed:
            if self._pool is None:
                self._pool = Pool(self.settings.threads)
            self._pool.start(reads, len(jobs))
        return reads

    def close(self) -> None:
        """Wait for reads in flight and close the files."""
        self._closed = True
        if self._pool:
            self._pool.close()
            self._pool = None
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, file: Path, size: int) -> None:
        try:
            self._descriptors.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            status = os.fstat(self._descriptors[-1])
        except OSError as error:
            raise Fault(f"{file}: cannot be opened ({error.strerror})") from error
        if status.st_size < size:
            raise CheckpointError(
                f"{file}: has {status.st_size} bytes, but its header promises {size}: it was cut short after that "
                "was read; download or convert it again"
            )
        self._states.append((status.st_size, status.st_mtime_ns))

    def _read(self, layer: int, expert: int, into: Sequence[NDArray[Any]]) -> int:
        if self._closed:
            raise ValueError("this store of experts is closed")
        targets = list(into)
        casting = self._casting(layer)
        for caster, fields in casting:
            for i, array in zip(fields, caster.stored, strict=True):
                targets[i] = array
        total = 0
        for run in self._layers[layer].runs[expert]:
            file, offset, stride, nbytes, pick, _ = run
            buffers = pick(targets)
            try:
                got = pread_into(self._descriptors[file], buffers, offset + expert * stride)
            except InterruptedError:
                got = 0
            except OSError as error:
                raise self._fault(run, expert, 0, f"cannot be read ({error.strerror})") from error
            if got != nbytes:
                self._read_rest(run, expert, buffers, got)
            total += nbytes
        for caster, fields in casting:
            caster.run()
            for i, array in zip(fields, caster.cast, strict=True):
                into[i][...] = array
        return total

    def _read_rest(self, run: Run, expert: int, buffers: Sequence[NDArray[Any]], done: int) -> None:
        """Go on where a read ended early, after ``done`` bytes, which only an end of file may do twice in a row."""
        views = [buffer.data.cast("B") for buffer in buffers]
        while done < run.nbytes:
            skip, rest = done, []
            for view in views:
                rest.append(view[skip:])
                skip = max(0, skip - len(view))
            try:
                got = pread_into(self._descriptors[run.file], rest, run.offset + expert * run.stride + done)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._fault(run, expert, done, f"cannot be read ({error.strerror})") from error
            if not got:
                raise self._fault(run, expert, done, "the file ends there: it was cut short while in use")
            done += got

    def _casting(self, layer: int) -> list[tuple[Caster, list[int]]]:
        """This thread's casters for a layer, and the fields that each casts."""
        try:
            return self._local.casting[layer]
        except AttributeError:
            self._local.casting = {}
        except KeyError:
            pass
        fields, stored = self._layers[layer].fields, self._layers[layer].stored
        groups: dict[tuple[mx.Dtype, mx.Dtype], list[int]] = {}
        for i, (field, dtype) in enumerate(zip(fields, stored, strict=True)):
            if field.dtype != dtype:
                groups.setdefault((dtype, field.dtype), []).append(i)
        made = [(Caster(*types, [fields[i].shape for i in group]), group) for types, group in groups.items()]
        self._local.casting[layer] = made
        return made

    def _check_unchanged(self, layer: int) -> None:
        """Called after reading: what was read before is good if the files are as they were when they were opened.

        The time of the last status change says nothing: replacing a file in its folder moves that of the old one.
        """
        for file in self._layers[layer].files:
            status = os.fstat(self._descriptors[file])
            if (status.st_size, status.st_mtime_ns) != self._states[file]:
                raise Fault(
                    f"{self._files[file]}: was changed while in use ({self._states[file][0]} bytes then, "
                    f"{status.st_size} now); restore it and load the model again"
                )

    def _fault(self, run: Run, expert: int, done: int, what: str) -> Fault:
        reached = 0
        for piece in run.pieces:
            reached += piece.nbytes
            if done < reached:
                break
        return Fault(
            f"{self._files[run.file]}: tensor {piece.tensor!r}, expert {expert}, byte "
            f"{run.offset + expert * run.stride + done}: {what}; check the disk and load the model again"
        )
