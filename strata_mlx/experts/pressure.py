"""Memory goes back when the system asks for it, or when the process has grown beyond its budget."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from . import system
from .sizes import format_size

_EVERY = 1.0  # seconds between two looks at the system
_PATIENCE = 10.0  # seconds until the system's averages show what giving memory back has done
_LEAST_AVAILABLE = 20  # the system is to have one part in so many of its memory left
_STALLED = 10.0  # percent of the last ten seconds in which some process waited for memory
_SLACK = 0.01  # that memory may be beyond the budget before slots go: nobody is hurt by so little
_WARNING, _CRITICAL = 1 / 8, 1 / 3  # of the slots, that go back


@dataclass(frozen=True)
class Wish:
    """Memory that is wanted back. share: of the slots. nbytes: at least so many bytes. reason: in words."""

    reason: str
    share: float = 0.0
    nbytes: int = 0


Source = Callable[[], Wish | None]


class Shrinkable(Protocol):
    """Slots that can be fewer: those of a model's streamed layers, of which each has the same number."""

    @property
    def slots(self) -> int:
        """How many a layer has."""

    @property
    def least(self) -> int:
        """With how many it still works."""

    @property
    def slot_bytes(self) -> int:
        """What one slot in all of the layers takes."""

    def shrink(self, slots: int) -> None:
        """Have only so many, now. What is evicted is read again when it is needed."""


class Guard:
    """Looks at ``sources``, at most once per second, and lets ``pool`` shrink as far as they wish.

    tell: gets one line for each time that it does. clock: seconds.
    """

    def __init__(
        self,
        pool: Shrinkable,
        sources: Sequence[Source],
        tell: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pool, self._sources, self._tell, self._clock = pool, sources, tell or _to_stderr, clock
        self._next = clock() + _EVERY

    def check(self) -> None:
        """To be called between two rounds of decoding."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _EVERY
        wishes = [wish for source in self._sources if (wish := source())]
        if wishes:
            self._grant(max(wishes, key=self._slots_of), now)

    def _slots_of(self, wish: Wish) -> int:
        pool = self._pool
        return max(-int(-pool.slots * wish.share // 1), -(-wish.nbytes // pool.slot_bytes))

    def _grant(self, wish: Wish, now: float) -> None:
        before = self._pool.slots
        after = max(self._pool.least, before - self._slots_of(wish))
        if after >= before:
            return
        self._pool.shrink(after)
        mx.clear_cache()
        system.trim()
        self._tell(
            f"memory: {wish.reason}; {format_size((before - after) * self._pool.slot_bytes)} given back, "
            f"{after} instead of {before} experts of a layer stay in memory"
        )
        if wish.share:
            self._next = now + _PATIENCE


def relieve(model: nn.Module) -> None:
    """Between two rounds: have a model that was loaded with a budget give memory back, if somebody wants it."""
    guard = getattr(model, "guard", None)
    if guard is not None:
        guard.check()


def beyond(budget: int, scope: str) -> Source:
    """A wish for what is used beyond ``budget`` bytes of ``scope``, as in Needs."""

    def ask() -> Wish | None:
        used = mx.get_active_memory() + mx.get_cache_memory() if system.on_gpu_of_its_own() else system.footprint()
        if used <= budget * (1 + _SLACK):
            return None
        return Wish(f"{format_size(used)} of {scope} are used, more than the budget", nbytes=used - budget)

    return ask


def system_sources() -> list[Source]:
    """What this system has to say."""
    if sys.platform == "darwin":
        return [vm_pressure, scarce]
    return [scarce, stalls, CgroupEvents()]


def scarce() -> Wish | None:
    """A wish for what the system lacks to have a twentieth of its memory available."""
    least, left = system.total() // _LEAST_AVAILABLE, system.available()
    if left >= least:
        return None
    return Wish(f"the system has {format_size(max(left, 0))} left", nbytes=least - left)


def stalls() -> Wish | None:
    """Linux' pressure stall information: other processes wait for memory."""
    waiting = system.memory_stalls()
    if waiting is None or waiting < _STALLED:
        return None
    return Wish(f"processes of this system wait for memory {waiting:.0f} % of the time", share=_WARNING)


class CgroupEvents:
    """The kernel throttled this process' control group, since the last time that it was asked, for using too much."""

    def __init__(self) -> None:
        self._seen = system.cgroup_high_events()

    def __call__(self) -> Wish | None:
        before, self._seen = self._seen, system.cgroup_high_events()
        if self._seen <= before:
            return None
        return Wish("the control group of this process is above its memory.high", share=_WARNING)


def vm_pressure() -> Wish | None:
    """macOS' memory pressure: 1 normal, 2 warning, 4 critical."""
    level = system.vm_pressure_level()
    if level < 2:
        return None
    return Wish(f"the system's memory pressure is at level {level}", share=_WARNING if level < 4 else _CRITICAL)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
