"""The mixture-of-experts layer of every family: the router's choice goes through strata_mlx.routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError
from ..experts.stream import StreamedExperts
from ..experts.work import Work
from ..routing import LiveResidency, Residency, Router, Routing, RoutingPolicy
from .family import text_args

_CHILDREN = ("switch_mlp", "shared_expert", "shared_expert_gate", "shared_experts")


class Gate(nn.Module):
    """Takes over a gate that is no nn.Linear but a weight ``[E, D]``, which is never quantised, with a bias ``[E]`` for
    selection (the DeepSeek families); the router that mlx-lm has in it is ours.
    """

    def __init__(self, gate: nn.Module):
        super().__init__()
        self.weight = gate.weight
        self.e_score_correction_bias = gate.e_score_correction_bias

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.weight.T


class MoEBlock(nn.Module):
    """Takes over an mlx-lm MoE block, parameters and their names included, and routes through ``routing``.

    layer: its index among the model's layers; that of an MTP layer follows those of the trunk.
    across: where experts are shared out among processes, what adds up the parts ``[B, T, D]`` of all of them.
    """

    def __init__(self, block: nn.Module, layer: int, router: Router):
        super().__init__()
        self.gate = block.gate if isinstance(block.gate, nn.Linear) else Gate(block.gate)
        for name in _CHILDREN:
            if name in block:
                self[name] = block[name]
        self.layer = layer
        self.router = router
        self.routing = Routing()
        self.across: Callable[[mx.array], mx.array] | None = None

    def __call__(self, x: mx.array) -> mx.array:
        bias = self.gate.get("e_score_correction_bias")
        ids, weights = self.routing.route(self.layer, self.gate(x), self.router, bias)
        shared = self._shared(x)

        def mix(outputs: mx.array) -> mx.array:  # [B, T, K, D]
            y = (outputs * weights[..., None]).sum(axis=-2).astype(x.dtype)
            if self.across is not None:
                y = self.across(y)
            return y if shared is None else y + shared

        if isinstance(self.switch_mlp, StreamedExperts):
            meanwhile = (weights,) if shared is None else (weights, shared)
            return self.switch_mlp(x, ids, Work(mix, meanwhile))
        return mix(self.switch_mlp(x, ids))

    def _shared(self, x: mx.array) -> mx.array | None:
        """What the experts that every token goes to add, if there are such."""
        if "shared_experts" in self:
            return self.shared_experts(x)
        return mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x) if "shared_expert" in self else None


def sigmoid_router(args: Any, eps: float = 0.0) -> Router:
    """The router of the DeepSeek families by mlx-lm's ModelArgs. eps: is added where weights are divided by their sum.

    Raises CheckpointError for one that mlx-lm would compute otherwise than the configuration says.
    """
    groups, kept, experts, top_k = args.n_group or 1, args.topk_group or 1, args.num_experts, args.num_experts_per_tok
    if args.tie_word_embeddings:
        raise CheckpointError("tie_word_embeddings is true, but mlx_lm has no such models of this family")
    if args.scoring_func != "sigmoid":
        raise CheckpointError(f"scoring_func is {args.scoring_func!r}, expected 'sigmoid'")
    if experts % groups or not 1 <= kept <= groups or (groups > 1 and experts < 2 * groups):
        raise CheckpointError(
            f"n_group is {groups} and topk_group {kept}, which do not divide n_routed_experts = {experts} into groups "
            f"of two or more"
        )
    if top_k > experts // groups * kept:
        raise CheckpointError(
            f"num_experts_per_tok is {top_k}, but topk_group = {kept} groups have {experts // groups * kept} experts"
        )
    scale = 1.0 if args.routed_scaling_factor is None else args.routed_scaling_factor
    return Router(top_k, args.norm_topk_prob and top_k > 1, "sigmoid", groups, kept, scale, eps)


def take_over(layers: Sequence[nn.Module], router: Router, first: int = 0) -> None:
    """Put a MoEBlock in the place of each mlx-lm MoE block in ``layers``, which are numbered from ``first``."""
    for index, layer in enumerate(layers, first):
        if "switch_mlp" in layer.mlp:
            layer.mlp = MoEBlock(layer.mlp, index, router)


def blocks(model: nn.Module) -> list[MoEBlock]:
    """The MoE layers of a model in order, its MTP head's last."""
    found = (module for _, module in model.named_modules() if isinstance(module, MoEBlock))
    return sorted(found, key=lambda block: block.layer)


def make_routing(model: nn.Module, policy: RoutingPolicy, residency: Path | None) -> Routing:
    """``policy`` for ``model``, with the residency map in a JSON file, if one is given, or else with what the slots of
    streamed layers hold at the moment.

    Raises InputError where the policy needs more experts per token than the model has, and for a broken file.
    """
    layers = blocks(model)
    for block in layers:
        policy.check_top_k(block.router.top_k)
    if residency is not None:
        args = text_args(model)
        return Routing(policy, Residency.from_json(residency, args.num_hidden_layers, args.num_experts))
    streamed = {block.layer: block.switch_mlp for block in layers if isinstance(block.switch_mlp, StreamedExperts)}
    return Routing(policy, LiveResidency({layer: experts.known for layer, experts in streamed.items()}))


def set_routing(model: nn.Module, routing: Routing) -> None:
    """Let every MoE layer of ``model`` choose its experts by ``routing``. Raises InputError where that cannot be."""
    layers = blocks(model)
    biases = {block.router: block.gate.get("e_score_correction_bias") for block in layers}
    for router, bias in biases.items():  # that of any layer: they differ in their numbers only
        routing.prepare(router, text_args(model).num_experts, bias)
    for block in layers:
        block.routing = routing
