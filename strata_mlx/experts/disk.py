"""How a device is read."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError

_MAX_THREADS = 64


@dataclass(frozen=True)
class DiskSettings:
    """threads: that read at a time; 1 reads in the thread that waits. direct: past the page cache, where possible."""

    threads: int = 1
    direct: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= _MAX_THREADS:
            raise InputError(f"{self.threads} threads to read with: choose from 1 to {_MAX_THREADS}")
