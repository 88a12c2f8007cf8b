"""What streaming has come to so far: counters that only grow, and the difference between two moments."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Traffic:
    """Totals over the streamed layers of a model.

    windows: forwards of a layer. picks: (token, rank) selections. hits, misses: distinct experts of a window that were
    resident, and that were read. bytes: read from disk. read_seconds: that threads spent reading.
    stall_seconds: that the host waited for reads while no expert was being computed.
    host_seconds: of bookkeeping between the selection and the last read, without waiting and reading.
    compute_seconds: that the host waited for the device to select experts or to free a slot.
    """

    windows: int = 0
    picks: int = 0
    hits: int = 0
    misses: int = 0
    bytes: int = 0
    read_seconds: float = 0.0
    stall_seconds: float = 0.0
    host_seconds: float = 0.0
    compute_seconds: float = 0.0

    def __sub__(self, earlier: Traffic) -> Traffic:
        """What has been added since ``earlier``."""
        return Traffic(*(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)))
