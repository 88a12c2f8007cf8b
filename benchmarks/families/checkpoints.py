"""Tiny checkpoints with random weights, written under the names and shapes of the published ones.

Nothing here is derived from mlx_lm or strata_mlx: whoever loads such a folder strictly and computes the same logits as
another implementation has understood the layout. Details that a small model could leave out are on: leading dense
layers, groups of experts, a bias for selection, a factor for the routed experts, rotary factors below 1, YaRN, low-rank
queries, sinks, windows shorter than the text.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.tiny import EOS, save_shards, save_tokenizer

Config = dict[str, Any]  # of the language model
Shapes = dict[str, tuple[int, ...]]  # of the tensors, by name

_COMMON: Config = {
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 259, "eos_token_id": EOS, "hidden_act": "silu",
    "moe_intermediate_size": 32, "norm_topk_prob": True, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
_QWEN: Config = {
    **_COMMON, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 16, "num_experts_per_tok": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
_HYBRID: Config = {
    **_QWEN, "full_attention_interval": 2, "shared_expert_intermediate_size": 48, "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
_SIGMOID: Config = {
    **_COMMON, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
_GLM: Config = {
    **_SIGMOID, "model_type": "glm4_moe", "head_dim": 32, "partial_rotary_factor": 0.5, "rope_theta": 1000000.0,
    "rope_scaling": None, "rms_norm_eps": 1e-5, "attention_bias": True, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "use_qk_norm": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
_DEEPSEEK: Config = {
    **_SIGMOID, "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_group": 4, "topk_group": 2,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "n_shared_experts": 1, "first_k_dense_replace": 2, "moe_layer_freq": 1, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    }, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1,
}  # fmt: skip
_GLM_LITE: Config = {
    **_DEEPSEEK, "model_type": "glm4_moe_lite", "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "rope_scaling": None,
    "partial_rotary_factor": 1.0, "max_position_embeddings": 4096,
}  # fmt: skip
_MIMO: Config = {
    **_SIGMOID, "model_type": "mimo_v2_flash", "head_dim": 24, "v_head_dim": 16, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4, "swa_head_dim": 24, "swa_v_head_dim": 16, "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1], "sliding_window_size": 8, "sliding_window": 8, "rope_theta": 5000000.0,
    "swa_rope_theta": 10000.0, "partial_rotary_factor": 0.334, "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "layernorm_epsilon": 1e-5,
    "n_shared_experts": None, "routed_scaling_factor": None,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A checkpoint: its name, the configuration of its language model, and how many MTP layers are stored."""

    name: str
    config: Config
    heads: int = 0

    @property
    def family(self) -> str:
        return str(self.config["model_type"])


CASES = (
    Case(
        "qwen3_next",
        {**_HYBRID, "model_type": "qwen3_next", "mlp_only_layers": [2], "decoder_sparse_step": 1,
         "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        1,
    ),
    Case(
        "qwen3_5_moe, tied",
        {**_HYBRID, "model_type": "qwen3_5_moe", "tie_word_embeddings": True, "mtp_num_hidden_layers": 1,
         "rope_parameters": {
             "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
             "mrope_interleaved": True, "mrope_section": [2, 1, 1]}},
        1,
    ),
    Case(
        "qwen3_moe",
        {**_QWEN, "model_type": "qwen3_moe", "mlp_only_layers": [0], "decoder_sparse_step": 1, "rope_theta": 1000000.0},
    ),
    Case("qwen3_moe, tied, not normalised", {
        **_QWEN, "model_type": "qwen3_moe", "mlp_only_layers": [], "decoder_sparse_step": 2, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "norm_topk_prob": False,
    }),
    Case("glm4_moe", _GLM, 1),
    Case(
        "glm4_moe, no norms of queries, groups, 2 MTP layers",
        {**_GLM, "use_qk_norm": False, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 2,
         "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 2},
        2,
    ),
    Case("deepseek_v3", _DEEPSEEK, 1),
    Case("deepseek_v3, 2 MTP layers", {**_DEEPSEEK, "num_nextn_predict_layers": 2}, 2),
    Case(
        "deepseek_v3, full-rank queries, one group",
        {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rope_scaling": None,
         "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0},
    ),
    Case("glm4_moe_lite", _GLM_LITE, 1),
    Case("mimo_v2_flash, 2 MTP layers", _MIMO, 2),
)  # fmt: skip


def write(case: Case, path: Path, seed: int = 0) -> Path:
    """Write the checkpoint, float32 in two shards with an index, into the new folder ``path`` and return it."""
    path.mkdir(parents=True)
    config, nested = case.config, case.family == "qwen3_5_moe"
    if nested:
        tied = {"tie_word_embeddings": config["tie_word_embeddings"]}
        text = {**config, "model_type": f"{case.family}_text"}
        config = {"model_type": case.family, "text_config": text, "vision_config": {}, **tied}
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    save_shards(path, {name: _values(name, shape, case.config, seed) for name, shape in shapes(case).items()}, 2)
    save_tokenizer(path)
    return path


def shapes(case: Case) -> Shapes:
    """All tensors of the checkpoint."""
    return _FAMILIES[case.family](case.config, case.heads)


def _qwen(c: Config, heads: int) -> Shapes:
    family, width = c["model_type"], c["hidden_size"]
    model = "model.language_model" if family == "qwen3_5_moe" else "model"
    result = _ends(model, c)
    for i in range(c["num_hidden_layers"]):
        linear = family != "qwen3_moe" and (i + 1) % c["full_attention_interval"] != 0
        dense = i in c.get("mlp_only_layers", []) or (i + 1) % c.get("decoder_sparse_step", 1) != 0
        result |= _qwen_layer(f"{model}.layers.{i}", c, linear, dense)
    if family == "qwen3_5_moe":
        result["model.visual.patch_embed.proj.weight"] = (4, 3, 2, 2, 2)
    for i in range(heads):
        result |= _qwen_layer(f"mtp.layers.{i}", c, linear=False, dense=False)
    if heads:
        result |= _norms("mtp", width, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        result["mtp.fc.weight"] = (width, 2 * width)
    return result


def _qwen_layer(name: str, c: Config, linear: bool, dense: bool) -> Shapes:
    width, mlp = c["hidden_size"], f"{name}.mlp"
    result = _norms(name, width, "input_layernorm", "post_attention_layernorm")
    result |= _delta_net(f"{name}.linear_attn", c) if linear else _qwen_attention(f"{name}.self_attn", c)
    if dense:
        return result | _mlp(mlp, width, c["intermediate_size"])
    result[f"{mlp}.gate.weight"] = (c["num_experts"], width)
    result |= _experts(mlp, c, c["num_experts"], fused=c["model_type"] == "qwen3_5_moe")
    if "shared_expert_intermediate_size" in c:
        result[f"{mlp}.shared_expert_gate.weight"] = (1, width)
        result |= _mlp(f"{mlp}.shared_expert", width, c["shared_expert_intermediate_size"])
    return result


def _qwen_attention(name: str, c: Config) -> Shapes:
    gated = c["model_type"] != "qwen3_moe"  # a gate beside each query
    result = _attention(name, c, c["num_key_value_heads"], c["head_dim"] * (2 if gated else 1))
    return result | _norms(name, c["head_dim"], "q_norm", "k_norm")


def _delta_net(name: str, c: Config) -> Shapes:
    width, key_heads, value_heads = c["hidden_size"], c["linear_num_key_heads"], c["linear_num_value_heads"]
    keys, values = key_heads * c["linear_key_head_dim"], value_heads * c["linear_value_head_dim"]
    result: Shapes = {
        f"{name}.conv1d.weight": (2 * keys + values, 1, c["linear_conv_kernel_dim"]),
        f"{name}.A_log": (value_heads,),
        f"{name}.dt_bias": (value_heads,),
        f"{name}.norm.weight": (c["linear_value_head_dim"],),
        f"{name}.out_proj.weight": (width, values),
    }
    if c["model_type"] == "qwen3_next":
        inputs = {"qkvz": 2 * keys + 2 * values, "ba": 2 * value_heads}
    else:
        inputs = {"qkv": 2 * keys + values, "z": values, "b": value_heads, "a": value_heads}
    return result | {f"{name}.in_proj_{part}.weight": (size, width) for part, size in inputs.items()}


def _glm_deepseek(c: Config, heads: int) -> Shapes:
    width, layers = c["hidden_size"], c["num_hidden_layers"]
    result = _ends("model", c)
    for i in range(layers + heads):
        name = f"model.layers.{i}"
        attention = _latent_attention if "kv_lora_rank" in c else _glm_attention
        result |= attention(f"{name}.self_attn", c)
        result |= _norms(name, width, "input_layernorm", "post_attention_layernorm")
        dense = i < c["first_k_dense_replace"]
        result |= _mlp(f"{name}.mlp", width, c["intermediate_size"]) if dense else _sigmoid_experts(f"{name}.mlp", c)
        if i >= layers:
            result |= _norms(name, width, "enorm", "hnorm", "shared_head.norm")
            result[f"{name}.eh_proj.weight"] = (width, 2 * width)
            result |= dict.fromkeys(
                (f"{name}.embed_tokens.weight", f"{name}.shared_head.head.weight"), (c["vocab_size"], width)
            )
    return result


def _glm_attention(name: str, c: Config) -> Shapes:
    result = _attention(name, c, c["num_key_value_heads"], c["head_dim"])
    if c["attention_bias"]:
        result |= {f"{name}.{part}_proj.bias": result[f"{name}.{part}_proj.weight"][:1] for part in "qkv"}
    return result | (_norms(name, c["head_dim"], "q_norm", "k_norm") if c["use_qk_norm"] else {})


def _latent_attention(name: str, c: Config) -> Shapes:
    width, heads, low = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    queries = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    result: Shapes = {
        f"{name}.kv_a_proj_with_mqa.weight": (low + c["qk_rope_head_dim"], width),
        f"{name}.kv_b_proj.weight": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), low),
        f"{name}.o_proj.weight": (width, heads * c["v_head_dim"]),
    } | _norms(name, low, "kv_a_layernorm")
    if c["q_lora_rank"] is None:
        return result | {f"{name}.q_proj.weight": (queries, width)}
    result[f"{name}.q_a_proj.weight"] = (c["q_lora_rank"], width)
    result[f"{name}.q_b_proj.weight"] = (queries, c["q_lora_rank"])
    return result | _norms(name, c["q_lora_rank"], "q_a_layernorm")


def _mimo(c: Config, heads: int) -> Shapes:
    width, result = c["hidden_size"], _ends("model", c)
    for i in range(c["num_hidden_layers"]):
        name = f"model.layers.{i}"
        result |= _mimo_attention(f"{name}.self_attn", c, sliding=c["hybrid_layer_pattern"][i] == 1)
        result |= _norms(name, width, "input_layernorm", "post_attention_layernorm")
        sparse = c["moe_layer_freq"][i] == 1
        result |= _sigmoid_experts(f"{name}.mlp", c) if sparse else _mlp(f"{name}.mlp", width, c["intermediate_size"])
    for i in range(heads):
        name = f"model.mtp.layers.{i}"
        result |= _mimo_attention(f"{name}.self_attn", c, sliding=True)
        result |= _mlp(f"{name}.mlp", width, c["intermediate_size"])
        result |= _norms(name, width, "enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
        result[f"{name}.eh_proj.weight"] = (width, 2 * width)
    return result


def _mimo_attention(name: str, c: Config, sliding: bool) -> Shapes:
    kind = "swa_" if sliding else ""
    result = _attention(name, c, c[f"{kind}num_key_value_heads"], c[f"{kind}head_dim"], c[f"{kind}v_head_dim"])
    if c["add_swa_attention_sink_bias" if sliding else "add_full_attention_sink_bias"]:
        result[f"{name}.attention_sink_bias"] = (c[f"{kind}num_attention_heads"],)
    return result


def _sigmoid_experts(name: str, c: Config) -> Shapes:
    experts, width = c["n_routed_experts"], c["hidden_size"]
    result: Shapes = {f"{name}.gate.weight": (experts, width), f"{name}.gate.e_score_correction_bias": (experts,)}
    result |= _experts(name, c, experts)
    if c["n_shared_experts"]:
        result |= _mlp(f"{name}.shared_experts", width, c["n_shared_experts"] * c["moe_intermediate_size"])
    return result


def _experts(name: str, c: Config, count: int, fused: bool = False) -> Shapes:
    width, inner = c["hidden_size"], c["moe_intermediate_size"]
    if fused:
        up, down = f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj"
        return {up: (count, 2 * inner, width), down: (count, width, inner)}
    return {k: v for e in range(count) for k, v in _mlp(f"{name}.experts.{e}", width, inner).items()}


def _attention(name: str, c: Config, kv_heads: int, queries: int, values: int | None = None) -> Shapes:
    """queries: their size for each head, a gate included; values: theirs, by default that of keys, ``head_dim``."""
    width, heads, keys = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    values = values or keys
    return {
        f"{name}.q_proj.weight": (heads * queries, width),
        f"{name}.k_proj.weight": (kv_heads * keys, width),
        f"{name}.v_proj.weight": (kv_heads * values, width),
        f"{name}.o_proj.weight": (width, heads * values),
    }


def _mlp(name: str, width: int, inner: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (inner, width),
        f"{name}.up_proj.weight": (inner, width),
        f"{name}.down_proj.weight": (width, inner),
    }


def _norms(name: str, width: int, *norms: str) -> Shapes:
    return {f"{name}.{norm}.weight": (width,) for norm in norms}


def _ends(model: str, c: Config) -> Shapes:
    table = (c["vocab_size"], c["hidden_size"])
    head: Shapes = {} if c["tie_word_embeddings"] else {"lm_head.weight": table}
    return {f"{model}.embed_tokens.weight": table, f"{model}.norm.weight": (c["hidden_size"],), **head}


def _values(name: str, shape: tuple[int, ...], config: Config, seed: int) -> mx.array:
    """Random, of sizes at which no part drowns another. Copies of the embedding and of the output head are equal."""
    family, tied = config["model_type"], config["tie_word_embeddings"]
    kind = name.removesuffix(".weight").rpartition(".")[2]
    shared = {"embed_tokens": "model.embed_tokens.weight", "head": "lm_head.weight"}.get(kind, name)
    rng = np.random.default_rng([seed, zlib.crc32(shared.encode())])
    noise = rng.standard_normal(shape)
    if kind == "A_log":
        noise = np.log(rng.uniform(1, 16, shape))
    elif "norm" in kind:
        # Qwen's hybrid families store a norm's weight less one, but for the one within a Gated DeltaNet.
        less_one = family in ("qwen3_next", "qwen3_5_moe") and ".linear_attn." not in name
        noise = noise / 8 + (0 if less_one else 1)
    elif kind in ("bias", "e_score_correction_bias"):
        noise = noise / 8
    elif len(shape) > 1 and (kind != "embed_tokens" or tied):
        noise = noise / math.sqrt(math.prod(shape[1:]) if kind == "conv1d" else shape[-1])
    return mx.array(noise.astype(np.float32))


_FAMILIES: dict[str, Callable[[Config, int], Shapes]] = {
    "qwen3_next": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_moe": _qwen,
    "glm4_moe": _glm_deepseek,
    "glm4_moe_lite": _glm_deepseek,
    "deepseek_v3": _glm_deepseek,
    "mimo_v2_flash": _mimo,
}
