"""Messages between rank 0 and every other rank over TCP, beside MLX's collectives: those block where a rank is gone.

A message is a JSON object on a line. Who holds the secret, which goes through MLX's own group, may connect.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import mlx.core as mx

from ..device import evaluate
from ..errors import Fault

_INVITATION = 512  # bytes, at most
Message = dict[str, Any]


class Peer:
    """A connection to another rank. rank: its number. name: its host and process, for people."""

    def __init__(self, rank: int, name: str, connection: socket.socket, timeout: float):
        self.rank, self.name = rank, name
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._lines = connection, connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises OSError where the other side is gone. From any thread."""
        with self._sending:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message | None:
        """The next message; None where the other side has closed the connection. Raises TimeoutError after the timeout,
        and OSError where the other side is gone.
        """
        line = self._lines.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(group: mx.distributed.Group, timeout: float) -> list[Peer]:
    """Of rank 0 the connections to all the others, of these the one to rank 0. Raises Fault where one does not come."""
    if group.rank() == 0:
        return _invite(group, timeout)
    host, port, secret = json.loads(_through(group, b""))
    try:
        connection = socket.create_connection((host, port), timeout)
        peer = Peer(0, f"rank 0 at {host}", connection, timeout)
        peer.send({"secret": secret, "rank": group.rank(), "name": _own_name(group.rank())})
    except OSError as error:
        raise Fault(f"rank {group.rank()} cannot reach rank 0 at {host}, port {port}: {error}") from error
    return [peer]


def _invite(group: mx.distributed.Group, timeout: float) -> list[Peer]:
    host, secret = own_address(), secrets.token_hex(16)
    try:
        listening = socket.create_server((host, 0))
    except OSError as error:
        raise Fault(f"rank 0 cannot listen at {host}, its address for the others: {error}") from error
    peers: dict[int, Peer] = {}
    with listening:
        _through(group, json.dumps([host, listening.getsockname()[1], secret]).encode())
        end = time.monotonic() + timeout
        while len(peers) < group.size() - 1:
            listening.settimeout(max(0.001, end - time.monotonic()))
            try:
                peer = _accept(listening, secret, timeout)
            except TimeoutError:
                absent = sorted(set(range(1, group.size())) - peers.keys())
                raise Fault(f"rank {absent[0]} has not connected to rank 0 at {host} in {timeout:g} s") from None
            if peer:
                peers[peer.rank] = peer
    return [peers[rank] for rank in sorted(peers)]


def _accept(listening: socket.socket, secret: str, timeout: float) -> Peer | None:
    """None where a stranger has connected."""
    connection, _ = listening.accept()
    peer = Peer(0, "", connection, timeout)
    try:
        hello = peer.receive() or {}
        if secrets.compare_digest(str(hello["secret"]), secret):
            peer.rank, peer.name = int(hello["rank"]), str(hello["name"])
            return peer
    except (OSError, ValueError, KeyError, TypeError):
        pass
    peer.close()
    return None


def _through(group: mx.distributed.Group, text: bytes) -> bytes:
    """What rank 0 has to say, by a collective; the others give nothing."""
    data = mx.array(list(text.ljust(_INVITATION, b" ")) if text else [0] * _INVITATION, mx.int32)
    total = mx.distributed.all_sum(data, group=group)
    evaluate(total, "meeting the other ranks")
    return bytes(total.tolist())  # type: ignore[arg-type]


def own_address() -> str:
    """Where the others reach this process, which is rank 0, by what mlx.launch has told it."""
    if file := os.environ.get("MLX_HOSTFILE"):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError), open(file) as hosts:
            return str(json.load(hosts)[0][0].rpartition(":")[0])
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rpartition(":")[0]
    return os.environ.get("NCCL_HOST_IP") or socket.gethostname()


def _own_name(rank: int) -> str:
    return f"rank {rank} ({socket.gethostname()}, process {os.getpid()})"
