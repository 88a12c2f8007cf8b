"""A model as the options ask for it, and what there is to say of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..policy import Policy
from ..routing import RoutingPolicy
from .experts import describe_memory
from .parallel import describe_ranks, ranks_options
from .policies import check_policy

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..parallel.ranks import Ranks
    from ..routing import Routing


def load_model(
    args: argparse.Namespace, policy: Policy, ranks: Ranks | None = None, **options: Any
) -> tuple[nn.Module, TokenizerWrapper, Routing]:
    """The model, with the routing of ``policy`` in it. options: of load(), beside those in ``args``."""
    from ..loading import load
    from ..models.moe import make_routing, set_routing

    model, tokenizer = load(
        args.model,
        revision=args.revision,
        dtype=args.dtype,
        adapter_path=args.adapter_path,
        mtp=policy.options()["mtp"],
        **ranks_options(args, ranks),
        **options,
    )
    if args.policy is not None:
        check_policy(args.policy, policy, model)
    routing = make_routing(model, policy.routing or RoutingPolicy(), args.residency)
    set_routing(model, routing)
    return model, tokenizer, routing


def describe_model(args: argparse.Namespace, policy: Policy, model: Any, routing: Routing) -> str:
    """What load_model() has made, in lines."""
    import mlx.core as mx

    from ..device import compute_dtype_of

    name, device = args.model or "the embedded model", mx.default_device().type.name
    lines = [f"Model: {name} ({model.model_type}), computing in {compute_dtype_of(model)} on the {device}"]
    if args.policy is not None:
        lines.append(f"Policy: {args.policy}: {policy}")
    if model.fit:
        lines.append(describe_memory(model.fit, args))
    if model.ranks:
        lines.append(describe_ranks(model, args))
    sure = routing.mode == "biased" and routing.policy.sure_margin is not None
    idle = sure and (policy.mtp == "off" or "mtp" not in model)
    return "\n".join([*lines, f"Routing: {routing}{' (no head drafts: sure_margin does nothing)' if idle else ''}"])
