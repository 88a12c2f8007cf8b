"""The slots of one layer's experts in device memory, and the computation with what lies in them.

The arrays are private. A result that reads them comes from a pool's own call, which remembers it; a slot is written
only after write(), which first has every result computed that may read the slot. So a slot in use is never overwritten.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from struct import pack_into
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from numpy.typing import NDArray

from ..device import evaluate, on_cpu
from .files import PAGE
from .work import Compute, apply

if TYPE_CHECKING:
    from .ranges import Field

Targets = Sequence[NDArray[Any]]  # where the fields of one expert are to be written


class SlotPool(Protocol):
    """Slots for the experts of one layer.

    experts: an mlx-lm SwitchGLU, whose parameters are the slots: for what computes with them, and to see their kind.

    pads: whether a call for a part of a window's pairs computes other bits than one for all of them, unless it has as
    many pairs as choose the same kernel.

    patient: whether the next layer is prepared before a promise is fulfilled: on the CPU and on CUDA, where the host is
    what bounds small models. On Metal that has not been measured.

    splits: whether it pays to compute few rows with experts that are in memory while others are read slowly: on the
    CPU, where an expert takes milliseconds. A CUDA device has computed them before the launches for that are prepared,
    and Metal is taken to be like that.
    """

    experts: nn.Module
    pads: bool
    patient: bool
    splits: bool

    @property
    def at_a_time(self) -> int:
        """How many experts write() takes."""

    def __call__(self, x: mx.array, slots: NDArray[np.int32], compute: Compute = apply) -> mx.array:
        """Apply the experts in ``slots [..., K]`` to ``x [..., D]``, lazily: ``[..., K, D]``."""

    def promise(self, x: mx.array, shape: tuple[int, ...], compute: Compute = apply) -> Promise | None:
        """A call as above whose slots, of ``shape``, are told later; None where the device does not allow that.

        Every result that reads a slot has been computed before this returns. There is one promise at a time.
        """

    def write(self, slots: Sequence[int]) -> list[Targets]:
        """Where the experts for ``slots`` are to be written: one array per field and slot, C-contiguous, bfloat16 as
        uint16.

        Every result that reads one of the slots has been computed before this returns.
        """

    def land(self) -> None:
        """What write() gave last is filled: calls from now on see the experts."""

    def settle(self) -> None:
        """Wait for every result that reads a slot."""

    def shrink(self, count: int, moves: Sequence[tuple[int, int]]) -> None:
        """Have only ``count`` slots; ``moves`` are the old and the new slot of each expert that is kept.

        Cut short, it leaves at least ``count`` slots, and nothing of what was in them.
        """


class Readers:
    """Results that may not have been computed yet, and the slots that each of them reads."""

    def __init__(self) -> None:
        self._pending: list[tuple[mx.array, frozenset[int]]] = []

    def add(self, result: mx.array, slots: Sequence[int]) -> None:
        self._pending.append((result, frozenset(slots)))

    def settle(self, slots: Sequence[int] | None = None) -> None:
        """Wait for those that read one of ``slots``; None means any."""
        due = [result for result, read in self._pending if slots is None or not read.isdisjoint(slots)]
        if due:
            evaluate(due, "computing with experts in memory")
            self._pending = [] if slots is None else [entry for entry in self._pending if entry[1].isdisjoint(slots)]


class Promise:
    """A call of a SlotPool whose slots are told later.

    outputs: of the call, lazily. They must not be computed before fulfil(). tell: given this and the slots in order,
    has the device find them there.
    """

    def __init__(self, outputs: mx.array, tell: Callable[[Promise, Sequence[int]], None]):
        self.outputs = outputs
        self._tell = tell

    def fulfil(self, slots: NDArray[np.int32] | Sequence[int]) -> None:
        """Tell the slots: an array of the shape, or a list of them all. Raises ValueError where there is a newer
        promise, which has taken the place of this one.
        """
        self._tell(self, slots.ravel().tolist() if isinstance(slots, np.ndarray) else slots)


class _Indices:
    """The slots of calls of one shape, to be told by the host. promise: whose they are."""

    def __init__(self, shape: tuple[int, ...]):
        self.array = mx.array(np.zeros(shape, np.uint32))
        self._view = np.array(self.array, copy=False).data.cast("B")
        self.promise: Promise | None = None

    def tell(self, promise: Promise, slots: Sequence[int]) -> None:
        only_newest(promise, self.promise)
        pack_into(f"{len(slots)}I", self._view, 0, *slots)


def only_newest(promise: Promise, newest: Promise | None) -> None:
    """Raise ValueError where there is a newer promise."""
    if promise is not newest:
        raise ValueError("this promise was given up for another one")


class UnifiedSlots:
    """Slots in memory that host and device share (CPU, Metal): the host writes straight into MLX's buffers.

    experts: an mlx-lm SwitchGLU, whose parameters are not looked at. fields: of its parameters. count: of slots.
    The buffers are never assigned to through MLX, which may move them away from under the host's views.
    """

    at_a_time = sys.maxsize

    def __init__(self, experts: nn.Module, fields: Sequence[Field], count: int):
        self.pads, self.patient, self.splits = not on_cpu(), on_cpu(), on_cpu()
        self._fields = fields
        self._arrays = [_room(field, count) for field in fields]
        self._views = [_view(array) for array in self._arrays]
        self.experts = with_parameters(experts, fields, self._arrays)
        self._targets: list[Targets | None] = [None] * count  # by slot, made when first written
        self._readers = Readers()
        self._indices: dict[tuple[int, ...], _Indices] = {}  # by shape

    def __call__(self, x: mx.array, slots: NDArray[np.int32], compute: Compute = apply) -> mx.array:
        result = compute(self.experts, x, mx.array(slots.view(np.uint32)))
        self._readers.add(result, slots.ravel().tolist())
        return result

    def promise(self, x: mx.array, shape: tuple[int, ...], compute: Compute = apply) -> Promise:
        self._readers.settle()  # the last one that had the indices
        if shape not in self._indices:
            self._indices[shape] = _Indices(shape)
        indices = self._indices[shape]
        outputs = compute(self.experts, x, indices.array)
        indices.promise = promise = Promise(outputs, partial(self._tell, indices))
        return promise

    def _tell(self, indices: _Indices, promise: Promise, slots: Sequence[int]) -> None:
        indices.tell(promise, slots)
        self._readers.add(promise.outputs, slots)

    def write(self, slots: Sequence[int]) -> list[Targets]:
        self._readers.settle(slots)
        return [self._targets[slot] or self._target(slot) for slot in slots]

    def _target(self, slot: int) -> Targets:
        target = self._targets[slot] = [view[slot] for view in self._views]
        return target

    def land(self) -> None:
        """Nothing is left to do."""

    def settle(self) -> None:
        self._readers.settle()

    def shrink(self, count: int, moves: Sequence[tuple[int, int]]) -> None:
        self._readers.settle()
        self._targets = [None] * count
        for i, field in enumerate(self._fields):
            array = _room(field, count)
            view = _view(array)
            for old, new in moves:
                view[new] = self._views[i][old]
            with_parameters(self.experts, [field], [array])
            self._arrays[i], self._views[i] = array, view


def _room(field: Field, count: int) -> mx.array:
    """``[count, *field.shape]``, which begins at the field's place: at a page on Metal, where that was not tried."""
    nbytes, place = count * field.nbytes, field.place if on_cpu() else 0
    buffer = mx.zeros((nbytes + PAGE,), mx.uint8)
    evaluate(buffer, f"making room for {count} experts")
    start = (place - np.array(buffer, copy=False).__array_interface__["data"][0]) % PAGE
    array = buffer[start : start + nbytes].view(field.dtype).reshape(count, *field.shape)
    evaluate(array, f"making room for {count} experts")
    return array


def _view(array: mx.array) -> NDArray[Any]:
    """The memory of ``array`` itself, writable; bfloat16 as uint16."""
    shown = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    evaluate(shown, "showing slots to the host")
    return np.array(shown, copy=False)


def with_parameters(experts: nn.Module, fields: Sequence[Field], arrays: Sequence[mx.array]) -> nn.Module:
    """``experts`` with ``arrays`` in the place of its parameters."""
    names = [field.name for field in fields]
    experts.update(tree_unflatten(list(zip(names, arrays, strict=True))))
    return experts
