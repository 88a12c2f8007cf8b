"""A window that needs more experts than there are slots goes through them in waves."""

from __future__ import annotations

import numpy as np

from .eviction import Ids
from .table import SlotTable

DECODE_ROWS = 16  # a window of more rows is a prompt's
PROMPT_SHARE = 0.5  # of the slots, which the waves of a prompt go through; what is in the others stays
NOTHING: Ids = np.zeros(0, np.intp)


def plan_waves(table: SlotTable, chosen: Ids, missing: Ids) -> tuple[list[Ids], Ids]:
    """The ``missing`` experts of a window that selected ``chosen [..., K]``, a wave at a time, and the residents that
    stay.

    Two waves fit into the slots that they use, so that one is read while the one before computes.
    """
    slots = table.room(NOTHING)
    if chosen.size > DECODE_ROWS * chosen.shape[-1]:
        slots = max(1, round(slots * PROMPT_SHARE))
    size = max(1, slots // 2)
    uses = np.bincount(chosen.ravel(), minlength=table.slot_of.size)
    order = missing[uses[missing].argsort(kind="stable")]  # the last ones stay
    return [order[i : i + size] for i in range(0, len(order), size)], table.staying(slots)
