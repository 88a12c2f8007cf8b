"""Ranks on this machine: processes that meet through MLX's ring."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0  # seconds


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def ranks(count: int, folder: Path, *command: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Run ``python COMMAND`` as ``count`` ranks; those that are left at the end are killed."""
    hosts = folder / "ring.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(count)]))
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment() | {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def results(processes: Sequence[subprocess.Popen[str]]) -> list[Any]:
    """What each writes to standard output, one JSON value, when all have ended well."""
    ended = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), [errors for _, errors in ended]
    return [json.loads(out) for out, _ in ended]
