"""The multi-token-prediction (MTP) head of the Qwen3-Next, Qwen3.5 and Qwen3.6 families (``mtp.*`` tensors)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from ..errors import CheckpointError
from .trunk import Hidden


class MTPHead(nn.Module):
    """One decoding layer that predicts the token after next; embedding and ``lm_head`` are the trunk's.

    layers: full-attention MoE layers of the family. hidden_size: of the trunk. eps: of its RMSNorms. takes: which of
    the trunk's hidden states it takes, "before" or "after" the final norm; a wrong choice lowers the acceptance.
    """

    def __init__(self, layers: list[nn.Module], hidden_size: int, eps: float, takes: str = "after"):
        super().__init__()
        if takes not in Hidden._fields:
            raise CheckpointError(f"mtp_hidden is {takes!r}, expected one of {', '.join(Hidden._fields)}")
        self.takes = takes
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = layers
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def __call__(self, embedding: mx.array, hidden: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Predict tokens t+2 from the embeddings of tokens t+1 and the hidden states of tokens t, both ``[B, T, D]``.

        Returns the normed hidden states ``[B, T, D]`` that ``lm_head`` takes. They are also the ``hidden`` of the next
        chained step.
        """
        cache = cache or [None] * len(self.layers)
        x = self.fc(mx.concatenate([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], axis=-1))
        mask = create_attention_mask(x, cache[0])
        for layer, c in zip(self.layers, cache, strict=True):
            x = layer(x, mask, c)
        return self.norm(x)
