"""The slots of a model's MoE layers without what lies in them: which experts windows would have to read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..experts.eviction import Ids, make_eviction
from ..experts.table import SlotTable
from ..experts.waves import by_use, waves


class LayerSlots:
    """Drives the table of one layer as StreamedExperts does, and reads nothing."""

    def __init__(self, experts: int, slots: int, eviction: str):
        self.table = SlotTable(experts, slots, make_eviction(eviction, experts))

    def window(self, chosen: Ids) -> tuple[int, int]:
        """The rows of a window have selected ``chosen [T, k]``: how many experts they need, and how many are read."""
        table, rows = self.table, len(chosen)
        table.rank()
        if rows == 1:
            needed = chosen[0]
        else:
            mask = np.zeros(table.slot_of.size, np.bool_)
            mask[chosen] = True
            needed = mask.nonzero()[0]
        missing = needed[table.slot_of[needed] < 0]
        if len(missing):
            staying = needed
            if not table.fits(missing, needed):
                missing, staying = by_use(table, chosen, missing)
            for wave, keep in waves(table, missing, staying):
                table.commit(table.reserve(wave.tolist(), keep))
        table.used(chosen)
        return len(needed), len(missing)


class ModelSlots:
    """Those of several layers, which windows go through together. A layer with a slot for each expert never reads."""

    def __init__(self, experts: int, slots: Sequence[int], eviction: str):
        self._layers = [LayerSlots(experts, count, eviction) if count < experts else None for count in slots]

    def window(self, chosen: Ids) -> NDArray[np.int32]:
        """``chosen [T, layers, k]``: by layer, how many experts are needed, and how many are read ``[2, layers]``."""
        counts = [layer.window(chosen[:, i]) if layer else (0, 0) for i, layer in enumerate(self._layers)]
        return np.array(counts, np.int32).reshape(-1, 2).T
