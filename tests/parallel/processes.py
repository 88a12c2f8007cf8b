"""Ranks on this machine: processes that meet through MLX's ring."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import environment, ring_hosts

PATIENCE = 120.0  # seconds


@contextmanager
def ranks(count: int, folder: Path, *command: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Run ``python COMMAND`` as ``count`` ranks; those that are left at the end are killed."""
    hosts = ring_hosts(count, folder)
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


def told(errors: str) -> list[str]:
    """The messages of this package in ``errors``; there is nothing else but MLX's ring, which writes to the same stream
    at any time, "[ring] " apart from what follows it.
    """
    rest = re.sub(r"error: .*\n", "", errors)
    assert all(line.startswith("[ring]") for line in rest.splitlines()), errors
    return re.findall(r"error: .*", errors)
