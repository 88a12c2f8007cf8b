"""A model whose experts stay on disk: which layers stream, and all that they share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import InputError
from ..models.moe import MoEBlock, blocks
from ..models.plan import ModelPlan
from .ahead import Ahead
from .disk import DiskSettings
from .eviction import DEFAULT_EVICTION, make_eviction
from .staged import Staging, make_slots
from .store import ExpertStore
from .stream import StreamedExperts
from .table import SlotTable
from .traffic import Traffic

if TYPE_CHECKING:
    from ..parallel.experts import Share

_WARMED_AT_ONCE = 16  # experts, which are read together before anything is needed


class Streaming:
    """The streamed layers of a model.

    store: where their experts are read from. layers: StreamedExperts by the index of their MoE layer, an MTP head's
    last; a layer that has a slot for each of its experts is an ordinary one and not among them.
    """

    def __init__(
        self,
        model: nn.Module,
        store: ExpertStore,
        layers: dict[int, StreamedExperts],
        traffic: Traffic,
        ahead: Ahead,
        least: int,
    ):
        self.store, self.layers, self._traffic, self._ahead, self._least = store, layers, traffic, ahead, least
        self._blocks = blocks(model)
        trunk = sorted(index for index in layers if index < len(model.layers))
        for index in trunk[:-1]:
            layers[index].followed = True
        self._close = weakref.finalize(self, store.close)  # also when the interpreter ends

    @property
    def paths(self) -> list[str]:
        """Of the modules whose parameters are not in memory."""
        return [f"{self.store.layers[layer.place]}.switch_mlp" for layer in self.layers.values()]

    @property
    def tables(self) -> dict[int, SlotTable]:
        """By the index of the MoE layer."""
        return {index: layer.table for index, layer in self.layers.items()}

    def traffic(self) -> Traffic:
        """What streaming has come to until now; the difference of two of these is what lies between."""
        return replace(self._traffic)

    def a_layer_ahead(self) -> AbstractContextManager[None]:
        """As ahead.a_layer_ahead(). Where choosing experts may compute something, the layers go one by one."""
        return self._ahead if all(block.routing.lazy for block in self._blocks) else nullcontext()

    @property
    def slots(self) -> int:
        """Of the layer that has the fewest."""
        return min(layer.table.slots for layer in self.layers.values())

    @property
    def least(self) -> int:
        """With how many slots a layer still works."""
        return self._least

    @property
    def slot_bytes(self) -> int:
        """What one slot in each of the layers takes."""
        return sum(map(self.expert_bytes, self.layers))

    def expert_bytes(self, index: int) -> int:
        """Of one expert of a layer, in memory."""
        return self.store.expert_bytes(self.layers[index].place)

    def shrink(self, slots: int) -> None:
        """Have ``slots``, at least ``least``, in each layer that has more."""
        for layer in self.layers.values():
            if layer.table.slots > slots:
                layer.shrink(slots)

    def warm(self, wanted: Mapping[int, Sequence[int]], report: Callable[[int], object] = lambda _: None) -> None:
        """Read experts before they are needed: by the index of the MoE layer, the most wanted first, as many as fit.

        report: called with the bytes that have come to memory since the last call. Raises Fault where a read fails.
        """
        for index, layer in self.layers.items():
            table = layer.table
            absent = [e for e in wanted.get(index, ()) if layer.owns(e) and not table.resident[e]][: table.free]
            for start in range(0, len(absent), _WARMED_AT_ONCE):
                experts = absent[start : start + _WARMED_AT_ONCE]
                layer.warm(np.array(experts, np.intp))
                report(len(experts) * self.expert_bytes(index))

    def close(self) -> None:
        """Close the files. The model can no longer be run."""
        self._close()


def streaming_of(model: nn.Module) -> Streaming | None:
    """What ``model`` streams; None where all of it is in memory."""
    return getattr(model, "streaming", None)


def slots_by_layer(plan: ModelPlan, slots: int | Sequence[int], most: int | None = None) -> list[int]:
    """How many slots each MoE layer gets, an MTP head's last.

    slots: for all of them, or one number each. most: experts of a layer that are computed here, if not all. Raises
    InputError where a token would not find room for its experts.
    """
    layers, top_k = len(blocks(plan.model)), min(plan.args.num_experts_per_tok, most or plan.args.num_experts)
    counts = [slots] * layers if isinstance(slots, int) else list(slots)
    if len(counts) != layers:
        raise InputError(f"slots are given for {len(counts)} layers, but the model has {layers} MoE layers")
    for count in counts:
        if type(count) is not int or count < top_k:
            raise InputError(f"slots is {count!r}, but a token needs {top_k} experts of a layer: give at least {top_k}")
    return counts


def _check_pinned(plan: ModelPlan, slots: Sequence[int], pinned: Mapping[int, Collection[int]], experts: int) -> None:
    """Raise InputError where pinned experts leave too few slots for a token. experts: of a layer that are computed."""
    top_k = min(plan.args.num_experts_per_tok, experts)
    for block, count in zip(blocks(plan.model), slots, strict=True):
        held = len(pinned.get(block.layer, ()))
        if held and count < min(held + top_k, experts):
            raise InputError(
                f"layer {block.layer} has {count} slots: with {held} pinned experts, fewer than the {top_k} that a "
                f"token needs are left; pin at most {count - top_k}, or give more memory"
            )


def stream_experts(
    plan: ModelPlan,
    cast: mx.Dtype | None,
    slots: Sequence[int],
    eviction: str = DEFAULT_EVICTION,
    settings: DiskSettings | None = None,
    pinned: Mapping[int, Collection[int]] | None = None,
    share: Share | None = None,
) -> Streaming | None:
    """Put StreamedExperts into the MoE layers of ``plan.model`` that have fewer slots than experts, and make the slots.

    cast, settings: as of ExpertStore.open(). slots: as from slots_by_layer(). pinned: by the index of the MoE layer,
    experts that stay once they are in memory. share: the experts that are computed here, if not all: then every layer
    streams. Returns None where no layer streams. Raises InputError where pinned experts leave too few slots for a
    token.
    """
    experts, pinned = plan.args.num_experts, pinned or {}
    most = share.most(experts) if share else experts
    _check_pinned(plan, slots, pinned, most)
    if share is None and min(slots) >= experts:
        return None
    store = ExpertStore.open(plan, cast, settings)
    traffic, ahead, staging, layers = Traffic(), Ahead(), Staging(), {}
    try:
        modules = dict(plan.model.named_modules())
        for place, (path, count) in enumerate(zip(store.layers, slots, strict=True)):
            if share or count < experts:
                block: MoEBlock = modules[path]
                count = min(count, most)
                pool = make_slots(block.switch_mlp, store.fields(place), count, staging)
                table = SlotTable(experts, count, make_eviction(eviction, experts), pinned.get(block.layer, ()))
                parts = pool, table, store, place, traffic, ahead
                layer = share.experts(block, *parts) if share else StreamedExperts(*parts)
                block.switch_mlp = layers[block.layer] = layer
    except BaseException:
        store.close()
        raise
    held = max(len(pinned.get(index, ())) for index in layers)
    return Streaming(plan.model, store, layers, traffic, ahead, min(plan.args.num_experts_per_tok, most) + held)
