"""What a planned model consists of, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.precision import part_of
from ..checkpoint.safetensors import FLOATING
from ..device import compute_dtype
from .dequantised import dequantised_bytes
from .plan import ModelPlan

_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_KINDS = ("linear_attention", "sliding_window", "full_attention")
_KV_STEP = 256  # tokens that a KV cache grows by


class _Parameter(NamedTuple):
    name: str
    part: str
    stored: int  # bytes in the checkpoint
    loaded: int  # bytes in memory on this device
    weights: int  # as the model counts them: scales and biases of quantised weights are none
    precision: str | None


def describe(plan: ModelPlan, context: int) -> dict[str, Any]:
    """A JSON-ready report. Sizes are in bytes; ``context`` is the number of tokens that memory is reckoned for."""
    args, layers = plan.args, plan.model.layers
    rows = list(_parameters(plan))
    trunk = [row for row in rows if not row.name.startswith("mtp.")]
    routed = sum(row.weights for row in trunk if ".switch_mlp." in row.name)
    looked_up = sum(row.weights for row in trunk if row.part == "embedding")
    always = sum(row.weights for row in trunk) - routed - looked_up
    kinds = Counter(map(_kind, layers))
    return {
        "path": str(plan.checkpoint.path),
        "family": plan.family.model_type,
        "layout": _layout(plan),
        "layers": {
            "count": len(layers),
            "kinds": {kind: kinds[kind] for kind in _KINDS if kind in kinds},
        },
        "experts": args.num_experts,
        "top_k": args.num_experts_per_tok,
        "shared_expert": any(row.part == "shared_expert" for row in rows),
        "moe_layers": sum(1 for layer in layers if "switch_mlp" in layer.mlp),
        "mtp_layers": plan.mtp_layers,
        "parameters": sum(row.weights for row in rows),
        "active_parameters": always + routed * args.num_experts_per_tok // args.num_experts,
        "bytes": sum(row.stored for row in rows),
        "parts": {
            part: _part([row for row in rows if row.part == part]) for part in sorted({row.part for row in rows})
        },
        "context": context,
        "memory_bytes": {
            "weights": sum(row.loaded for row in trunk),
            "mtp_head": sum(row.loaded for row in rows) - sum(row.loaded for row in trunk),
            **_dequantised(plan, rows),
            **_cache_bytes(plan, context),
        },
    }


def _dequantised(plan: ModelPlan, rows: list[_Parameter]) -> dict[str, int]:
    """What load() takes on top, where memory has no budget."""
    sizes = dequantised_bytes(plan.model)
    more = sum(sizes[row.name] - row.loaded for row in rows if row.name in sizes)
    return {"dequantised": more} if more else {}


def _kind(layer: nn.Module) -> str:
    if getattr(layer, "is_linear", False):
        return "linear_attention"
    return "sliding_window" if getattr(layer, "is_sliding_window", False) else "full_attention"


def _layout(plan: ModelPlan) -> str:
    if any(".mlp.experts." in name for name in plan.checkpoint.tensors):
        return "Hugging Face"
    separate = any(".switch_mlp." in name and len(recipe.sources) > 1 for name, recipe in plan.recipes.items())
    return "packed" if separate else "MLX"


def _parameters(plan: ModelPlan) -> Iterator[_Parameter]:
    modules, dtype = dict(plan.model.named_modules()), compute_dtype()
    for name, recipe in plan.recipes.items():
        path, _, kind = name.rpartition(".")
        module, entry, stored = modules[path], plan.checkpoint.tensors[recipe.sources[0]], plan.source_bytes(name)
        size = stored * entry.size // entry.nbytes
        loaded = size * dtype.size if dtype and entry.dtype in FLOATING else stored
        weights, precision = size, _DTYPE_NAMES.get(entry.dtype, entry.dtype)
        if "scales" in module and kind == "weight":
            weights, precision = size * 32 // module.bits, f"{module.bits}-bit {module.mode}"
        elif "scales" in module:
            weights, precision = 0, ""
        words = part_of(name).split(".")
        part = ".".join(words[: 2 if words[0] == "mtp" else 1])  # without the projection
        yield _Parameter(name, part, stored, loaded, weights, precision or None)


def _part(rows: list[_Parameter]) -> dict[str, Any]:
    precision = sorted({row.precision for row in rows if row.precision})
    return {"bytes": sum(row.stored for row in rows), "precision": precision}


def _cache_bytes(plan: ModelPlan, context: int) -> dict[str, int]:
    """Keys and values grow with the context; the recurrent state (float32) does not."""
    args, itemsize = plan.args, (compute_dtype() or mx.bfloat16).size
    attention = plan.attention()
    recurrent = len(plan.model.layers) - len(attention)
    tokens = -(-context // _KV_STEP) * _KV_STEP
    sizes = {"kv_cache": sum(cache.size(tokens) for cache in attention) * itemsize}
    if recurrent:
        keys = args.linear_num_key_heads * args.linear_key_head_dim
        values = args.linear_num_value_heads * args.linear_value_head_dim
        convolution = (args.linear_conv_kernel_dim - 1) * (2 * keys + values) * itemsize
        sizes["recurrent_state"] = recurrent * (convolution + values * args.linear_key_head_dim * 4)
    return sizes
