"""Reads in flight: threads take them up, and the one that waits helps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

Job = tuple[int, Sequence[NDArray[Any]]]  # an expert, and where its fields go


class Reads:
    """Some experts of one layer on their way into memory.

    failed: experts whose memory is undefined, final when wait() or drain() has ended. nbytes: that were read. seconds:
    that threads spent reading. read: reads one job and returns its bytes. check: called when all have ended; raises if
    what was read is not to be trusted.
    """

    def __init__(self, read: Callable[..., int], check: Callable[[], None], jobs: Sequence[Job]):
        self._read, self._check = read, check
        self._waiting = deque(jobs)
        self._running = 0  # jobs that pool threads are at: only they write while the owner does something else
        self._changed = threading.Condition(threading.Lock())
        self._error: Exception | None = None
        self._experts = [expert for expert, _ in jobs]
        self.failed = self._experts.copy()
        self.nbytes = 0
        self.seconds = 0.0

    def wait(self) -> None:
        """Return when every job has ended, so that nothing writes to memory afterwards; then raise the first error.

        Ctrl-C cuts this short, with KeyboardInterrupt: drain() before the memory is used again.
        """
        while job := self._next():
            self._do(job)
        with self._changed:
            while self._running:
                self._changed.wait()
        if self._error is None:
            try:
                self._check()
            except Exception as error:
                self._error, self.failed = error, self._experts
        if self._error:
            raise self._error

    def drain(self) -> None:
        """Begin nothing more, and return when what had begun has ended; Ctrl-C is raised only then."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with self._changed:
                    self._waiting.clear()
                    while self._running:
                        self._changed.wait()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt:
            raise interrupt

    def help(self) -> None:
        """Do jobs until none is left, in a thread of the pool."""
        while True:
            with self._changed:
                if not (job := self._next()):
                    return
                self._running += 1
            try:
                self._do(job)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

    def _next(self) -> Job | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _do(self, job: Job) -> None:
        start = perf_counter()
        try:
            nbytes = self._read(*job)
        except Exception as error:
            with self._changed:
                self._error = self._error or error
            return
        with self._changed:
            self.seconds += perf_counter() - start
            self.nbytes += nbytes
            self.failed.remove(job[0])


class Pool:
    """Threads that help with reads as they are started."""

    def __init__(self, threads: int):
        self._queue: SimpleQueue[Reads | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name="expert reader", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def start(self, reads: Reads, jobs: int) -> None:
        for _ in range(min(jobs, len(self._threads))):
            self._queue.put(reads)

    def close(self) -> None:
        """Return when everything that was started has ended."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while reads := self._queue.get():
            reads.help()
            del reads  # it holds the owner's memory
