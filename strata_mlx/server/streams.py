"""What a request sees of its job: pieces of text as they come, and how it ended."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

from ..errors import Fault
from .jobs import End, Job, Piece, Usage

Item = Piece | End


class Stream(AsyncIterator[Item]):
    """The text of one job, for one reader: ``async for``, or ``for``, which blocks. The last item is an End.

    What has gathered while the reader was elsewhere comes as one piece. Where the job failed, a Fault is raised after
    the text that there was; nothing follows an End or a Fault.
    """

    def __init__(self, job: Job, usage: Callable[[], Usage] | None = None):
        self.job = job
        self.cancelled = False
        self._usage = usage or (lambda: Usage(len(job.prompt)))
        self._items: deque[Item | Fault] = deque()
        self._changed = threading.Condition()
        self._ended = False  # nothing may be added
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    @property
    def usage(self) -> Usage:
        """So far."""
        return self._usage()

    def cancel(self) -> None:
        """Nobody will read on: the work for it ends before the next window. May be called at any time, also again."""
        self.cancelled = True

    def put(self, item: Item | Fault) -> None:
        """Add what comes next, from any thread. Ignored after an End or a Fault."""
        with self._changed:
            if self._ended:
                return
            self._ended = not isinstance(item, Piece)
            self._items.append(item)
            self._changed.notify_all()
            reader, self._reader = self._reader, None
        if reader:
            loop, waiting = reader
            with suppress(RuntimeError):  # its loop is closed: it reads no more
                loop.call_soon_threadsafe(_wake, waiting)

    async def __anext__(self) -> Item:
        while True:
            with self._changed:
                if self._items:
                    return self._take()
                if self._ended:
                    raise StopAsyncIteration
                loop = asyncio.get_running_loop()
                waiting = loop.create_future()
                self._reader = loop, waiting
            await waiting

    def __iter__(self) -> Iterator[Item]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._ended)
                if not self._items:
                    return
                item = self._take()
            yield item

    def _take(self) -> Item:
        item = self._items.popleft()
        if isinstance(item, Fault):
            raise item
        if not isinstance(item, Piece) or not (self._items and isinstance(self._items[0], Piece)):
            return item
        pieces = [item]
        while self._items and isinstance(piece := self._items[0], Piece):
            pieces.append(piece)
            self._items.popleft()
        return Piece("".join(piece.text for piece in pieces), tuple(t for piece in pieces for t in piece.tokens))


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
