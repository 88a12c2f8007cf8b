"""GLM-4.7-Flash: multi-head latent attention, sigmoid experts with shared ones, MTP layers."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_lm.models import glm4_moe_lite

from .family import Family, builder
from .mla import LatentArgs, cached, derived, make_mask
from .moe import sigmoid_router, take_over
from .mtp import NextTokenLayers, after_the_trunk


@dataclass
class ModelArgs(LatentArgs, glm4_moe_lite.ModelArgs):
    """mlx-lm's, with the names that other families have, and null where checkpoints have it."""

    q_lora_rank: int | None = 768


class Model(glm4_moe_lite.Model):
    """mlx-lm's model with the MTP head as ``mtp``, where there is one."""

    make_mask = staticmethod(make_mask)

    def __init__(self, args: ModelArgs, mtp_layers: int, mtp_hidden: str = "after"):
        super().__init__(args)
        router, first = sigmoid_router(args, eps=1e-20), args.num_hidden_layers
        if mtp_layers:
            layers = [glm4_moe_lite.Glm4MoeLiteDecoderLayer(args, first + i) for i in range(mtp_layers)]
            self.mtp = NextTokenLayers(layers, args.hidden_size, args.rms_norm_eps, mtp_hidden, mask=make_mask)
            take_over(layers, router, first)
        take_over(self.layers, router)


FAMILY = Family("glm4_moe_lite", builder(ModelArgs, Model), own_name=after_the_trunk, derived=derived, cached=cached)
