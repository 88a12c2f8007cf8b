"""The experts of a MoE layer, of which only some are in memory: the others are read while those compute."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from ..device import evaluate
from .eviction import Ids
from .slots import SlotPool
from .table import SlotTable
from .traffic import Traffic

if TYPE_CHECKING:
    from .reads import Reads
    from .store import ExpertStore

DECODE_ROWS = 16  # a window of more rows is a prompt's
PROMPT_SHARE = 0.5  # of the slots, which the waves of a prompt go through; what is in the others stays
NOTHING: Ids = np.zeros(0, np.intp)


class StreamedExperts(nn.Module):
    """Takes the place of mlx-lm's SwitchGLU in a MoE block. Its output is the same to the bit, whatever is in memory.

    place: index of the layer in ``store``. traffic: counters, which layers share.
    """

    def __init__(self, pool: SlotPool, table: SlotTable, store: ExpertStore, place: int, traffic: Traffic):
        super().__init__()
        self.table = table
        self.place = place
        self._pool, self._store, self._traffic = pool, store, traffic
        self._reads: Reads | None = None  # while it is not sure that they have ended
        self._open = False  # while the table is between two consistent states

    def __call__(self, x: mx.array, ids: mx.array, meanwhile: mx.array | None = None) -> mx.array:
        """Apply the experts ``ids`` uint32 ``[B, T, K]`` to ``x [B, T, D]``: ``[B, T, K, D]``, by rank.

        meanwhile: what the device is to compute next, while the host waits for the ids and for reads.
        Raises Fault where a read fails; nothing is lost by that but this window.
        """
        start = perf_counter()
        evaluate(ids, "choosing experts", wait=False)
        if meanwhile is not None:
            evaluate(meanwhile, "computing the shared expert", wait=False)
        launched = perf_counter()
        evaluate(ids, "choosing experts")
        chosen = np.array(ids)
        known = perf_counter()
        if self._open:
            self._recover()
        self._open = True
        try:
            result = self._apply(x, chosen)
        except BaseException:
            self._recover()
            raise
        self._open = False
        self._traffic.compute_seconds += known - launched
        self._traffic.host_seconds += launched - start + perf_counter() - known
        return result

    def _apply(self, x: mx.array, chosen: NDArray[np.uint32]) -> mx.array:
        traffic, table = self._traffic, self.table
        self._pool.settle()  # without a wait: what came before the ids is computed
        rows = chosen.reshape(-1, chosen.shape[-1])
        prompt = len(rows) > DECODE_ROWS
        traffic.windows += 1
        traffic.picks += chosen.size
        table.used(rows, prompt)
        slots = table.slot_of[chosen]
        needed = np.zeros(table.slot_of.size, np.bool_)
        needed[chosen] = True
        missing = (needed & ~table.resident).nonzero()[0]
        experts = needed.nonzero()[0]
        traffic.hits += len(experts) - len(missing)
        traffic.misses += len(missing)
        if not len(missing):
            result = self._pool(x, slots)
        elif len(missing) <= table.room(experts):
            result = self._in_groups(x, chosen, [missing], experts)
        else:
            result = self._in_groups(x, chosen, *self._waves(chosen, missing, prompt))
        if prompt:  # results of many rows are not kept until the next window
            self._pool.settle()
        return result

    def _waves(self, chosen: NDArray[np.uint32], missing: Ids, prompt: bool) -> tuple[list[Ids], Ids]:
        """The missing experts of a window that needs more than there are slots, a wave at a time, and the residents
        that stay.

        Two waves fit into the slots that they use, so that one is read while the one before computes.
        """
        table = self.table
        slots = table.room(NOTHING)
        if prompt:
            slots = max(1, round(slots * PROMPT_SHARE))
        size = max(1, slots // 2)
        uses = np.bincount(chosen.ravel(), minlength=table.slot_of.size)
        order = missing[uses[missing].argsort(kind="stable")]  # the last ones stay
        return [order[i : i + size] for i in range(0, len(order), size)], table.staying(slots)

    def _in_groups(self, x: mx.array, chosen: NDArray[np.uint32], waves: list[Ids], staying: Ids) -> mx.array:
        """Compute with what is resident while the first wave is read, and with each wave while the next one is."""
        table, pool = self.table, self._pool
        flat, results, entries = chosen.ravel(), [], []
        group, before = table.resident[flat].nonzero()[0], NOTHING
        for wave in waves:
            if len(group) and (pool.splits or len(waves) > 1):
                results.append(self._pairs(x, flat, group, chosen.shape))
                entries.append(group)
            self._fetch(wave, np.concatenate([staying, before]))
            member = np.zeros(table.slot_of.size, np.bool_)
            member[wave] = True
            group, before = member[flat].nonzero()[0], wave
        if not results:
            return pool(x, table.slot_of[chosen])
        results.append(self._pairs(x, flat, group, chosen.shape))
        entries.append(group)
        axis = -2 if len(flat) == chosen.shape[-1] else 0
        rank = np.empty(flat.size, np.uint32)
        rank[np.concatenate(entries)] = np.arange(flat.size, dtype=np.uint32)
        ordered = mx.take(mx.concatenate(results, axis), mx.array(rank), axis)
        return ordered.reshape(*chosen.shape, ordered.shape[-1])

    def _pairs(self, x: mx.array, flat: NDArray[np.uint32], entries: Ids, shape: tuple[int, ...]) -> mx.array:
        """Begin to compute the pairs ``token * K + rank``: ``[..., N, D]`` of one token, ``[N, 1, D]`` of several."""
        slots = self.table.slot_of[flat[entries]]
        if flat.size == shape[-1]:
            result = self._pool(x, slots.reshape(*shape[:-1], -1))
        else:
            tokens = mx.array(entries // shape[-1])
            result = self._pool(x.reshape(-1, x.shape[-1])[tokens], slots[:, None])
        evaluate(result, "computing experts", wait=False)
        return result

    def _fetch(self, experts: Ids, keep: Ids) -> None:
        """Read ``experts`` into slots; of the residents, ``keep`` stay."""
        pairs = self.table.reserve(experts.tolist(), keep)
        begin = perf_counter()
        targets = self._pool.write([slot for _, slot in pairs])
        free = perf_counter()
        self._reads = reads = self._store.start(self.place, list(zip(experts.tolist(), targets, strict=True)))
        reads.wait()
        self._reads = None
        done = perf_counter()
        self._pool.land()
        self.table.commit(pairs)
        traffic = self._traffic
        traffic.bytes += reads.nbytes
        traffic.read_seconds += reads.seconds
        traffic.compute_seconds += free - begin
        traffic.stall_seconds += done - free
        traffic.host_seconds -= done - begin

    def warm(self, experts: Ids) -> None:
        """Read ``experts``, which are not resident and find room, before they are needed. That is no traffic of any
        request. Raises Fault where a read fails.
        """
        counters, self._traffic = self._traffic, Traffic()
        self._open = True
        try:
            self._fetch(experts, NOTHING)
        finally:
            self._traffic = counters
            self._recover()

    def shrink(self, slots: int) -> None:
        """Have only so many slots; the experts that the eviction policy would keep stay."""
        self._open = True
        try:
            moving = self.table.shrink(slots)
            pairs = self.table.reserve(list(moving), NOTHING)
            self._pool.shrink(slots, [(moving[expert], slot) for expert, slot in pairs])
            self.table.commit(pairs)
        finally:
            self._recover()

    def _recover(self) -> None:
        """After a window that was cut short: no read may write any more, and what had not ended was not resident."""
        if self._reads:
            self._reads.drain()
            self._reads = None
        self.table.recover()
        self._open = False
