"""A model whose experts stay on disk: which layers stream, and all that they share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from ..errors import InputError
from ..models.moe import MoEBlock, blocks
from ..models.plan import ModelPlan
from .disk import DiskSettings
from .eviction import DEFAULT_EVICTION, make_eviction
from .slots import make_slots
from .store import ExpertStore
from .stream import Guess, StreamedExperts
from .table import SlotTable
from .traffic import Traffic

# Read what the next layer's router is likely to choose. It halves the misses that a token waits for and reads a fifth
# more; where the processor is busy with other work it does not pay, and on an idle one it has not been measured.
READ_AHEAD = False


class Streaming:
    """The streamed layers of a model.

    store: where their experts are read from. layers: StreamedExperts by the index of their MoE layer, an MTP head's
    last; a layer that has a slot for each of its experts is an ordinary one and not among them.
    """

    def __init__(self, store: ExpertStore, layers: dict[int, StreamedExperts], traffic: Traffic):
        self.store, self.layers, self._traffic = store, layers, traffic
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

    def close(self) -> None:
        """Close the files. The model can no longer be run."""
        self._close()


def streaming_of(model: nn.Module) -> Streaming | None:
    """What ``model`` streams; None where all of it is in memory."""
    return getattr(model, "streaming", None)


def slots_by_layer(plan: ModelPlan, slots: int | Sequence[int]) -> list[int]:
    """How many slots each MoE layer gets, an MTP head's last.

    slots: for all of them, or one number each. Raises InputError where a token would not find room for its experts.
    """
    layers, top_k = len(blocks(plan.model)), plan.args.num_experts_per_tok
    counts = [slots] * layers if isinstance(slots, int) else list(slots)
    if len(counts) != layers:
        raise InputError(f"slots are given for {len(counts)} layers, but the model has {layers} MoE layers")
    for count in counts:
        if type(count) is not int or count < top_k:
            raise InputError(f"slots is {count!r}, but a token needs {top_k} experts of a layer: give at least {top_k}")
    return counts


def stream_experts(
    plan: ModelPlan,
    cast: mx.Dtype | None,
    slots: Sequence[int],
    eviction: str = DEFAULT_EVICTION,
    settings: DiskSettings | None = None,
) -> Streaming | None:
    """Put StreamedExperts into the MoE layers of ``plan.model`` that have fewer slots than experts, and make the slots.

    cast, settings: as of ExpertStore.open(). slots: as from slots_by_layer(). Returns None where no layer streams.
    """
    experts = plan.args.num_experts
    if min(slots) >= experts:
        return None
    store = ExpertStore.open(plan, cast, settings)
    traffic, layers = Traffic(), {}
    try:
        modules = dict(plan.model.named_modules())
        for place, (path, count) in enumerate(zip(store.layers, slots, strict=True)):
            if count < experts:
                block: MoEBlock = modules[path]
                pool = make_slots(block.switch_mlp, store.fields(place), count)
                table = SlotTable(experts, count, make_eviction(eviction, experts))
                block.switch_mlp = layers[block.layer] = StreamedExperts(pool, table, store, place, traffic)
        for index in range(plan.args.num_hidden_layers - 1):  # an MTP head's layer follows on no other
            if READ_AHEAD and index in layers and index + 1 in layers:
                guess = Guess(modules[store.layers[layers[index + 1].place]].gate)
                layers[index].guess_of_next = layers[index + 1].guess = guess
    except BaseException:
        store.close()
        raise
    return Streaming(store, layers, traffic)
