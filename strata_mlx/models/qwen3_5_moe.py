"""Qwen3.5-MoE and Qwen3.6-MoE, text part: as Qwen3-Next, with the language model one level down."""

from __future__ import annotations

from typing import Any

from mlx_lm.models import qwen3_5, qwen3_5_moe

from ..routing import Router
from .attention import take_over_attention
from .family import Family, check_args
from .gated_delta import take_over_recurrence
from .moe import take_over
from .mtp import MTPHead


class Model(qwen3_5_moe.Model):
    """mlx-lm's model with the MTP head as ``mtp``, where there is one."""

    def __init__(self, args: qwen3_5_moe.ModelArgs, mtp_layers: int, mtp_hidden: str = "after"):
        super().__init__(args)
        text = self.language_model.args
        router = Router(text.num_experts_per_tok, text.norm_topk_prob)
        if mtp_layers:
            layers = [qwen3_5.DecoderLayer(text, text.full_attention_interval - 1) for _ in range(mtp_layers)]
            self.mtp = MTPHead(layers, text.hidden_size, text.rms_norm_eps, mtp_hidden)
            take_over(layers, router, text.num_hidden_layers)
            take_over_attention(layers)
        take_over(self.layers, router)
        take_over_attention(self.layers)
        take_over_recurrence(self.layers)


def _build(config: dict[str, Any], mtp_layers: int) -> Model:
    check_args(qwen3_5.TextModelArgs.from_dict(config))
    return Model(qwen3_5_moe.ModelArgs("qwen3_5_moe", config), mtp_layers, config.get("mtp_hidden", "after"))


def _names(parameter: str) -> tuple[str, ...]:
    """Hugging Face has ``model.language_model.*`` (or, text only, ``model.*``) and ``lm_head.*``."""
    inner = parameter.removeprefix("language_model.")
    if inner == parameter:
        return (parameter,)
    return (parameter, inner.replace("model.", "model.language_model.", 1), inner)


FAMILY = Family(
    "qwen3_5_moe",
    _build,
    shifted_norms=True,
    names=_names,
    ignored=("model.visual.", "vision_tower.", "visual."),
)
