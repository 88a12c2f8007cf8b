"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), as far as its families share it: the cache
holds one latent vector and one rotated key a token for all heads.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from ..checkpoint import Recipe
from ..errors import CheckpointError


class LatentArgs:
    """What mlx-lm's ModelArgs of these families lack of the names that others have."""

    n_routed_experts: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int

    @property
    def num_experts(self) -> int:
        return self.n_routed_experts

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def make_mask(layer: nn.Module, x: mx.array, cache: Any) -> mx.array | None:  # noqa: ARG001
    """An array, which the layer adds to the scores of its rotated keys."""
    return create_attention_mask(x, cache, return_array=True)


def cached(args: Any, layer: nn.Module) -> int:  # noqa: ARG001
    """Elements of the cache that a token takes in one layer."""
    return args.kv_lora_rank + args.qk_rope_head_dim


def derived(parameter: str, present: Container[str], args: Any) -> Recipe | None:
    """embed_q and unembed_out from kv_b_proj, which has the rows of both for each head: keys', then values'."""
    module, _, name = parameter.partition(".self_attn.")
    source = f"{module}.self_attn.kv_b_proj.weight"
    if name not in ("embed_q.weight", "unembed_out.weight") or source not in present:
        return None
    if source.replace("weight", "scales") in present:
        raise CheckpointError(
            f"{source} is quantised, which an old conversion has done; convert the original again, or with a newer "
            f"mlx_lm"
        )
    keys = args.qk_nope_head_dim
    rows = (0, keys) if name == "embed_q.weight" else (keys, keys + args.v_head_dim)
    return Recipe((source,), heads=args.num_attention_heads, rows=rows, swap=name == "embed_q.weight")
