"""Qwen3-Next: Gated DeltaNet and gated attention, softmax top-k experts with a shared expert, an MTP head."""

from __future__ import annotations

from mlx_lm.models import qwen3_next

from ..routing import Router
from .attention import take_over_attention
from .family import Family, builder
from .gated_delta import take_over_recurrence
from .moe import take_over
from .mtp import MTPHead


class Model(qwen3_next.Model):
    """mlx-lm's model with the MTP head as ``mtp``, where there is one."""

    def __init__(self, args: qwen3_next.ModelArgs, mtp_layers: int, mtp_hidden: str = "after"):
        super().__init__(args)
        router = Router(args.num_experts_per_tok, args.norm_topk_prob)
        if mtp_layers:
            # A layer with full attention: every ``full_attention_interval``-th one has it.
            index = args.full_attention_interval - 1
            layers = [qwen3_next.Qwen3NextDecoderLayer(args, index) for _ in range(mtp_layers)]
            self.mtp = MTPHead(layers, args.hidden_size, args.rms_norm_eps, mtp_hidden)
            take_over(layers, router, args.num_hidden_layers)
            take_over_attention(layers)
        take_over(self.layers, router)
        take_over_attention(self.layers)
        take_over_recurrence(self.layers)


FAMILY = Family("qwen3_next", builder(qwen3_next.ModelArgs, Model), shifted_norms=True)
