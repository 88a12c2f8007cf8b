"""A MoE layer with its norm and what is passed by, for windows of a few rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn

from ..experts.stream import StreamedExperts
from ..experts.work import Work
from ..kernels import MAX_EXPERTS, MAX_TOP_K, SIMD, Build, route_select
from ..models.moe import MoEBlock
from ..routing import Router
from ..routing.ops import Selection
from .experts import Experts, Passing, experts_apart, experts_down, experts_mix, experts_up
from .matrix import Matrix, Norm, matrices_of
from .mixers import Compute, compiled
from .project import project


@dataclass(frozen=True)
class Mixture:
    """gates: of the router, and of the shared expert where that is ``gated``. bias: ``[E]``, for selection. experts:
    None where they are streamed. bits, group: of the experts. shared: None where there is no shared expert.
    """

    norm: Norm
    gates: list[Matrix]
    bias: mx.array | None
    router: Router
    experts: Experts | None
    bits: int
    group: int
    shared: Experts | None
    gated: bool
    build: Build | None

    @classmethod
    def of(cls, layer: nn.Module, build: Build | None) -> Mixture | None:
        """That of a decoder layer; None where it has none, or the kernels do not take it."""
        block = layer.mlp
        if not isinstance(block, MoEBlock) or block.router.top_k > MAX_TOP_K or block.across is not None:
            return None
        streamed = isinstance(block.switch_mlp, StreamedExperts)
        experts = Experts.of(block.switch_mlp.experts if streamed else block.switch_mlp)
        gated = "shared_expert_gate" in block
        beside = block.get("shared_expert") or block.get("shared_experts")
        shared = Experts.of(beside) if beside is not None else None
        gates = matrices_of(block.gate, *([block.shared_expert_gate] if gated else []))
        if experts is None or gates is None or (beside is not None and shared is None):
            return None
        if gates[0].outputs > MAX_EXPERTS or block.router.n_group > SIMD:
            return None
        norm, bias = Norm.of(layer.post_attention_layernorm), block.gate.get("e_score_correction_bias")
        kind, own = (experts.gate.bits, experts.gate.group), None if streamed else experts
        return cls(norm, gates, bias, block.router, own, *kind, shared, gated, build)

    def begin(self, x: mx.array) -> list[mx.array]:
        """Of rows ``x [B, T, D]``, by the router's own choice: the layer's output, x included, and the experts' ids.
        Where experts are streamed, what serve() takes: x, ``logits``, weights and ids.
        """
        logits, build = self._logits(x), self.build
        if self.experts is None:
            ids, weights = self._choose(logits)
            return [x, logits, weights, ids]
        values, ids, weights = experts_up(
            x,
            None,
            self.experts,
            self.shared,
            norm=self.norm,
            logits=logits,
            router=self.router,
            bias=self.bias,
            build=build,
        )
        return [self._down(x, logits, weights, ids, values, self.experts), ids]

    def __call__(self, x: mx.array, block: MoEBlock) -> mx.array:
        """The same, as the routing of ``block`` chooses and its experts are in memory or not."""
        logits = self._logits(x)
        own = logits[..., : self.gates[0].outputs]
        ids, weights = block.routing.route(
            block.layer, own, block.router, self.bias, plain=lambda *_: self._choose(logits)
        )
        if self.experts is None:
            return self.serve(block, x, logits, weights, ids)
        return self._down(x, logits, weights, ids, self._up(x, ids, self.experts, self.shared), self.experts)

    def serve(self, block: MoEBlock, x: mx.array, logits: mx.array, weights: mx.array, ids: mx.array) -> mx.array:
        """The layer's output where the experts of ``block`` are streamed."""

        def whole(slots: nn.Module, _: mx.array, indices: mx.array) -> mx.array:
            return self._end(x, logits, weights, indices, *_experts(slots).arrays)[0]

        def mix(outputs: mx.array) -> mx.array:
            values = None
            if self.shared is not None:
                values = self._up(x, mx.zeros((*ids.shape[:-1], 1), mx.uint32), self.shared.stacked)
            return experts_mix(outputs, weights, values, Passing(x, self.shared, logits, self.gated), self.build)

        result: mx.array = block.switch_mlp(x, ids, Work(mix, pairs=self._apart, whole=whole))
        return result

    @cached_property
    def _end(self) -> Compute:
        """A graph from x, logits, weights, the slots of ids, and the slots' arrays, to the output."""

        def end(
            x: mx.array, logits: mx.array, weights: mx.array, indices: mx.array, *arrays: mx.array
        ) -> list[mx.array]:
            experts = Experts.of_arrays(arrays, self.bits, self.group)
            return [self._down(x, logits, weights, indices, self._up(x, indices, experts, self.shared), experts)]

        return compiled(end, self.build)

    def _down(
        self, x: mx.array, logits: mx.array, weights: mx.array, ids: mx.array, values: mx.array, experts: Experts
    ) -> mx.array:
        return experts_down(values, ids, weights, experts, Passing(x, self.shared, logits, self.gated), self.build)

    def _logits(self, x: mx.array) -> mx.array:
        return project(x, self.gates, norm=self.norm, dtype=mx.float32, build=self.build)

    def _choose(self, logits: mx.array) -> Selection:
        options = {**self.router.options(), "bias": self.bias, "experts": self.gates[0].outputs}
        ids, weights = route_select(logits, None, None, None, build=self.build, **options)
        return ids, weights

    def _up(self, x: mx.array, ids: mx.array, experts: Experts, shared: Experts | None = None) -> mx.array:
        return experts_up(x, ids, experts, shared, norm=self.norm, build=self.build)[0]

    def _apart(self, slots: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        """What the experts in ``slots`` make of rows ``[..., D]``: float32 ``[..., K, D]``."""
        experts = _experts(slots)
        # Pair by pair, so that there is one kernel for groups of every size.
        rows = mx.broadcast_to(x[..., None, :], (*indices.shape, x.shape[-1])).reshape(1, indices.size, -1)
        ids = indices.reshape(1, -1, 1)
        outputs = experts_apart(self._up(rows, ids, experts), ids, experts, self.build)
        return outputs.reshape(*indices.shape, -1)


def _experts(slots: nn.Module) -> Experts:
    """Those in slots, whose kind Mixture.of() has looked at."""
    experts = Experts.of(slots)
    assert experts is not None
    return experts
