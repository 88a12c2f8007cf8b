"""Tiny random checkpoints of every family in every layout, with a byte-level tokenizer.

The same seed gives the same weights in each layout: ``parameters`` makes them under the names and in the form of the
MLX layout, and ``hugging_face`` undoes what a conversion does.
"""

from __future__ import annotations

import importlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

LAYOUTS = ("separate", "fused", "stacked")  # how the experts are stored; the first two are Hugging Face's
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
EOS = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_COMMON = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 259, "eos_token_id": EOS,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_HYBRID = {
    "full_attention_interval": 2, "shared_expert_intermediate_size": 64, "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
_ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
_SIGMOID = {
    "n_shared_experts": 1, "routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3,
    "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "moe_layer_freq": 1,
}  # fmt: skip
_WINDOWS = {
    "n_shared_experts": None, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "sliding_window_size": 8, "routed_scaling_factor": None, "layernorm_epsilon": 1e-6, "swa_rope_theta": 1000.0,
    "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "v_head_dim": 32, "swa_head_dim": 32,
    "swa_v_head_dim": 32, "partial_rotary_factor": 0.334, "attention_value_scale": 0.707,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """One family: its configuration, as far as it differs from the others', and how its checkpoints are laid out.

    ties: whether embedding and output head may be one. dense: how the configuration asks for a dense layer 2 of 4.
    layouts: of the trunk. heads: MTP heads. layer: class of their decoder layers, where they are of DeepSeek's kind.
    quantises: whether its caches can be quantised.
    """

    config: dict[str, Any]
    dense: dict[str, Any] | None = None
    ties: bool = True
    layouts: tuple[str, ...] = ("separate", "stacked")
    heads: int = 1
    layer: str | None = None
    quantises: bool = True


# A new family gets a line here, and every test of families runs over it.
TINY = {
    "qwen3_next": Tiny(_SPARSE | _HYBRID | _ROPE, {"mlp_only_layers": [2]}),
    "qwen3_5_moe": Tiny(_SPARSE | _HYBRID | {"rope_parameters": {"rope_type": "default", **_ROPE}}, layouts=LAYOUTS),
    "qwen3_moe": Tiny(_SPARSE | _ROPE, {"mlp_only_layers": [2]}, heads=0),
    "glm4_moe": Tiny(
        _SIGMOID | {"use_qk_norm": True, "partial_rotary_factor": 0.5}, {"first_k_dense_replace": 3}, ties=False,
        layer="DecoderLayer",
    ),
    "deepseek_v3": Tiny(
        _SIGMOID | _LATENT | {"n_group": 4, "topk_group": 2}, {"moe_layer_freq": 3}, ties=False, quantises=False,
        heads=2, layer="DeepseekV3DecoderLayer",
    ),
    "glm4_moe_lite": Tiny(
        _SIGMOID | _LATENT, {"moe_layer_freq": 3}, ties=False, quantises=False, layer="Glm4MoeLiteDecoderLayer"
    ),
    "mimo_v2_flash": Tiny(
        _SIGMOID | _WINDOWS, {"moe_layer_freq": [0, 1, 0, 1]}, ties=False, quantises=False, heads=3,
        layer="DecoderLayer",
    ),
}  # fmt: skip
FAMILIES = tuple(TINY)
WITH_HEAD = tuple(family for family, tiny in TINY.items() if tiny.heads)


def make_checkpoint(
    path: Path,
    family: str = "qwen3_next",
    layout: str = "separate",
    *,
    mtp: str | None = None,
    dtype: mx.Dtype = mx.float32,
    shards: int = 2,
    seed: int = 0,
    own_parts: str | None = None,
    **changes: Any,
) -> Path:
    """Write a checkpoint into the new folder ``path`` and return it.

    layout: one of LAYOUTS ("fused" is for qwen3_5_moe). mtp: the layout of an MTP head, None for no head. shards: 1
    writes model.safetensors without an index. own_parts: "copies" stores embedding and output head for a head of
    DeepSeek's kind, as copies of the trunk's, "own" stores others. changes: of the language model's configuration, in
    which the number of experts is num_experts for every family.
    """
    path.mkdir(parents=True)
    text = text_config(family, **changes)
    nested = family == "qwen3_5_moe"
    config = {"model_type": family, "text_config": text, "vision_config": {}} if nested else text
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    tensors = _in_layout(parameters(family, text, seed), layout, text, family)
    head = _in_layout(mtp_parameters(family, text, seed), mtp, text, family) if mtp else {}
    if own_parts:
        for part, trunks in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            array = tensors[f"{trunks}.weight"]
            name = _their_name(f"mtp.layers.0.{part}.weight", family, text["num_hidden_layers"])
            head[name] = array if own_parts == "copies" else array[::-1]
    if nested and layout != "stacked":
        tensors = {_qwen3_5_name(name): array for name, array in tensors.items()}
        tensors["model.visual.patch_embed.proj.weight"] = mx.zeros((4, 3, 2, 2))
    if layout == "stacked" and head:
        save(path / "mtp.safetensors", head, dtype)
    else:
        tensors |= head
    save_shards(path, tensors, shards, dtype)
    save_tokenizer(path)
    return path


def text_config(family: str, **changes: Any) -> dict[str, Any]:
    config = own_keys(family, {"model_type": family, **_COMMON, **TINY[family].config, **changes})
    if TINY[family].layer:
        config["num_nextn_predict_layers"] = TINY[family].heads
    if family == "mimo_v2_flash":
        layers = config["num_hidden_layers"]
        patterns = {"hybrid_layer_pattern": [0, *[1] * (layers - 1)], "moe_layer_freq": [0, *[1] * (layers - 1)]}
        config = patterns | config
    return config


def own_keys(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """``changes`` of a configuration by the names that the family has for them."""
    own = {"num_experts": "n_routed_experts"} if "scoring_func" in TINY[family].config else {}
    own |= {"rms_norm_eps": "layernorm_epsilon"} if "layernorm_epsilon" in TINY[family].config else {}
    return {own.get(name, name): value for name, value in changes.items()}


def experts_of(text: dict[str, Any]) -> int:
    return int(text.get("n_routed_experts") or text["num_experts"])


def parameters(family: str, text: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random parameters of mlx_lm's model, by name."""
    arch = importlib.import_module(f"mlx_lm.models.{family}")
    model = arch.Model(arch.ModelArgs.from_dict(text))
    return {name: _random(name, array.shape, seed) for name, array in tree_flatten(model.parameters())}


def mtp_parameters(family: str, text: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random parameters of an MTP head by our names: the layer of Qwen's has the shapes of the trunk's full attention
    layer, those of the others are decoder layers with norms and a projection of their own.
    """
    width, tiny = text["hidden_size"], TINY[family]
    shapes: dict[str, tuple[int, ...]] = {}
    if tiny.layer:
        for head in range(tiny.heads):
            layer = _decoder_layer(family, text, text["num_hidden_layers"] + head)
            shapes |= {f"layers.{head}.{n}": array.shape for n, array in tree_flatten(layer.parameters())}
            norms = ("enorm", "hnorm", "shared_head.norm")
            shapes |= {f"layers.{head}.{norm}.weight": (width,) for norm in norms}
            shapes[f"layers.{head}.eh_proj.weight"] = (width, 2 * width)
    elif tiny.heads:
        shapes["fc.weight"] = (width, 2 * width)
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            shapes[f"{norm}.weight"] = (width,)
        trunk_layer = f"layers.{text['full_attention_interval'] - 1}."
        for name, array in parameters(family, text).items():
            if trunk_layer in name:
                shapes[f"layers.0.{name.partition(trunk_layer)[2]}"] = array.shape
    return {f"mtp.{name}": _random(f"mtp.{name}", shape, seed) for name, shape in shapes.items()}


def _decoder_layer(family: str, text: dict[str, Any], index: int) -> Any:
    arch = importlib.import_module(f"mlx_lm.models.{family}")
    kind, args = getattr(arch, str(TINY[family].layer)), arch.ModelArgs.from_dict(text)
    return kind(args, False, True) if family == "mimo_v2_flash" else kind(args, index)


def save(file: Path, tensors: dict[str, mx.array], dtype: mx.Dtype = mx.float32) -> None:
    mx.save_safetensors(str(file), {name: array.astype(dtype) for name, array in tensors.items()}, {"format": "mlx"})


def read(file: Path) -> dict[str, mx.array]:
    tensors = mx.load(str(file))
    assert isinstance(tensors, dict)
    mx.eval(tensors)
    return tensors


def save_shards(path: Path, tensors: dict[str, mx.array], shards: int, dtype: mx.Dtype = mx.float32) -> None:
    """Deal the tensors out to ``shards`` files and write the index, if there are several."""
    if shards == 1:
        return save(path / "model.safetensors", tensors, dtype)
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: names[i % shards] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save(path / file, {name: tensors[name] for name, place in weight_map.items() if place == file}, dtype)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return None


def save_tokenizer(path: Path) -> None:
    """A tokenizer whose tokens are the 256 bytes and three special tokens."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END, START, STOP)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _random(name: str, shape: tuple[int, ...], seed: int) -> mx.array:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight") or "_norm_" in name:
        return mx.clip(mx.round(8 * mx.array(values)), -32, 32) / 64 + 1  # exact in bfloat16, and so is it less one
    if name.endswith("e_score_correction_bias"):  # not negative, as DeepSeek's are: see plain_router()
        return mx.abs(mx.array(values))
    return mx.array(values * shape[-1] ** -0.5 if len(shape) > 1 else values)


def _in_layout(tensors: dict[str, mx.array], layout: str, text: dict[str, Any], family: str) -> dict[str, mx.array]:
    if layout == "stacked":
        return tensors
    shifted = family in ("qwen3_next", "qwen3_5_moe")
    return {
        _their_name(name, family, text["num_hidden_layers"]): array
        for name, array in hugging_face(_joined_heads(tensors), layout, experts_of(text), shifted).items()
    }


def _their_name(name: str, family: str, layers: int) -> str:
    """What an MTP layer of DeepSeek's kind is called in the Hugging Face layout."""
    if not TINY[family].layer or not name.startswith("mtp."):
        return name
    if family == "mimo_v2_flash":
        name = name.replace("shared_head.norm", "final_layernorm")
        return "model." + name.replace("post_attention_layernorm", "pre_mlp_layernorm")
    _, _, head, rest = name.split(".", 3)
    return f"model.layers.{layers + int(head)}.{rest}"


def _joined_heads(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """With kv_b_proj, whose rows are those of all heads, each one's keys and values."""
    result = {}
    for name, array in tensors.items():
        if name.endswith("embed_q.weight"):
            keys, values = array.swapaxes(1, 2), tensors[name.replace("embed_q", "unembed_out")]
            joined = mx.concatenate([keys, values], axis=1)
            result[name.replace("embed_q", "kv_b_proj")] = joined.reshape(-1, joined.shape[-1])
        elif not name.endswith("unembed_out.weight"):
            result[name] = array
    return result


def hugging_face(tensors: dict[str, mx.array], layout: str, experts: int, shifted: bool) -> dict[str, mx.array]:
    result: dict[str, mx.array] = {}
    for name, array in tensors.items():
        moe, switch, projection = name.partition(".switch_mlp.")
        if switch and layout == "separate":
            result |= {f"{moe}.experts.{e}.{projection}": array[e] for e in range(experts)}
        elif switch and projection == "gate_proj.weight":
            up = tensors[f"{moe}.switch_mlp.up_proj.weight"]
            result[f"{moe}.experts.gate_up_proj"] = mx.concatenate([array, up], axis=-2)
        elif switch and projection == "down_proj.weight":
            result[f"{moe}.experts.down_proj"] = array
        elif not switch:
            is_norm = name.endswith("norm.weight") or "_norm_" in name
            if shifted and is_norm and ".linear_attn." not in name:
                array = array - 1
            result[name] = array.swapaxes(1, 2) if "conv1d" in name else array
    return result


def _qwen3_5_name(name: str) -> str:
    inner = name.removeprefix("language_model.")
    return inner.replace("model.", "model.language_model.", 1) if inner.startswith("model.") else inner
