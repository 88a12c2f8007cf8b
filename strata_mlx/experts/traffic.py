"""What streaming has come to: counters that only grow, and the difference between two moments."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Traffic:
    """Totals over the streamed layers of a model.

    windows: that layers have computed. picks: (token, rank) selections. hits, misses: experts that a window needed,
    each counted once, that were in memory when the router chose them, and that were read then. bytes: read from disk.
    read_seconds: that threads spent reading. stall_seconds: that the device had no expert to compute while it waited
    for reads. compute_seconds: that the host waited for the device. host_seconds: that it did anything else between
    the beginning and the end of a layer's experts.
    """

    windows: int = 0
    picks: int = 0
    hits: int = 0
    misses: int = 0
    bytes: int = 0
    read_seconds: float = 0.0
    stall_seconds: float = 0.0
    compute_seconds: float = 0.0
    host_seconds: float = 0.0

    def window(self, picks: int, needed: int, missing: int) -> None:
        """Count a window of a layer, for whose picks so many experts were needed, and so many of these missing."""
        self.windows += 1
        self.picks += picks
        self.hits += needed - missing
        self.misses += missing

    def __sub__(self, earlier: Traffic) -> Traffic:
        """What came between."""
        before = asdict(earlier)
        return Traffic(**{name: value - before[name] for name, value in asdict(self).items()})
