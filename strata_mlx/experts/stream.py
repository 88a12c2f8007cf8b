"""The experts of a MoE layer, of which only some are in memory: the others are read while those compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..device import evaluate, numbers
from ..routing.residency import HasResident
from .ahead import Ahead
from .eviction import Ids, Rows
from .slots import Promise, SlotPool
from .table import SlotTable
from .traffic import Traffic
from .waves import DECODE_ROWS, NOTHING, by_use, waves
from .work import Compute, Work, apply

if TYPE_CHECKING:
    from .store import ExpertStore

SPLIT_SECONDS = 1e-3  # of reading, from which on it pays to compute with the resident experts apart
# Pairs from which on another kernel computes: mlx-lm sorts them from 64 on, and CUDA's gather_qmm has one for few.
KERNEL_CHANGES = (64, 8)
TIME_ONE_IN = 64  # computations that reads overlap, to know which reads the device had to wait for


class StreamedExperts(nn.Module):
    """Takes the place of mlx-lm's SwitchGLU in a MoE block. Its output is the same to the bit, whatever is in memory.

    place: index of the layer in ``store``. traffic: counters, and ahead: the layer that is behind, which layers share.
    followed: whether another of them always comes after this one in the same forward.
    """

    def __init__(
        self, pool: SlotPool, table: SlotTable, store: ExpertStore, place: int, traffic: Traffic, ahead: Ahead
    ):
        super().__init__()
        self.table = table
        self.place = place
        self.followed = False
        self._pool, self._store, self._traffic, self._ahead = pool, store, traffic, ahead
        self._read_seconds = 0.0  # for an expert, a moving average
        self._pair_seconds, self._timed = 0.0, 0
        self._open = False  # while the table is between two consistent states

    def __call__(self, x: mx.array, ids: mx.array, work: Work) -> mx.array:
        """Apply the experts ``ids`` uint32 ``[B, T, K]`` to ``x [B, T, D]`` and return what ``work`` makes of it, on
        its way.

        Raises Fault where a read fails; nothing is lost by that but this window.
        """
        start = perf_counter()
        if self._open:
            self._recover()
        self._open = True
        try:
            result = self._serve(x, ids, work)
        except BaseException:
            self._recover()
            raise
        self._traffic.host_seconds += perf_counter() - start
        return result

    @property
    def experts(self) -> nn.Module:
        """The module whose parameters are the slots, to see their kind."""
        return self._pool.experts

    def _serve(self, x: mx.array, ids: mx.array, work: Work) -> mx.array:
        behind = self._ahead.take()
        if behind:
            behind.keep()
        start = perf_counter()
        wanted = self.table.wanted
        evaluate(ids if wanted is None else [ids, wanted], "choosing experts", wait=False)
        rows = ids.size // ids.shape[-1]
        waits = rows <= DECODE_ROWS and self._can_wait(ids.size)
        if work.meanwhile:  # apart, so that the ids do not wait for it
            evaluate(work.meanwhile, "computing the shared expert", wait=False)
        self._waited(perf_counter() - start)
        if behind:
            behind.end()
        # Until the ids are there, the host does all that does not need them.
        promise = self._promise(x, ids.shape, work.result) if rows <= DECODE_ROWS else None
        if promise is None:
            self._pool.settle()
        window = _Window(self, x, ids, promise, work)
        if waits and promise is not None:
            self._ahead.put(window)
            return promise.outputs
        self.table.rank()
        result = window.tell()
        evaluate(result, "computing experts", wait=False)
        window.end()
        if rows > DECODE_ROWS:  # results of many rows are not kept until the next window
            self._pool.settle()
        return result

    def _can_wait(self, pairs: int) -> bool:
        """Whether the next layer may be prepared before the experts of this one are known: where the promise is kept
        whatever they are, without waves, and without computing apart with those that are in memory.
        """
        may = self._ahead.open and self.followed and self._pool.patient
        return may and not self._pays_apart(pairs) and self.table.takes(pairs)

    def _pays_apart(self, missing: int, rows: int = 1) -> bool:
        """Whether ``missing`` experts take so long to read that it pays to compute with the resident ones apart."""
        return (self._pool.splits or rows > DECODE_ROWS) and missing * self._read_seconds > SPLIT_SECONDS

    def _waited(self, seconds: float) -> None:
        """Of the host's time so many were the device's."""
        self._traffic.compute_seconds += seconds
        self._traffic.host_seconds -= seconds

    @property
    def known(self) -> HasResident:
        """What routing may know of the experts in memory."""
        return self.table

    def owns(self, expert: int) -> bool:  # noqa: ARG002
        """Whether ``expert`` is computed here."""
        return True

    def _promise(self, x: mx.array, shape: tuple[int, ...], compute: Compute) -> Promise | None:
        return self._pool.promise(x, shape, compute)

    def _apply(self, x: mx.array, chosen: Ids, promise: Promise | None, work: Work) -> mx.array:
        """The layer's result: that of ``promise``, if it can be fulfilled."""
        table = self.table
        slots = table.slot_of[chosen]
        if chosen.size == chosen.shape[-1]:
            needed = chosen.reshape(-1)
            missing = needed[slots.reshape(-1) < 0]
        else:
            mask = np.zeros(table.slot_of.size, np.bool_)
            mask[chosen] = True
            needed = mask.nonzero()[0]
            missing = needed[table.slot_of[needed] < 0]
        self._traffic.window(chosen.size, len(needed), len(missing))
        if len(missing):
            if not table.fits(missing, needed):
                return self._in_groups(x, chosen, *by_use(table, chosen, missing), work)
            if len(missing) < len(needed) and self._pays_apart(len(missing), chosen.size // chosen.shape[-1]):
                return self._in_groups(x, chosen, missing, needed, work)
            self._fetch(missing.tolist(), needed)
            slots = table.slot_of[chosen]
        if promise is None:
            return self._pool(x, slots, work.result)
        promise.fulfil(slots)
        return promise.outputs

    def _keeps(self, promise: Promise, row: Sequence[int]) -> bool:
        """Fulfil ``promise`` for the experts of one row, if nothing speaks for computing in groups, as _apply() would.

        This is most of what the host does while a token is decoded: lists of a row are faster than arrays.
        """
        table = self.table
        slots = table.slots_of(row)
        missing = [expert for expert, slot in zip(row, slots, strict=True) if slot < 0]
        if missing:
            if not table.takes(len(row)) or (len(missing) < len(row) and self._pays_apart(len(missing))):
                return False
            self._fetch(missing, row)
            slots = table.slots_of(row)
        self._traffic.window(len(row), len(row), len(missing))
        promise.fulfil(slots)
        return True

    def _in_groups(self, x: mx.array, chosen: Ids, missing: Ids, staying: Ids, work: Work) -> mx.array:
        """Compute with what is resident while the missing experts are read, in waves if there is no room for all."""
        table = self.table
        flat, results, entries = chosen.ravel(), [], []
        group = table.resident[flat].nonzero()[0]
        busy_until = 0.0
        for wave, keep in waves(table, missing, staying):
            if len(group):
                results.append(self._pairs(x, flat, group, chosen.shape, work.pairs))
                entries.append(group)
                busy_until = max(busy_until, perf_counter()) + self._time(results[-1], len(group))
            self._fetch(wave.tolist(), keep, busy_until)
            member = np.zeros(table.slot_of.size, np.bool_)
            member[wave] = True
            group = member[flat].nonzero()[0]
        if len(group):
            results.append(self._pairs(x, flat, group, chosen.shape, work.pairs))
            entries.append(group)
        return work.mix(_in_order(x, results, entries, chosen.shape))

    def _pairs(self, x: mx.array, flat: Ids, entries: Ids, shape: tuple[int, ...], compute: Compute) -> mx.array:
        """Begin to compute the pairs ``token * K + rank``: ``[..., N, D]`` of one token, ``[N, 1, D]`` of several."""
        count = len(entries)
        if self._pool.pads and compute is apply:
            least = next((pairs for pairs in KERNEL_CHANGES if flat.size >= pairs), 0)
            entries = np.pad(entries, (0, max(0, least - count)), mode="edge")
        slots = self.table.slot_of[flat[entries]]
        if flat.size == shape[-1]:
            result = self._pool(x, slots.reshape(*shape[:-1], -1), compute)
        else:
            tokens = mx.array(entries // shape[-1])
            result = self._pool(x.reshape(-1, x.shape[-1])[tokens], slots[:, None], compute)
        if len(entries) > count:
            result = result[..., :count, :] if flat.size == shape[-1] else result[:count]
        evaluate(result, "computing experts", wait=False)
        return result

    def _time(self, result: mx.array, pairs: int) -> float:
        """How many seconds it takes to compute ``pairs``, of which ``result`` is: looked at once in a while."""
        if self._timed % TIME_ONE_IN == 0:
            start = perf_counter()
            evaluate(result, "computing experts")
            self._pair_seconds = (perf_counter() - start) / pairs
        self._timed += 1
        return self._pair_seconds * pairs

    def _fetch(self, experts: Sequence[int], keep: Ids | Sequence[int], busy_until: float = 0.0) -> None:
        """Read ``experts`` into slots; of the residents, ``keep`` stay. busy_until: when the device will be idle."""
        pairs = self.table.reserve(experts, keep)
        most = self._pool.at_a_time
        for first in range(0, len(pairs), most):
            self._bring(pairs[first : first + most], busy_until)
        self.table.commit(pairs)

    def _bring(self, pairs: Sequence[tuple[int, int]], busy_until: float) -> None:
        """Read experts into slots that are reserved for them."""
        begin = perf_counter()
        targets = self._pool.write([slot for _, slot in pairs])
        free = perf_counter()
        jobs = [(expert, target) for (expert, _), target in zip(pairs, targets, strict=True)]
        nbytes, seconds = self._store.fetch(self.place, jobs)
        done = perf_counter()
        self._pool.land()
        self._read_seconds += 0.1 * (seconds / len(pairs) - self._read_seconds)
        traffic = self._traffic
        traffic.bytes += nbytes
        traffic.read_seconds += seconds
        traffic.compute_seconds += free - begin
        traffic.stall_seconds += max(0.0, done - max(free, busy_until))
        traffic.host_seconds -= done - begin

    def warm(self, experts: Ids) -> None:
        """Read ``experts``, which are not resident and find room, before they are needed. That is no traffic of any
        request. Raises Fault where a read fails.
        """
        counters, self._traffic = self._traffic, Traffic()
        self._open = True
        try:
            self._fetch(experts.tolist(), NOTHING)
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
        self._store.drain()
        self.table.recover()
        self._open = False


class _Window:
    """One call of a layer, from when its experts are being chosen to when the device knows what to compute."""

    def __init__(self, layer: StreamedExperts, x: mx.array, ids: mx.array, promise: Promise | None, work: Work):
        self._layer, self._x, self._ids, self._promise, self._work = layer, x, ids, promise, work
        self._rows: Rows | None = None

    def tell(self) -> mx.array:
        """Wait for the ids, read what is missing, and return the layer's result, ready to be computed: that of the
        promise, if it can be fulfilled.
        """
        layer, start = self._layer, perf_counter()
        try:
            if self._promise is not None and self._ids.size == self._ids.shape[-1]:
                row = numbers(self._ids, "choosing experts")
                layer._waited(perf_counter() - start)
                self._rows = [row]
                if layer._keeps(self._promise, row):
                    return self._promise.outputs
            else:
                evaluate(self._ids, "choosing experts")
                layer._waited(perf_counter() - start)
            chosen = np.array(self._ids).astype(np.intp)
            self._rows = chosen.reshape(-1, chosen.shape[-1])
            return layer._apply(self._x, chosen, self._promise, self._work)
        except BaseException:
            layer._recover()
            raise

    def keep(self) -> None:
        """tell() where the result has been handed out already."""
        outputs = self.tell()
        assert self._promise is not None, "a promise was handed out"
        assert outputs is self._promise.outputs, "the promise is kept"

    def end(self) -> None:
        """Take note of what was selected; the device is at work meanwhile."""
        assert self._rows is not None, "tell() came before"
        self._layer.table.used(self._rows)
        self._layer._open = False


def _in_order(x: mx.array, results: list[mx.array], entries: Sequence[Ids], shape: tuple[int, ...]) -> mx.array:
    """The outputs for ``x``, ``shape + [D]``, of pairs that were computed in groups, ``entries`` in each; those that
    are in none have zeros.
    """
    total, count = math.prod(shape), sum(map(len, entries))
    axis = -2 if total == shape[-1] else 0
    if count < total:
        results = [*results, mx.zeros((*x.shape[:-1], 1, x.shape[-1]) if axis else (1, 1, x.shape[-1]), x.dtype)]
    place = np.full(total, count, np.uint32)
    for group, first in zip(entries, np.cumsum([0, *map(len, entries)]), strict=False):
        place[group] = np.arange(first, first + len(group))
    ordered = mx.take(mx.concatenate(results, axis), mx.array(place), axis)
    return ordered.reshape(*shape, ordered.shape[-1])
