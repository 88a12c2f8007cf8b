"""Which expert of a layer lies in which slot. Pure bookkeeping: nothing is read, written or computed here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .eviction import Eviction, Ids, Rows


class Leaving:
    """Experts that may leave, the first to go found without a look at all of them.

    A heap keeps what the score of each was when it was looked at last. Scores only grow with use, so that the smallest
    of these is not above the smallest score; where one has grown, it goes back with what it is now.
    """

    def __init__(self, eviction: Eviction, experts: Collection[int] = ()):
        self._eviction = eviction
        self._heap: list[tuple[float, int]] = [(-inf, expert) for expert in experts]
        self._epoch = eviction.epoch

    def add(self, expert: int) -> None:
        """``expert``, which is not among them, may leave too."""
        heappush(self._heap, (-inf, expert))

    def candidates(self, keep: Sequence[int]) -> list[int]:
        """All but ``keep``, in ascending order."""
        return sorted({expert for _, expert in self._heap}.difference(keep))

    def rank(self) -> None:
        """Put all in order again, if scores have become smaller."""
        if self._epoch != self._eviction.epoch:
            score = self._eviction.score
            self._heap = [(score[expert], expert) for _, expert in self._heap]
            heapify(self._heap)
            self._epoch = self._eviction.epoch

    def take(self, count: int, keep: Sequence[int]) -> list[int]:
        """The ``count`` that leave first, which are no longer among them; none of ``keep``. Of equal ones, the smallest
        id goes first. Raises ValueError, and changes nothing, where there are not so many.
        """
        self.rank()
        heap, score = self._heap, self._eviction.score
        found: list[int] = []
        kept: list[tuple[float, int]] = []
        while heap and len(found) < count:
            seen, expert = heap[0]
            if seen != score[expert]:
                heapreplace(heap, (score[expert], expert))
            elif expert in keep:
                kept.append(heappop(heap))
            else:
                found.append(heappop(heap)[1])
        for entry in kept:
            heappush(heap, entry)
        if len(found) < count:
            for expert in found:
                self.add(expert)
            raise ValueError(f"{count} resident experts would have to go, but only {len(found)} can")
        return found


class SlotTable:
    """The slots of one layer's experts. A slot is free, reserved for an expert that is being read, or resident.

    experts, slots: how many there are. eviction: what chooses which resident expert makes room. pinned: experts that
    never make room once they are resident.

    slot_of: int32 ``[experts]``, -1 where an expert is not resident. resident: bool ``[experts]``. version: grows
    whenever ``resident`` changes. counts: int64 ``[experts]``, how often each was selected. filled: how many experts
    have been put into slots until now.
    All are to be read only; the arrays stay the same objects.
    wanted: ``[..., T, K]``, what the router would have chosen for the window that comes next, if that may be something
    else than what is used: evictions go by it. To be set before each such window.
    """

    def __init__(self, experts: int, slots: int, eviction: Eviction, pinned: Collection[int] = ()):
        self.slots = slots
        self.slot_of: NDArray[np.int32] = np.full(experts, -1, np.int32)
        self.resident: NDArray[np.bool_] = np.zeros(experts, np.bool_)
        self.version = 0
        self.counts: NDArray[np.int64] = np.zeros(experts, np.int64)
        # For a row or an expert at a time: a memory view reads and writes single numbers several times faster.
        self._where, self._count = self.slot_of.data, self.counts.data
        self.filled = 0
        self.wanted: Any = None
        self.eviction = eviction
        self._pinned = frozenset(pinned)
        self._free = list(range(slots))[::-1]
        self._reserved: dict[int, int] = {}  # by slot, the expert
        self._leaving = Leaving(eviction)  # residents that are not pinned

    @property
    def free(self) -> int:
        """How many slots hold nothing and are promised to nobody."""
        return len(self._free)

    def slots_of(self, row: Sequence[int]) -> list[int]:
        """``slot_of`` of each expert of a row."""
        where = self._where
        return [where[expert] for expert in row]

    def takes(self, count: int) -> bool:
        """Whether any ``count`` experts have room together, whatever is in memory."""
        return count <= self.slots - len(self._pinned)

    def fits(self, missing: Ids, needed: Ids) -> bool:
        """Whether ``missing`` of the ``needed`` experts can get slots while the others stay."""
        return self.takes(len(needed)) or len(missing) <= self.room(needed)

    def room(self, keep: Ids | Sequence[int]) -> int:
        """How many experts reserve() could find slots for."""
        return self.free + len(self._leaving.candidates(_listed(keep)))

    def rank(self) -> None:
        """Put in order what may leave, so that reserve() is quick."""
        self._leaving.rank()

    def reserve(self, experts: Sequence[int], keep: Ids | Sequence[int]) -> list[tuple[int, int]]:
        """Find a slot for each of ``experts``, which are neither resident nor reserved, and return (expert, slot).

        Resident experts make room where no slot is free, never a pinned one nor one of ``keep``. An expert is
        resident from commit() on. Raises ValueError, and changes nothing, where there is no room for all.
        """
        lacking = len(experts) - len(self._free)
        if lacking > 0:
            for victim in self._leaving.take(lacking, _listed(keep)):
                self._free.append(self._where[victim])
                self._where[victim] = -1
                self.resident[victim] = False
            self.version += 1
        pairs = [(expert, self._free.pop()) for expert in experts]
        for expert, slot in pairs:
            self._reserved[slot] = expert
        return pairs

    def commit(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Each (expert, slot) that was reserved is filled: the experts are resident."""
        for expert, slot in pairs:
            if self._reserved.pop(slot) != expert:
                raise ValueError(f"slot {slot} is not reserved for expert {expert}")
            self._where[expert] = slot
            self.resident[expert] = True
            if expert not in self._pinned:
                self._leaving.add(expert)
        self.filled += len(pairs)
        self.version += 1

    def recover(self) -> None:
        """Give up every reservation: whatever cut the work short, a slot is what ``slot_of`` says, or free."""
        taken = set(self.slot_of[self.slot_of >= 0].tolist())
        self._reserved.clear()
        self.wanted = None
        self._free = [slot for slot in range(self.slots) if slot not in taken]
        np.greater_equal(self.slot_of, 0, out=self.resident)
        self._leaving = Leaving(self.eviction, set(self.resident.nonzero()[0].tolist()) - self._pinned)
        self.version += 1

    def shrink(self, slots: int) -> dict[int, int]:
        """Have only ``slots``, and all of them free. Returns the residents that should move into them, and where each
        lay until now; they are to be reserved and committed again.

        Raises ValueError, and changes nothing, where the pinned residents have no room.
        """
        surplus = int(self.resident.sum()) - slots
        staying = self.resident.copy()
        if surplus > 0:
            candidates = self._leaving.candidates(())
            if len(candidates) < surplus:
                raise ValueError(f"{slots} slots have no room for the pinned experts")
            staying[self.eviction.victims(candidates, surplus)] = False
        experts = staying.nonzero()[0]
        moving = dict(zip(experts.tolist(), self.slot_of[experts].tolist(), strict=True))
        self.slots = slots
        self.slot_of[:] = -1
        self.recover()
        return moving

    def used(self, ids: Rows) -> None:
        """Count what the rows of a window selected, ``[T, K]``, and tell the eviction policy what was ``wanted``."""
        if len(ids) == 1:
            for expert in ids[0]:
                self._count[expert] += 1
        else:
            self.counts += np.bincount(np.ravel(ids), minlength=self.counts.size)
        wanted, self.wanted = self.wanted, None
        self.eviction.used(ids if wanted is None else np.array(wanted).reshape(-1, wanted.shape[-1]).tolist())


def _listed(ids: Ids | Sequence[int]) -> Sequence[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else ids
