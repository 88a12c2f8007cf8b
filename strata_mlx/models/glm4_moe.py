"""GLM-4.5, GLM-4.6 and GLM-4.7: attention in every layer, sigmoid experts with shared ones, MTP layers."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_lm.models import glm4_moe

from .family import Family, builder
from .moe import sigmoid_router, take_over
from .mtp import NextTokenLayers, after_the_trunk


@dataclass
class ModelArgs(glm4_moe.ModelArgs):
    """mlx-lm's, with the number of experts under the name that it has in other families."""

    @property
    def num_experts(self) -> int:
        return self.n_routed_experts


class Model(glm4_moe.Model):
    """mlx-lm's model with the MTP head as ``mtp``, where there is one."""

    def __init__(self, args: ModelArgs, mtp_layers: int, mtp_hidden: str = "after"):
        super().__init__(args)
        router, first = sigmoid_router(args), args.num_hidden_layers
        if mtp_layers:
            layers = [glm4_moe.DecoderLayer(args, first + i) for i in range(mtp_layers)]
            self.mtp = NextTokenLayers(layers, args.hidden_size, args.rms_norm_eps, mtp_hidden)
            take_over(layers, router, first)
        take_over(self.layers, router)


FAMILY = Family("glm4_moe", builder(ModelArgs, Model), own_name=after_the_trunk)
