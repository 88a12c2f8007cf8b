"""From a memory budget to slots: what is left, when everything that a run needs has its memory, holds experts.

On the CPU, quantised weights that are small are kept as float32 where there is room, which makes each token faster.
Where experts stream, those of linear layers come after slots for half of the experts and before the other slots: of the
embedded model, whose float32 weights take as much as 102 of its 128 slots, a token misses 33 experts with 32 slots and
8 with 64. Where all experts find room, nothing streams, and both kinds come after them.

Sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..errors import InputError
from ..models.dequantised import Growth, room_for
from . import system
from .sizes import format_size, parse_size

CONTEXT = 4096  # tokens that caches are reckoned for, where nobody says
LEAST_CHUNK = 16  # rows of a prompt that are read at a time, at the least; a verify window has fewer
_RESIDENT_CHUNK = 64  # and where all experts are in memory: with fewer, streaming some reads a prompt faster
_SHARE = 4  # one part in so many of what is left may go to activations, so that experts are read for more rows at once
_RESERVE = 10  # `auto` leaves one part in so many of the system's memory to others
_JITTER = 3_000_000  # by which two processes that do the same were seen to differ


@dataclass(frozen=True)
class Activations:
    """What MLX holds at most while a chunk of a prompt goes through the layers.

    Reckoned from what the layers were measured to hold with MLX's op path: the arrays of one layer at a time, for each
    row and, in attention, for each row and token of context. in_flight: of operations that were begun before others had
    ended, whatever the rows.
    """

    per_row: int
    per_row_and_token: int
    context: int
    in_flight: int = 0

    def of(self, rows: int) -> int:
        return self.in_flight + rows * (self.per_row + self.per_row_and_token * (self.context + rows))


@dataclass(frozen=True)
class Needs:
    """What a run of a model needs.

    scope: whose memory. fixed: by part, whatever the slots. loading: beside weights and slots, while they are read.
    loading_resident: the same where all experts are read at once. activations: of a chunk; resident_nodes: what a row
    takes besides, where no layer is waited for. window: of decoding, beside the caches. per_slot: a slot in every MoE
    layer. experts: in a layer. least: slots that one token needs. step_size: rows of a chunk that are asked for.
    sequences: that are decoded together. float32, float32_experts: of weights that are faster so, of linear layers and
    of experts, where all of these are in memory.
    """

    scope: str
    fixed: dict[str, int]
    loading: int
    loading_resident: int
    activations: Activations
    resident_nodes: int
    window: int
    per_slot: int
    layers: int
    experts: int
    least: int
    step_size: int
    sequences: int = 1
    float32: tuple[Growth, ...] = ()
    float32_experts: tuple[Growth, ...] = ()

    @property
    def smallest(self) -> int:
        """The smallest budget that works."""
        streaming = sum(self.fixed.values()) + self._work(LEAST_CHUNK) + self.least * self.per_slot
        return streaming if self.least < self.experts else self.resident

    @property
    def resident(self) -> int:
        """The smallest budget in which all experts are in memory, and nothing streams."""
        return sum(self.fixed.values()) + self._resident_work + self.experts * self.per_slot

    @property
    def _resident_work(self) -> int:
        return max(self._work(min(_RESIDENT_CHUNK, self._rows), self.resident_nodes), self.loading_resident)

    def of_share(self, experts: int) -> Needs:
        """Of a run that computes only so many experts of each layer; all of its layers stream."""
        least = min(self.least, experts)
        return replace(
            self,
            experts=experts,
            least=least,
            loading_resident=self.loading,
            resident_nodes=0,
            float32_experts=(),
        )

    def fit(self, budget: int) -> Fit:
        """How ``budget`` is spent. More never gives fewer slots.

        Raises InputError that names the smallest budget that works.
        """
        if budget < self.smallest:
            raise InputError(
                f"a budget of {format_size(budget)} of {self.scope} is too small for this model: the smallest that "
                f"works is {format_size(self.smallest + self._jitter, up=True)} ({self._spent()}); "
                f"{'a shorter context needs' if self.sequences == 1 else 'fewer or shorter contexts need'} less"
            )
        left = budget - sum(self.fixed.values())
        if budget >= self.resident:
            left -= self.experts * self.per_slot
            most = room_for(self.float32 + self.float32_experts, self._resident_work)
            larger = min(left - self._resident_work, most)
            work = min(left - larger, self._most(self.resident_nodes))
            return self._fit(budget, self.experts, work, larger, streams=False)
        least = self._work(LEAST_CHUNK)
        work = max(least, min((left - self.least * self.per_slot) // _SHARE, self._most()))
        first = max(self.least, -(-self.experts // 2))
        larger = max(0, min(left - work - first * self.per_slot, room_for(self.float32, least)))
        slots = min((left - work - larger) // self.per_slot, self.experts - 1)
        if slots == self.experts - 1:
            work = min(left - larger - slots * self.per_slot, self._most())
        return self._fit(budget, slots, work, larger, streams=True)

    @property
    def _jitter(self) -> int:
        return _JITTER if self.fixed.get("process") else 0

    @property
    def _rows(self) -> int:
        """The most rows that a chunk can have."""
        return min(self.step_size, self.activations.context)

    def _work(self, rows: int, nodes: int = 0) -> int:
        """Of reading ``rows`` of a prompt, of decoding or of loading, which never happen at the same time."""
        return max(self.activations.of(rows) + rows * nodes, self.window, self.loading)

    def _most(self, nodes: int = 0) -> int:
        """Of all that may be asked for."""
        return self._work(self._rows, nodes)

    def _chunk(self, work: int, nodes: int) -> int:
        """The most rows, a power of two unless it is what was asked for, that go through the layers in ``work``."""
        if self._most(nodes) <= work:
            return self.step_size
        rows = 1
        while 2 * rows <= self._rows and self._work(2 * rows, nodes) <= work:
            rows *= 2
        return rows

    def _spent(self) -> str:
        parts = {
            **self.fixed,
            "work": self._work(LEAST_CHUNK),
            f"{self.least} slots a layer": self.least * self.per_slot,
        }
        return ", ".join(f"{name.replace('_', ' ')} {format_size(size)}" for name, size in parts.items() if size)

    def _fit(self, budget: int, slots: int, work: int, larger: int, streams: bool) -> Fit:
        chunk = self._chunk(work, 0 if streams else self.resident_nodes)
        parts = {**self.fixed, "work": work, "experts": slots * self.per_slot, "float32": larger}
        return Fit(budget, self.scope, streams, slots, self.experts, self.layers, self.per_slot, chunk, parts)


@dataclass(frozen=True)
class Fit:
    """How a budget is spent.

    scope: whose memory. streams: False where all experts are in memory. slots: of each of ``layers`` MoE layers with
    ``experts`` each; a slot in all of them takes ``per_slot``. chunk: rows of a prompt that are read at a time.
    parts: bytes by what they are for, at most ``budget`` together.
    """

    budget: int
    scope: str
    streams: bool
    slots: int
    experts: int
    layers: int
    per_slot: int
    chunk: int
    parts: dict[str, int]

    def __str__(self) -> str:
        held = f"{self.slots / self.experts:.0%} of {self.experts} x {self.layers} experts in memory"
        if not self.streams:
            held = f"all {self.experts} x {self.layers} experts in memory, nothing streams"
        return f"{format_size(self.budget)} of {self.scope}: {held}; prompts are read {self.chunk} tokens at a time"

    def to_dict(self) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "scope": self.scope,
            "streams": self.streams,
            "slots": self.slots,
            "experts": self.experts,
            "moe_layers": self.layers,
            "prefill_step_size": self.chunk,
            "bytes": self.parts,
        }


def budget_bytes(memory: int | str) -> int:
    """What ``memory`` asks for: bytes, an amount such as "12GB", or "auto".

    "auto" is what the system can give now, on top of what the process has, less a tenth of the machine's memory; on
    Apple silicon not more than Metal recommends to use. Limits of control groups (containers) count. On a GPU with
    memory of its own it is what that has left, and what MLX has of it, less a tenth of all.
    """
    if isinstance(memory, int):
        return parse_size(str(memory))
    if memory.strip().lower() != "auto":
        return parse_size(memory)
    if system.on_gpu_of_its_own():
        gpu = mx.device_info(mx.gpu)
        return gpu_memory() + int(gpu["free_memory"]) - int(gpu["total_memory"]) // _RESERVE
    most = system.footprint() + system.available() - system.total() // _RESERVE
    if mx.metal.is_available():
        most = min(most, int(mx.device_info(mx.gpu)["max_recommended_working_set_size"]))
    if most <= 0:
        raise InputError("memory auto: the system has no memory to give; close programs, or name an amount")
    return most


def gpu_memory() -> int:
    """What MLX has of a GPU's own memory."""
    return mx.get_active_memory() + mx.get_cache_memory()
