"""Measure how fast files are read: by size of the reads, number of threads, past the page cache or from it."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

from ..errors import Fault
from .files import PAGE

BLOCKS = (64 << 10, 512 << 10, 2 << 20)  # bytes per read
THREADS = (1, 2, 4, 8)
_TURN = 0.02  # seconds that one measurement takes
_CACHED_BYTES = 16 << 20  # that are read again and again to measure the page cache
_FASTEST = 8e9  # bytes per second of a disk: so much is dropped from the page cache for each second of measuring


@dataclass(frozen=True)
class Rate:
    """block: bytes per read. direct: past the page cache. cached: from the page cache."""

    block: int
    threads: int
    direct: bool
    cached: bool
    bytes_per_second: float


def measure(files: Sequence[Path], seconds: float, advance: Callable[[], Any] = lambda: None) -> list[Rate]:
    """The rates of all combinations on random parts of ``files``, in about so many seconds altogether.

    They take turns, passes() times unless the disk is too slow for that, and the best counts: others use the disk too.
    advance: called after each turn. Raises Fault where a file cannot be read.
    """
    best, start = dict.fromkeys(cells(files), 0.0), time.perf_counter()
    turns = passes(files, seconds)
    try:
        for turn in range(turns):
            for cell in best:
                if turn == 0 or time.perf_counter() < start + seconds:
                    best[cell] = max(best[cell], _rate(files, *cell, seconds / turns / len(best)))
                advance()
    except OSError as error:
        raise Fault(f"{error.filename or files[0]}: cannot be read ({error.strerror}); check the disk") from error
    return [Rate(*cell, rate) for cell, rate in best.items()]


def passes(files: Sequence[Path], seconds: float) -> int:
    """How often each combination is measured, when all may take ``seconds``."""
    return max(1, int(seconds / len(cells(files)) / _TURN))


def cells(files: Sequence[Path]) -> list[tuple[int, int, bool, bool]]:
    """Block size, threads, direct and cached of what measure() measures."""
    kinds = [(False, False), (False, True), *([(True, False)] if _has_direct(files[0]) else [])]
    blocks = [block for block in BLOCKS if any(file.stat().st_size >= block for file in files)] or BLOCKS[:1]
    return [(block, threads, *kind) for kind in kinds for block in blocks for threads in THREADS]


def _has_direct(file: Path) -> bool:
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(descriptor, [mmap(-1, PAGE)], 0) > 0
        finally:
            os.close(descriptor)
    except OSError:
        return False


def _rate(files: Sequence[Path], block: int, threads: int, direct: bool, cached: bool, seconds: float) -> float:
    """Bytes per second."""
    with ExitStack() as stack:
        descriptors = []
        for file in files:
            descriptors.append(os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0)))
            stack.callback(os.close, descriptors[-1])
        sizes = [os.fstat(descriptor).st_size // block or 1 for descriptor in descriptors]
        count = int(_CACHED_BYTES if cached else min(_FASTEST * seconds, sum(sizes) * block)) // block
        rng = random.Random(block)
        chosen = rng.choices(range(len(sizes)), sizes, k=max(1, count))
        places = [(descriptors[i], block * rng.randrange(sizes[i])) for i in chosen]
        for descriptor, offset in places:
            if cached:
                os.preadv(descriptor, [bytearray(block)], offset)
            elif not direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, offset, block, os.POSIX_FADV_DONTNEED)
        return _read(places, block, threads, cached, seconds)


def _read(places: list[tuple[int, int]], block: int, threads: int, again: bool, seconds: float) -> float:
    counts, errors = [0] * threads, list[OSError]()
    start = time.perf_counter()

    def run(number: int) -> None:
        buffer, position = [mmap(-1, block)], number
        try:
            while again or position < len(places):
                descriptor, offset = places[position % len(places)]
                counts[number] += os.preadv(descriptor, buffer, offset)
                position += threads
                if time.perf_counter() > start + seconds:
                    break
        except OSError as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return sum(counts) / (time.perf_counter() - start)
