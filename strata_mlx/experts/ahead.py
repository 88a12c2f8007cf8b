"""The host is a layer ahead of the device: it builds the next layer's graph before the experts of one are known."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .streaming import Streaming


class Behind(Protocol):
    """A call of a layer whose result was handed out before its experts were known; it must not be computed yet."""

    def keep(self) -> None:
        """Wait until they are known, and let the result be computed with them."""

    def end(self) -> None:
        """What is left to do after that, while the device computes."""


class Ahead:
    """The layer, of those that stream, that is behind: one at most.

    Only in a block that enters this may a layer be left behind, since nothing that depends on it may be computed until
    the next one has told it its experts. What leaves the block is safe to compute.
    """

    def __init__(self) -> None:
        self.open = False
        self._behind: Behind | None = None

    def __enter__(self) -> None:
        self._behind = None  # of a forward that was cut short
        self.open = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.open = False
        behind = self.take()
        if behind and kind is None:
            behind.keep()
            behind.end()

    def put(self, window: Behind) -> None:
        """The result of ``window`` is handed out now, and told its experts later."""
        self._behind = window

    def take(self) -> Behind | None:
        """What is behind; the caller tells it."""
        behind, self._behind = self._behind, None
        return behind


def a_layer_ahead(streaming: Streaming | None) -> AbstractContextManager[None]:
    """A block for one forward of a model, in which nothing of that is computed but by the layers that stream."""
    return streaming.a_layer_ahead() if streaming else nullcontext()
