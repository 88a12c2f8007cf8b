"""The processes that run one model together: who they are, what rank 0 tells the others, and what if one is lost."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, NoReturn

import mlx.core as mx

from ..errors import Fault, InputError, StrataError, in_one_line
from ..experts.eviction import Ids
from .channel import Message, Peer, connect

TIMEOUT = 20.0  # seconds of silence after which a rank counts as lost, where nobody says
_BEATS = 5  # signs of life in that time
_PATIENCE = 30  # times as long may a rank that gives signs of life be at one layer: kernels are compiled in the first
_EVERY = 256  # exchanges between two checkpoints at which the ranks are compared
_KEPT = 1024  # checkpoints
_GRACE = 2.0  # seconds in which the cause of an error may become known


class Ranks:
    """All ranks of a run, as one of them sees it; from expert_parallel().

    rank: its own number. size: how many there are. All of them have to call broadcast(), exchange() and close() in the
    same order, and to compute the same windows.
    """

    def __init__(self, group: mx.distributed.Group, peers: list[Peer], timeout: float):
        self.group, self.rank, self.size, self.timeout = group, group.rank(), group.size(), timeout
        self._peers = peers
        self._said: dict[int, SimpleQueue[Any]] = {peer.rank: SimpleQueue() for peer in peers}
        self._leaving = threading.Lock()  # held by who ends the process
        self._ended = False
        self._count, self._digest = 0, 0
        self._checkpoints: dict[int, int] = {}
        self._inside: float | None = None  # since when it has been at a layer
        for peer in peers:
            threading.Thread(target=self._listen, args=(peer,), name=f"rank {peer.rank}", daemon=True).start()
        if peers:
            threading.Thread(target=self._beat, name="signs of life", daemon=True).start()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone speaks to the world."""
        return self.rank == 0

    def broadcast(self, value: Any = None) -> Any:
        """What rank 0 gives here, as it is after JSON. Rank 0 does not wait."""
        if not self.leads:
            return self._said[0].get()
        for peer in self._peers:
            self._send(peer, {"say": value})
        return value

    def exchange(self, value: Any) -> list[Any]:
        """What each rank gives here, by rank, as it is after JSON."""
        if self.leads:
            return self.broadcast([value, *(self._said[peer.rank].get() for peer in self._peers)])
        self._send(self._peers[0], {"say": value})
        return self.broadcast()

    def compare(self, chosen: Ids) -> None:
        """Take note of the experts that the rows of a layer selected, which must be the same on every rank."""
        self._count += 1
        self._digest = zlib.crc32(chosen.tobytes(), self._digest)
        if self._count % _EVERY == 0:
            self._checkpoints[self._count] = self._digest
            self._checkpoints.pop(self._count - _EVERY * _KEPT, None)

    @contextmanager
    def layer(self) -> Iterator[None]:
        """Around the work at a MoE layer. Any error in it ends the run."""
        self._inside = time.monotonic()
        try:
            yield
        except Exception as error:
            self.abort(in_one_line(error), wait=True)
        finally:
            self._inside = None

    def abort(self, reason: str, wait: bool = False) -> NoReturn:
        """End this process and all the others with an error. MLX's collectives cannot be called off.

        wait: a moment, for the loss of a rank, which may be the cause.
        """
        if wait and self._peers:
            time.sleep(_GRACE)
        self._fail(f"rank {self.rank} has failed: {reason}")

    def close(self) -> None:
        """Wait until all ranks have come here. Raises Fault where they have not computed the same."""
        if self._ended:
            return
        found = self.exchange([self._count, self._digest])
        self._ended = True
        if self.leads:
            for peer in self._peers:
                self._send(peer, {"end": 0})
        for rank, each in enumerate(found):
            if each != found[0]:
                raise Fault(_PARTED.format(rank=rank))

    def end(self, code: int) -> None:
        """Have the process end with ``code`` as soon as its interpreter does, and the others now. On rank 0."""
        self._ended = True
        for peer in self._peers:
            with suppress(OSError):
                peer.send({"end": code})
        # Threads of MLX may wait for the others for ever.
        atexit.register(_leave, code)

    def failed(self, error: BaseException) -> None:
        """This rank ends with ``error``, of which it will tell itself: let the others know."""
        if self._ended or not self._peers:
            return
        code = error.exit_code if isinstance(error, StrataError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        if self.leads:
            if code == 1:  # the loss of a rank may be the cause, and is told then
                time.sleep(_GRACE)
            self.end(code)
        else:
            time.sleep(_GRACE)  # where all ranks have the same error, rank 0 tells
            self._fail(f"rank {self.rank} has failed: {' '.join(str(error).split()) or type(error).__name__}")

    def _listen(self, peer: Peer) -> None:
        while True:
            try:
                message = peer.receive()
            except TimeoutError:
                return self._lost(f"{peer.name} has been silent for {self.timeout:g} s")
            except (OSError, ValueError) as error:
                return self._lost(f"{peer.name} is gone: {error}")
            if message is None:
                return self._lost(f"{peer.name} has ended")
            self._handle(peer, message)

    def _handle(self, peer: Peer, message: Message) -> None:
        if "say" in message:
            self._said[peer.rank].put(message["say"])
        elif "beat" in message:
            count, digest = message["beat"]
            if self._checkpoints.get(count, digest) != digest:
                self._fail(_PARTED.format(rank=max(peer.rank, self.rank)))
        elif "failed" in message:
            self._fail(message["failed"], pass_on=self.leads)
        elif "end" in message:
            self._ended = True
            if message["end"]:
                _leave(message["end"])

    def _lost(self, reason: str) -> None:
        if not self._ended:
            self._fail(f"{reason}; this run needs all {self.size} ranks, start it again")

    def _beat(self) -> None:
        while not self._ended:
            since = self._inside
            if since is not None and time.monotonic() - since > _PATIENCE * self.timeout:
                self._fail(f"rank {self.rank} has been at one layer for more than {_PATIENCE * self.timeout:g} s")
            latest = max(self._checkpoints, default=0)
            for peer in self._peers:
                with suppress(OSError):  # who listens to this peer finds out
                    peer.send({"beat": [latest, self._checkpoints.get(latest, 0)]})
            time.sleep(self.timeout / _BEATS)

    def _send(self, peer: Peer, message: Message) -> None:
        try:
            peer.send(message)
        except OSError as error:
            time.sleep(_GRACE)
            self._lost(f"{peer.name} is gone: {error}")

    def _fail(self, reason: str, pass_on: bool = True) -> NoReturn:
        with self._leaving:  # once: others wait here for the end
            for peer in self._peers if pass_on else ():
                with suppress(OSError):
                    peer.send({"failed": reason})
            with suppress(OSError, ValueError):
                print(f"error: {reason}", file=sys.stderr)
            _leave(1)


_PARTED = (
    "rank {rank} has not chosen the same experts as rank 0: the ranks do not compute the same; use machines of one "
    "kind with the same files and versions, and give all of them the same options"
)


def _leave(code: int) -> NoReturn:
    """End the process whatever its threads wait for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


@contextmanager
def expert_parallel(timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Meet the other processes that mlx.launch has started, for load(ranks=...). All run the same program.

    timeout: seconds of silence after which a rank counts as lost; then every other one prints an error and exits with
    code 1, whatever it is doing. Ctrl-C is for rank 0 alone. The random numbers of MLX are made the same.

    Raises InputError for a timeout that is not positive, and Fault where the others cannot be met.
    """
    if not timeout > 0:
        raise InputError(f"the timeout of ranks is {timeout:g} s, which must be positive")
    try:
        group = mx.distributed.init()
    except RuntimeError as error:
        raise Fault(f"the ranks cannot meet: {in_one_line(error)}") from error
    peers = connect(group, timeout) if group.size() > 1 else []
    if peers and threading.current_thread() is threading.main_thread():
        # A launcher that ignores Ctrl-C has its processes ignore it too.
        signal.signal(signal.SIGINT, signal.default_int_handler if group.rank() == 0 else signal.SIG_IGN)
    ranks = Ranks(group, peers, timeout)
    mx.random.seed(ranks.broadcast(int.from_bytes(os.urandom(7), "little")))
    try:
        yield ranks
        ranks.close()
    except BaseException as error:
        ranks.failed(error)
        raise
