"""The experts of a MoE layer that one rank has, and the exchange that adds up what all ranks compute."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..device import evaluate
from ..experts.eviction import Ids
from ..experts.slots import Promise
from ..experts.stream import StreamedExperts
from ..experts.table import SlotTable
from ..experts.waves import DECODE_ROWS, NOTHING, by_use
from ..experts.work import Work
from .placement import Placement, share
from .ranks import Ranks

if TYPE_CHECKING:
    from ..models.moe import MoEBlock


@dataclass
class Wire:
    """What a rank has sent for the exchanges of its layers. bytes: by the algorithm of a ring; a mesh sends as many in
    an all-gather, and more in an all-reduce.
    """

    exchanges: int = 0
    bytes: int = 0


class Everywhere:
    """Which experts of a layer are in memory at any rank, as it was at the end of the window before.

    Every rank knows the same of it. Until somebody asks, nothing of it is exchanged, and nothing is known.
    """

    def __init__(self, experts: int):
        self.version = 0
        self.asked = False
        self.wanted: Any = None  # for the table of this rank
        self._resident, self._slots = np.zeros(experts, np.bool_), experts
        self._latest: mx.array | None = None  # uint8 [ranks, bytes of pack()]

    @property
    def resident(self) -> NDArray[np.bool_]:
        """Bool ``[E]``."""
        self._read()
        return self._resident

    @property
    def slots(self) -> int:
        """Of all ranks; until that is known, more than can be filled."""
        self._read()
        return self._slots

    def pack(self, table: SlotTable) -> NDArray[np.uint8]:
        """What a rank tells the others: slots, and a bit for each expert, in whole words."""
        bits = np.packbits(table.resident)
        return np.concatenate([np.array([table.slots], np.uint32).view(np.uint8), np.pad(bits, (0, -len(bits) % 4))])

    def update(self, told: mx.array) -> None:
        """Take note of what all ranks have told, uint8 ``[ranks, bytes]``, which is on its way."""
        self._latest = told
        self.version += 1

    def _read(self) -> None:
        self.asked = True
        if self._latest is not None:
            evaluate(self._latest, "hearing which experts the ranks have in memory")
            told = np.array(self._latest)
            self._slots = int(np.ascontiguousarray(told[:, :4]).view(np.uint32).sum())
            bits = np.unpackbits(told[:, 4:], axis=1, count=self._resident.size)
            self._resident = np.asarray(bits.any(axis=0))
            self._latest = None


class OwnedExperts(StreamedExperts):
    """A rank's share of a layer's experts. The outputs of the others are zeros, and ``across`` adds up the parts.

    mine: which they are, bool ``[E]``. wire: counters, which layers share. The rest is as of StreamedExperts.
    """

    def __init__(self, *parts: Any, ranks: Ranks, mine: NDArray[np.bool_], wire: Wire):
        super().__init__(*parts)
        self._ranks, self._mine, self._wire = ranks, mine, wire
        self._everywhere = Everywhere(mine.size)

    @property
    def known(self) -> Everywhere:
        return self._everywhere

    def owns(self, expert: int) -> bool:
        return bool(self._mine[expert])

    def across(self, part: mx.array) -> mx.array:
        """The sum of ``part [B, T, D]`` over all ranks, with the same bits on every one.

        The rows of decoding go to everybody in one round, and are added up there: that takes half the steps of an
        all-reduce, which sends fewer bytes where there are more than two ranks. The many rows of a prompt are reduced.
        """
        ranks, told = self._ranks, None
        if self._everywhere.asked:
            told = mx.array(self._everywhere.pack(self.table))
        if part.size // part.shape[-1] > DECODE_ROWS:
            total = mx.distributed.all_sum(part, group=ranks.group)
            self._sent(part.nbytes, 2 * (ranks.size - 1) / ranks.size)
            if told is not None:
                everybody = mx.distributed.all_gather(told[None], group=ranks.group)
                # On its way before anything else, for that is the order on every rank.
                evaluate(everybody, "telling the ranks which experts are in memory", wait=False)
                self._sent(told.nbytes, ranks.size - 1)
                self._everywhere.update(everybody)
            return total
        if told is None:
            self._sent(part.nbytes, ranks.size - 1)
            return mx.distributed.all_gather(part[None], group=ranks.group).sum(axis=0)
        message = mx.concatenate([part.reshape(-1).view(mx.uint8), told])
        self._sent(message.nbytes, ranks.size - 1)
        everybody = mx.distributed.all_gather(message[None], group=ranks.group)
        self._everywhere.update(everybody[:, part.nbytes :])
        parts = mx.contiguous(everybody[:, : part.nbytes]).view(part.dtype)
        return parts.reshape(ranks.size, *part.shape).sum(axis=0)

    def _sent(self, nbytes: int, times: float) -> None:
        self._wire.exchanges += 1
        self._wire.bytes += round(nbytes * times)

    def __call__(self, *window: Any, **options: Any) -> mx.array:
        self.table.wanted, self._everywhere.wanted = self._everywhere.wanted, None
        with self._ranks.layer():
            return super().__call__(*window, **options)

    def _promise(self, *_window: Any) -> Promise | None:
        """How many pairs there will be is not known before the ids are."""
        return None

    def _can_wait(self, _pairs: int) -> bool:
        return False

    def _apply(self, x: mx.array, chosen: Ids, _promise: Promise | None, work: Work) -> mx.array:
        table = self.table
        self._ranks.compare(chosen)
        own = chosen[self._mine[chosen]]
        needed = np.unique(own)
        missing = needed[table.slot_of[needed] < 0]
        self._traffic.window(own.size, len(needed), len(missing))
        if len(missing):
            if not table.fits(missing, needed):
                return self._in_groups(x, chosen, *by_use(table, own, missing), work)
            if len(missing) < len(needed) and self._pays_apart(len(missing), chosen.size // chosen.shape[-1]):
                return self._in_groups(x, chosen, missing, needed, work)
            self._fetch(missing.tolist(), needed)
        return self._in_groups(x, chosen, NOTHING, needed, work)


@dataclass(frozen=True, eq=False)
class Share:
    """The experts that a rank has in the layers of a model. wire: counts what the layers send."""

    ranks: Ranks
    placement: Placement
    wire: Wire = field(default_factory=Wire)

    def most(self, experts: int) -> int:
        """How many of ``experts`` it has in a layer, at most."""
        return share(experts, self.ranks.size)

    def mine(self, layer: int) -> NDArray[np.bool_]:
        """Bool ``[E]``."""
        return self.placement.of(layer) == self.ranks.rank

    def pinned(self, pins: Mapping[int, Collection[int]]) -> dict[int, list[int]]:
        """Those of the experts that are to be pinned, by the index of their layer."""
        return {layer: [expert for expert in experts if self.mine(layer)[expert]] for layer, experts in pins.items()}

    def experts(self, block: MoEBlock, *parts: Any) -> OwnedExperts:
        """What takes the place of StreamedExperts in ``block``, made of the same ``parts``."""
        experts = OwnedExperts(*parts, ranks=self.ranks, mine=self.mine(block.layer), wire=self.wire)
        block.across = experts.across
        return experts
