"""Open files of weights and the reads that go to them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, Fault

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PAGE = 4096  # bytes: reads past the page cache are multiples, at the least the logical block of today's disks

pread_into = os.preadv  # (descriptor, buffers, offset, flags) -> bytes: every read of an expert goes through this name
_local = threading.local()  # .area: aligned memory for direct reads


class ReadError(Exception):
    """A read ended at ``offset`` of the file, for ``reason``."""

    def __init__(self, offset: int, reason: str):
        super().__init__(f"byte {offset}: {reason}")
        self.offset, self.reason = offset, reason


class WeightFile:
    """A file that stays open: replaced in its folder, it keeps its content here; changed in place, it is found out."""

    def __init__(self, path: Path, size: int, direct: bool = False):
        """Open the file, which must have ``size`` bytes at least. direct: read past the page cache, if that works here.

        Raises CheckpointError if it is shorter and Fault if it cannot be opened.
        """
        self.path = path
        self._descriptor = self._direct = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise Fault(f"{path}: cannot be opened ({error.strerror}); check the file and its permissions") from error
        self._state = self._now()
        if self._state[0] < size:
            self.close()
            raise CheckpointError(
                f"{path}: has {self._state[0]} bytes, but its header promised {size}: it was cut short after that was "
                "read; download or convert it again"
            )
        if direct and hasattr(fcntl, "F_NOCACHE"):  # macOS, where nothing else is different
            fcntl.fcntl(self._descriptor, fcntl.F_NOCACHE, 1)
        elif direct and hasattr(os, "O_DIRECT"):
            with suppress(OSError):  # not every file system has it
                self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        self._at_once = _flags_at_once(self._descriptor)

    def read(self, buffers: Sequence[Any], offset: int, nbytes: int, missing: Callable[[], None] | None = None) -> None:
        """Fill ``buffers``, which are C-contiguous, with the ``nbytes`` from ``offset`` on. Raises ReadError.

        missing: called before the disk is waited for, where the page cache does not have all of them and can tell.
        """
        if self._direct >= 0:
            return self._read_direct(buffers, offset, nbytes)
        try:
            got = pread_into(self._descriptor, buffers, offset, self._at_once if missing else 0)
        except BlockingIOError:
            got = 0
        except OSError as error:
            got = _nothing_yet(error, offset)
        if got != nbytes:
            if missing:
                missing()
            self._read_rest(buffers, offset, nbytes, got)
        return None

    def expect(self, offset: int, nbytes: int) -> None:
        """Have the disk begin to read what will be asked for."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # only advice
                os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def check_unchanged(self) -> None:
        """Raise Fault if the file is not as it was opened. Asked after reading, this vouches for what was read.

        The time of the last status change says nothing: replacing a file in its folder moves that of the old one.
        """
        if (now := self._now()) != self._state:
            raise Fault(
                f"{self.path}: was changed while in use ({self._state[0]} bytes then, {now[0]} now); restore it and "
                "load the model again"
            )

    def close(self) -> None:
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct = -1

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _read_rest(self, buffers: Sequence[NDArray[Any]], offset: int, nbytes: int, done: int) -> None:
        """Go on after a read of fewer bytes than it was to give."""
        views = [buffer.data.cast("B") for buffer in buffers]
        while done < nbytes:
            skip, rest = done, []
            for view in views:
                rest.append(view[skip:])
                skip = max(0, skip - len(view))
            done += _read_some(self._descriptor, rest, offset + done)

    def _read_direct(self, buffers: Sequence[NDArray[Any]], offset: int, nbytes: int) -> None:
        """Read the blocks that hold these bytes into aligned memory, and copy. What goes wrong there is left to reads
        through the page cache: blocks may be larger than PAGE, or the file system may not have it.
        """
        first, stop = offset & -PAGE, -(-(offset + nbytes) // PAGE) * PAGE
        area = _area(stop - first)
        try:
            got = pread_into(self._direct, [area[: stop - first].data], first)
        except OSError as error:
            got = 0 if error.errno == errno.EINVAL else _nothing_yet(error, offset)
        if first + got < offset + nbytes:
            return self._read_rest(buffers, offset, nbytes, 0)
        position = offset - first
        for buffer in buffers:
            np.copyto(buffer.reshape(-1).view(np.uint8), area[position : position + buffer.nbytes])
            position += buffer.nbytes
        return None


def _flags_at_once(descriptor: int) -> int:
    """Flags of a read that gives only what the page cache has; 0 where that cannot be asked for."""
    flags: int = getattr(os, "RWF_NOWAIT", 0)
    try:
        os.preadv(descriptor, [bytearray(1)], 0, flags)
    except BlockingIOError:
        return flags
    except OSError:
        return 0
    return flags


def _nothing_yet(error: OSError, offset: int) -> int:
    """Zero bytes, if a read was only interrupted; else raises ReadError."""
    if isinstance(error, InterruptedError):
        return 0
    raise ReadError(offset, f"cannot be read ({error.strerror})") from error


def _read_some(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
    """One read, repeated if it is interrupted, of at least one byte."""
    while True:
        try:
            got = pread_into(descriptor, buffers, offset)
        except OSError as error:
            _nothing_yet(error, offset)
        else:
            if not got:
                raise ReadError(offset, "the file ends there: it was cut short while in use")
            return got


def memory_at(place: int, nbytes: int) -> NDArray[np.uint8]:
    """Memory that starts ``place`` bytes after a page's start; direct reads need 0."""
    return np.frombuffer(mmap(-1, place + max(1, nbytes)), np.uint8)[place : place + nbytes]


def _area(nbytes: int) -> NDArray[np.uint8]:
    """This thread's memory for direct reads."""
    area: NDArray[np.uint8] | None = getattr(_local, "area", None)
    if area is None or len(area) < nbytes:
        area = _local.area = memory_at(0, nbytes)
    return area
