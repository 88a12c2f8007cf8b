"""Qwen3-MoE: attention in every layer, softmax top-k experts, no shared expert, no MTP head."""

from __future__ import annotations

from typing import Any

from mlx_lm.models import qwen3_moe

from ..errors import CheckpointError
from ..routing import Router
from .family import Family, check_args
from .moe import take_over


def _build(config: dict[str, Any], mtp_layers: int) -> qwen3_moe.Model:
    if mtp_layers:
        raise CheckpointError("it holds mtp.* tensors, which the qwen3_moe family does not have")
    args = qwen3_moe.ModelArgs.from_dict(config)
    check_args(args)
    model = qwen3_moe.Model(args)
    take_over(model.layers, Router(args.num_experts_per_tok, args.norm_topk_prob))
    return model


FAMILY = Family("qwen3_moe", _build)
