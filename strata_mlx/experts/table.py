"""Which expert of a layer lies in which slot. Pure bookkeeping: nothing is read, written or computed here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from .eviction import Eviction, Ids

_NONE: Ids = np.zeros(0, np.intp)


class SlotTable:
    """The slots of one layer's experts. A slot is free, reserved for an expert that is being read, or resident.

    experts, slots: how many there are. eviction: what chooses which resident expert makes room. pinned: experts that
    never make room once they are resident.

    slot_of: int32 ``[experts]``, -1 where an expert is not resident. resident: bool ``[experts]``. version: grows
    whenever ``resident`` changes. counts: int64 ``[experts]``, how often each was selected. filled: how many experts
    have been put into slots until now.
    All are to be read only; the arrays stay the same objects.
    """

    def __init__(self, experts: int, slots: int, eviction: Eviction, pinned: Collection[int] = ()):
        self.slots = slots
        self.slot_of: NDArray[np.int32] = np.full(experts, -1, np.int32)
        self.resident: NDArray[np.bool_] = np.zeros(experts, np.bool_)
        self.version = 0
        self.counts: NDArray[np.int64] = np.zeros(experts, np.int64)
        self.filled = 0
        self.eviction = eviction
        self._evictable = np.ones(experts, np.bool_)
        self._evictable[list(pinned)] = False
        self._pinned = len(set(pinned))
        self._free = list(range(slots))[::-1]
        self._reserved: dict[int, int] = {}  # by slot, the expert
        self._ranked: list[int] = []  # first to leave, of the ``version``:
        self._ranked_at = -1

    @property
    def free(self) -> int:
        """How many slots hold nothing and are promised to nobody."""
        return len(self._free)

    def takes(self, count: int) -> bool:
        """Whether any ``count`` experts have room together, whatever is in memory."""
        return count <= self.slots - self._pinned

    def fits(self, missing: Ids, needed: Ids) -> bool:
        """Whether ``missing`` of the ``needed`` experts can get slots while the others stay."""
        return self.takes(len(needed)) or len(missing) <= self.room(needed)

    def room(self, keep: Ids) -> int:
        """How many experts reserve() could find slots for."""
        return self.free + len(self._candidates(keep))

    def rank(self, count: int) -> None:
        """Have the eviction policy choose the ``count`` experts that would leave first, so that reserve() is quick."""
        if self._ranked_at != self.version and not self._free:
            candidates = self._candidates(_NONE)
            self._ranked = self.eviction.victims(candidates, min(count, len(candidates))).tolist()
            self._ranked_at = self.version

    def reserve(self, experts: Sequence[int], keep: Ids) -> list[tuple[int, int]]:
        """Find a slot for each of ``experts``, which are neither resident nor reserved, and return (expert, slot).

        Resident experts make room where no slot is free, never a pinned one nor one of ``keep``. An expert is
        resident from commit() on. Raises ValueError, and changes nothing, where there is no room for all.
        """
        lacking = len(experts) - len(self._free)
        if lacking > 0:
            victims = self._victims(lacking, keep)
            self._free.extend(self.slot_of[victims].tolist())
            self.slot_of[victims] = -1
            self.resident[victims] = False
            self.version += 1
        pairs = [(expert, self._free.pop()) for expert in experts]
        self._reserved.update((slot, expert) for expert, slot in pairs)
        return pairs

    def commit(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Each (expert, slot) that was reserved is filled: the experts are resident."""
        for expert, slot in pairs:
            if self._reserved.pop(slot) != expert:
                raise ValueError(f"slot {slot} is not reserved for expert {expert}")
            self.slot_of[expert] = slot
            self.resident[expert] = True
        self.filled += len(pairs)
        self.version += 1

    def recover(self) -> None:
        """Give up every reservation: whatever cut the work short, a slot is what ``slot_of`` says, or free."""
        taken = set(self.slot_of[self.slot_of >= 0].tolist())
        self._reserved.clear()
        self._free = [slot for slot in range(self.slots) if slot not in taken]
        np.greater_equal(self.slot_of, 0, out=self.resident)
        self.version += 1

    def shrink(self, slots: int) -> dict[int, int]:
        """Have only ``slots``, and all of them free. Returns the residents that should move into them, and where each
        lay until now; they are to be reserved and committed again.

        Raises ValueError, and changes nothing, where the pinned residents have no room.
        """
        surplus = int(self.resident.sum()) - slots
        staying = self.resident.copy()
        if surplus > 0:
            candidates = self._candidates(_NONE)
            if len(candidates) < surplus:
                raise ValueError(f"{slots} slots have no room for the pinned experts")
            staying[self.eviction.victims(candidates, surplus)] = False
        experts = staying.nonzero()[0]
        moving = dict(zip(experts.tolist(), self.slot_of[experts].tolist(), strict=True))
        self.slots = slots
        self.slot_of[:] = -1
        self.recover()
        return moving

    def used(self, ids: Ids) -> None:
        """Count what the rows of a window selected, ``[T, K]``, and tell the eviction policy."""
        if len(ids) == 1:
            self.counts[ids[0]] += 1
        else:
            self.counts += np.bincount(ids.ravel(), minlength=self.counts.size)
        self.eviction.used(ids)
        self._ranked_at = -1

    def _victims(self, count: int, keep: Ids) -> list[int]:
        if self._ranked_at == self.version:
            kept = set(keep.tolist())
            if len(first := [expert for expert in self._ranked if expert not in kept][:count]) == count:
                return first
        candidates = self._candidates(keep)
        if len(candidates) < count:
            raise ValueError(f"{count} resident experts would have to go, but only {len(candidates)} can")
        return self.eviction.victims(candidates, count).tolist()

    def _candidates(self, keep: Ids) -> NDArray[np.intp]:
        leaving = self.resident & self._evictable
        leaving[keep] = False
        return leaving.nonzero()[0]
