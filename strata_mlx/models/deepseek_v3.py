"""DeepSeek-V3 and R1: multi-head latent attention, sigmoid experts in groups with shared ones, MTP layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_lm.models import deepseek_v3

from .family import Family, builder
from .mla import LatentArgs, cached, derived, make_mask
from .moe import sigmoid_router, take_over
from .mtp import NextTokenLayers, after_the_trunk


@dataclass
class ModelArgs(LatentArgs, deepseek_v3.ModelArgs):
    """mlx-lm's, with the names that other families have, and null where checkpoints have it."""

    q_lora_rank: int | None = 1536
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False


class Model(deepseek_v3.Model):
    """mlx-lm's model with the MTP head as ``mtp``, where there is one."""

    make_mask = staticmethod(make_mask)

    def __init__(self, args: ModelArgs, mtp_layers: int, mtp_hidden: str = "after"):
        super().__init__(args)
        router, first = sigmoid_router(args), args.num_hidden_layers
        if mtp_layers:
            layers = [deepseek_v3.DeepseekV3DecoderLayer(args, first + i) for i in range(mtp_layers)]
            self.mtp = NextTokenLayers(layers, args.hidden_size, args.rms_norm_eps, mtp_hidden, mask=make_mask)
            take_over(layers, router, first)
        take_over(self.layers, router)


FAMILY = Family("deepseek_v3", builder(ModelArgs, Model), own_name=after_the_trunk, derived=derived, cached=cached)
