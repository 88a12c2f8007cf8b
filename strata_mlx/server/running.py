"""An application on a port: where it listens, that it says so, and how it ends."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from ..errors import Fault

_GRACE = 5  # seconds that answers have to end, when the server ends
_ARENA_MAX, _ARENAS = -8, 2  # of glibc's mallopt()


def share_heaps() -> None:
    """Let the threads to come share two heaps, where the C library is glibc. It gives each of them its own, which keeps
    what the largest request has taken there (benchmarks/server_load.py: 2 to 4 % more memory within four minutes).
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_ARENA_MAX, _ARENAS)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens at ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to ``host`` and ``port``; 0 is any free port. Raises Fault where that cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise Fault(f"--host {host}: there is no such address ({error.strerror or error})") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise Fault(
            f"--host {host} --port {port}: cannot be listened on ({error.strerror}); choose another port"
        ) from error
    return bound


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: FastAPI, listening: socket.socket, *, ready: Callable[[], None], ends: Callable[[], None]) -> None:
    """Answer requests until Ctrl-C or SIGTERM, or, in a thread, until the process ends.

    ready: called when requests are answered. ends: called, in a thread, when no more are taken and before those that
    are being answered have to be done with.
    """
    server_of(app, ready, ends).run([listening])


def server_of(app: FastAPI, ready: Callable[[], None], ends: Callable[[], None]) -> uvicorn.Server:
    config = uvicorn.Config(app, log_config=None, server_header=False, timeout_graceful_shutdown=_GRACE)
    return _Server(config, ready, ends)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], ends: Callable[[], None]):
        super().__init__(config)
        self._ready, self._ends = ready, ends

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await run_in_threadpool(self._ends)
        await super().shutdown(sockets)
