"""Slots in the memory of a CUDA device, and the host memory through which experts come there.

Host writes to managed memory would have its pages move to the host and back, and an update of MLX's for each field of a
layer takes a tenth of a millisecond. So experts are read into memory that stays with the host, and one kernel, which
reads that over the bus, writes them to their slots in place, behind MLX's back: slots are arrays that MLX never assigns
to. What is to read a slot comes after the kernel, because it needs the kernel's output, or in a later graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from .. import cuda
from ..device import evaluate, on_cpu
from ..errors import InputError
from ..kernels import MAX_TOP_K, Build, Constants, KernelSpec, Launch
from .casts import HOST_TYPES
from .slots import Promise, Readers, SlotPool, Targets, UnifiedSlots, only_newest, with_parameters
from .waves import DECODE_ROWS
from .work import Compute, apply

if TYPE_CHECKING:
    from .ranges import Field

EXPERTS = 32  # that are staged at a time, at most
PAIRS = DECODE_ROWS * MAX_TOP_K  # of a window whose slots can be told later
_MOST = 256 << 20  # bytes that are staged at a time, unless a single expert has more
MAX_FIELDS = 12
_ALIGNED = 16  # words: the kernel copies fastest to where fields begin at lines of the cache
_THREADS = 256
_LAST_TICKET = (1 << 32) - 1
HEAD = 2  # numbers before the slots in orders: a ticket and how many experts


class Staging:
    """Host memory that the device reads, which the layers of a model share: experts on their way, and where they go.

    waiting: the layer whose experts are there and not yet on their way. dealt: what the kernel that took the latest
    gives; from then on the memory is free.
    """

    def __init__(self) -> None:
        self.waiting: StagedSlots | None = None
        self.dealt: mx.array | None = None
        self._tickets = 0
        self._words = 0  # of a record, at most
        self._orders: _Shared | None = None
        self._records: _Shared | None = None

    def expect(self, words: int) -> None:
        """Have room for records of so many words. To be called before anything is staged."""
        if words > self._words:
            self._words, self._records = words, None

    @property
    def orders(self) -> _Shared:
        self._orders = self._orders or _Shared(HEAD + EXPERTS + PAIRS)
        return self._orders

    @property
    def records(self) -> _Shared:
        self._records = self._records or _Shared(self.room)
        return self._records

    @property
    def room(self) -> int:
        """Words of ``records``."""
        return _room(self._words)

    def ticket(self) -> int:
        """For a kernel: each has its own, so that one whose promise was given up does nothing when it is computed after
        all.
        """
        self._tickets = self._tickets % _LAST_TICKET + 1
        return self._tickets

    def free(self) -> None:
        """Have all that is there brought to its slots, and wait until it is."""
        if self.waiting is not None:
            self.waiting.deal()
        self._wait()

    def _wait(self) -> None:
        if self.dealt is not None:
            evaluate(self.dealt, "copying experts to the device")
            self.dealt = None

    def tell(self, ticket: int, experts: Sequence[int], pairs: Sequence[int]) -> None:
        """What the kernel with ``ticket`` is to do: the slots of the staged experts, and of pairs. Waits for the one
        before.
        """
        self._wait()
        view, first = self.orders.view, HEAD + EXPERTS
        view[:HEAD] = ticket, len(experts)
        view[HEAD : HEAD + len(experts)] = experts
        view[first : first + len(pairs)] = pairs

    def told(self, dealt: mx.array) -> None:
        """The kernel that gives ``dealt`` does it, once that is computed. Cut short before this, it is done again."""
        self.dealt, self.waiting = dealt, None


class _Shared:
    """``words`` uint32 that the host writes through ``view`` and the device reads as ``array``."""

    def __init__(self, words: int):
        self.array = mx.array(np.zeros(words, np.uint32))
        evaluate(self.array, "making room for experts on their way to the device")
        self.view: NDArray[np.uint32] = np.array(self.array, copy=False)
        cuda.stay_on_host(self.view)


class StagedSlots:
    """Slots in memory of a CUDA device. staging: what other layers share. build: what builds the kernel; by default
    that of MLX's GPU backend. The other arguments are as of UnifiedSlots.

    Raises InputError for fields that are no whole words, or too many.
    """

    def __init__(
        self,
        experts: nn.Module,
        fields: Sequence[Field],
        count: int,
        staging: Staging | None = None,
        build: Build | None = None,
    ):
        self.pads, self.splits = not on_cpu(), on_cpu()
        # Other builders than MLX's run a kernel at once, before anything could be told.
        self.patient = build is None
        self._fields, self._build = fields, build
        self._sizes, self._starts, self._words = _layout(fields)
        self._spec, aliases = _spec(len(fields))
        self._constants: Constants = (*_constants(self._sizes, self._starts, self._words), *aliases)
        self._launches: dict[tuple[int, tuple[int, ...]], Launch] = {}
        self._staging = staging or Staging()
        self._staging.expect(self._words)
        self._targets: list[Targets] = []
        self._staged: list[int] = []  # the slots of what is staged
        self._readers = Readers()
        self._promise: Promise | None = None
        self._arrays = [mx.zeros((count, *field.shape), field.dtype) for field in fields]
        evaluate(self._arrays, f"making room for {count} experts")
        self.experts = with_parameters(experts, fields, self._arrays)

    def __call__(self, x: mx.array, slots: NDArray[np.int32], compute: Compute = apply) -> mx.array:
        self.deal()
        result = compute(self.experts, x, mx.array(slots.view(np.uint32)))
        self._readers.add(result, slots.ravel().tolist())
        return result

    @property
    def at_a_time(self) -> int:
        return min(EXPERTS, self._staging.room // self._words)

    def promise(self, x: mx.array, shape: tuple[int, ...], compute: Compute = apply) -> Promise | None:
        if not self.patient or prod(shape) > PAIRS:
            return None
        self.deal()  # the promise has room for what its own window needs
        self._readers.settle()
        ticket = self._staging.ticket()
        indices = self._launch(ticket, min(self.at_a_time, prod(shape)), shape)
        self._promise = promise = Promise(compute(self.experts, x, indices), partial(self._tell, ticket, indices))
        return promise

    def _tell(self, ticket: int, indices: mx.array, promise: Promise, slots: Sequence[int]) -> None:
        only_newest(promise, self._promise)
        if self._staging.waiting is self:
            staged = self._staged
        else:
            self._staging.free()
            staged = []
        self._staging.tell(ticket, staged, slots)
        self._staging.told(indices)
        self._readers.add(promise.outputs, slots)

    def write(self, slots: Sequence[int]) -> list[Targets]:
        self._staging.free()
        self._readers.settle(slots)
        self._staged = list(slots)
        if not self._targets:
            self._targets = [self._target(row) for row in range(self.at_a_time)]
        return self._targets[: len(slots)]

    def _target(self, row: int) -> Targets:
        record = self._staging.records.view[row * self._words : (row + 1) * self._words]
        parts = [record[start : start + size] for start, size in zip(self._starts, self._sizes, strict=True)]
        kinds = [HOST_TYPES[field.dtype] for field in self._fields]
        return [part.view(kind).reshape(f.shape) for part, kind, f in zip(parts, kinds, self._fields, strict=True)]

    def land(self) -> None:
        self._staging.waiting = self

    def deal(self) -> None:
        """Have all that is staged for this layer, told or not, brought to its slots before anything that is computed
        from now on.
        """
        if self._staging.waiting is self:
            ticket = self._staging.ticket()
            self._staging.tell(ticket, self._staged, ())
            dealt = self._launch(ticket, len(self._staged), (1,))
            evaluate(dealt, f"copying {len(self._staged)} experts to the device", wait=False)
            self._staging.told(dealt)
        elif self._staging.dealt is not None:
            evaluate(self._staging.dealt, "copying experts to the device", wait=False)

    def _launch(self, ticket: int, experts: int, shape: tuple[int, ...]) -> mx.array:
        """What deals out up to so many experts when it is computed, if the orders are for ``ticket`` then; uint32, the
        slots of pairs.
        """
        inputs = [self._staging.orders.array, mx.array([ticket, prod(shape)], mx.uint32)]
        inputs += [self._staging.records.array, *self._arrays]
        (slots,) = self._spec.run(inputs, self._launch_of(experts, shape), self._build)
        return slots

    def _launch_of(self, experts: int, shape: tuple[int, ...]) -> Launch:
        key = experts, shape
        if key not in self._launches:
            threads = -(-max(self._words, prod(shape)) // _THREADS) * _THREADS
            self._launches[key] = Launch(self._constants, (threads, experts, 1), (_THREADS, 1, 1), (shape,))
        return self._launches[key]

    def settle(self) -> None:
        self._readers.settle()

    def shrink(self, count: int, moves: Sequence[tuple[int, int]]) -> None:
        self._staging.free()
        self._readers.settle()
        sources = np.zeros(count, np.int32)
        for old, new in moves:
            sources[new] = old
        for i, field in enumerate(self._fields):
            array = self._arrays[i][mx.array(sources)]
            evaluate(array, f"making room for {count} experts")
            with_parameters(self.experts, [field], [array])
            self._arrays[i] = array


def staging_bytes(expert_bytes: int) -> int:
    """What Staging takes at most, for experts of so many bytes."""
    return 4 * (_room(expert_bytes // 4 + _ALIGNED * MAX_FIELDS) + HEAD + EXPERTS + PAIRS)


def _room(words: int) -> int:
    """Words for records of so many words."""
    return min(EXPERTS * words, max(words, _MOST // 4))


def _layout(fields: Sequence[Field]) -> tuple[list[int], list[int], int]:
    """Of a record, in words: the fields' sizes and where they begin, and its own size."""
    if len(fields) > MAX_FIELDS:
        raise InputError(f"an expert has {len(fields)} tensors, but at most {MAX_FIELDS} can be streamed to a GPU")
    for field in fields:
        if field.nbytes % 4:
            raise InputError(f"{field.name}: has {field.nbytes} bytes per expert; to a GPU only whole words can stream")
    sizes = [field.nbytes // 4 for field in fields]
    *starts, words = accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)
    return sizes, starts, words


def _constants(sizes: Sequence[int], starts: Sequence[int], words: int) -> Constants:
    none = [0] * (MAX_FIELDS - len(sizes))
    numbered = [(f"SIZE{i}", size) for i, size in enumerate([*sizes, *none])]
    numbered += [(f"START{i}", start) for i, start in enumerate([*starts, *none])]
    return ("HEAD", HEAD), ("EXPERTS", EXPERTS), ("WORDS", words), *numbered


@cache
def _spec(fields: int) -> tuple[KernelSpec, Constants]:
    """The kernel for so many fields, and names for the others."""
    names = [f"field{i}" for i in range(fields)]
    aliases = tuple((f"field{i}", "field0") for i in range(fields, MAX_FIELDS))
    return KernelSpec("deal", ("orders", "ticket", "staged", *names), (("slots", mx.uint32),)), aliases


def make_slots(experts: nn.Module, fields: Sequence[Field], count: int, staging: Staging) -> SlotPool:
    """The slots for the memory of the device in use. staging: for all layers of a model."""
    if mx.cuda.is_available() and not on_cpu():
        return StagedSlots(experts, fields, count, staging)
    return UnifiedSlots(experts, fields, count)
