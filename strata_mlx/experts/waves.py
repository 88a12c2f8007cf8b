"""A window that needs more experts than there are slots goes through them in waves: in which order, and what stays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .eviction import Ids
from .table import SlotTable

DECODE_ROWS = 16  # a window of more rows is a prompt's
STAYING_SHARE = 0.75  # of the slots, at most, that hold experts which stay while others go through in waves
NOTHING: Ids = np.zeros(0, np.intp)


def by_use(table: SlotTable, chosen: Ids, missing: Ids) -> tuple[Ids, Ids]:
    """For a window that selected ``chosen [..., K]``: the ``missing`` experts in the order in which they are to be
    read, and the residents that stay meanwhile.

    What the window uses most is in memory afterwards: such residents stay, and of the missing ones, such come last.
    """
    uses = np.bincount(chosen.ravel(), minlength=table.slot_of.size)
    first = uses.argsort(kind="stable")[::-1][: int(STAYING_SHARE * table.room(NOTHING))]
    return missing[uses[missing].argsort(kind="stable")], first[table.resident[first]]


def waves(table: SlotTable, missing: Ids, staying: Ids) -> Iterator[tuple[Ids, Ids]]:
    """The ``missing`` experts a wave at a time, and the residents that stay while it is read. The next wave is chosen
    when this one is resident.

    Two waves fit into the slots of those that do not stay, so that one is read while the one before computes.
    """
    half, before = max(1, table.room(staying) // 2), NOTHING
    while len(missing):
        keep = np.concatenate([staying, before])
        if not (room := table.room(keep)):  # for a single wave only: the one before has to be computed first
            keep, room = staying, table.room(staying)
        count = len(missing) if len(missing) <= room else min(half, room)
        before, missing = missing[:count], missing[count:]
        yield before, keep
