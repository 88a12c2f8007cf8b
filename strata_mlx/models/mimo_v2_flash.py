"""MiMo-V2-Flash: sliding windows with sinks beside full attention, sigmoid experts in most layers, dense MTP layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import mimo_v2_flash
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import RotatingKVCache

from ..errors import CheckpointError
from .family import Family, check_args
from .moe import sigmoid_router, take_over
from .mtp import NextTokenLayers

_RENAMED = {"final_layernorm": "shared_head.norm", "pre_mlp_layernorm": "post_attention_layernorm"}


@dataclass
class ModelArgs(mimo_v2_flash.ModelArgs):
    """mlx-lm's, with the number of experts under the name that it has in other families."""

    partial_rotary_factor: float
    tie_word_embeddings: bool = False

    @property
    def num_experts(self) -> int:
        return self.n_routed_experts


class Model(mimo_v2_flash.Model):
    """mlx-lm's model with the MTP heads as ``mtp``, where there are some. All of them take the trunk's hidden states,
    as they were trained to.
    """

    def __init__(self, args: ModelArgs, mtp_layers: int, mtp_hidden: str = "after"):
        super().__init__(args)
        self.make_mask = partial(_make_mask, args.sliding_window_size)
        take_over(self.layers, sigmoid_router(args, eps=1e-20))
        if mtp_layers:
            self.mtp = NextTokenLayers(
                [mimo_v2_flash.DecoderLayer(args, is_moe=False, is_sliding_window=True) for _ in range(mtp_layers)],
                args.hidden_size,
                args.layernorm_epsilon,
                mtp_hidden,
                chained=False,
                mask=self.make_mask,
                cache_of=partial(RotatingKVCache, args.sliding_window_size),
            )


def _make_mask(window: int, layer: nn.Module, x: mx.array, cache: Any) -> Any:
    return create_attention_mask(x, cache, window if layer.is_sliding_window else None)


def _build(config: dict[str, Any], mtp_layers: int) -> Model:
    args = ModelArgs.from_dict(config)
    check_args(args)
    for name in ("hybrid_layer_pattern", "moe_layer_freq"):
        kinds: list[int] = getattr(args, name)
        if len(kinds) != args.num_hidden_layers or not set(kinds) <= {0, 1}:
            raise CheckpointError(f"{name} must have a 0 or a 1 for each of the {args.num_hidden_layers} layers")
    if len(set(args.hybrid_layer_pattern)) < 2:
        raise CheckpointError("hybrid_layer_pattern must have layers of both kinds, 0 and 1")
    if args.sliding_window_size < 2:
        raise CheckpointError(f"sliding_window_size is {args.sliding_window_size}, expected at least 2")
    return Model(args, mtp_layers, config.get("mtp_hidden", "after"))


def _own_name(stored: str, config: dict[str, Any]) -> str:  # noqa: ARG001
    name = stored.removeprefix("model.") if stored.startswith("model.mtp.") else stored
    if name.startswith("mtp."):
        for theirs, ours in _RENAMED.items():
            name = name.replace(theirs, ours)
    return name


def _cached(args: ModelArgs, layer: nn.Module) -> int:
    if layer.is_sliding_window:
        return args.swa_num_key_value_heads * (args.swa_head_dim + args.swa_v_head_dim)
    return args.num_key_value_heads * (args.head_dim + args.v_head_dim)


FAMILY = Family("mimo_v2_flash", _build, own_name=_own_name, cached=_cached)
