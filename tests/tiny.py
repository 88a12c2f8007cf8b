"""Tiny random checkpoints of every family in every layout, with a byte-level tokenizer.

The same seed gives the same weights in each layout: ``parameters`` makes them under the names and in the form of the
MLX layout, and ``hugging_face`` undoes what a conversion does.
"""

from __future__ import annotations

import importlib
import json
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

FAMILIES = ("qwen3_next", "qwen3_5_moe", "qwen3_moe")
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
    "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_HYBRID = {
    "full_attention_interval": 2, "shared_expert_intermediate_size": 64, "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
_ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}


def make_checkpoint(
    path: Path,
    family: str = "qwen3_next",
    layout: str = "separate",
    *,
    mtp: str | None = None,
    dtype: mx.Dtype = mx.float32,
    shards: int = 2,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write a checkpoint into the new folder ``path`` and return it.

    layout: one of LAYOUTS ("fused" is for qwen3_5_moe). mtp: the layout of an MTP head, None for no head. shards: 1
    writes model.safetensors without an index. changes: of the language model's configuration.
    """
    path.mkdir(parents=True)
    text = text_config(family, **changes)
    nested = family == "qwen3_5_moe"
    config = {"model_type": family, "text_config": text, "vision_config": {}} if nested else text
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    tensors = _in_layout(parameters(family, text, seed), layout, text["num_experts"], family)
    head = _in_layout(mtp_parameters(family, text, seed), mtp, text["num_experts"], family) if mtp else {}
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
    rope = {"rope_parameters": {"rope_type": "default", **_ROPE}} if family == "qwen3_5_moe" else _ROPE
    return {"model_type": family, **_COMMON, **({} if family == "qwen3_moe" else _HYBRID), **rope, **changes}


def parameters(family: str, text: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random parameters of mlx_lm's model, by name."""
    arch = importlib.import_module(f"mlx_lm.models.{family}")
    model = arch.Model(arch.ModelArgs.from_dict(text))
    return {name: _random(name, array.shape, seed) for name, array in tree_flatten(model.parameters())}


def mtp_parameters(family: str, text: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random parameters of an MTP head, whose layer has the shapes of the trunk's full attention layer."""
    width, layer = text["hidden_size"], f"layers.{text['full_attention_interval'] - 1}."
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, 2 * width)}
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        shapes[f"{norm}.weight"] = (width,)
    for name, array in parameters(family, text).items():
        if layer in name:
            shapes[f"layers.0.{name.partition(layer)[2]}"] = array.shape
    return {f"mtp.{name}": _random(f"mtp.{name}", shape, seed) for name, shape in shapes.items()}


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
    return mx.array(values * shape[-1] ** -0.5 if len(shape) > 1 else values)


def _in_layout(tensors: dict[str, mx.array], layout: str, experts: int, family: str) -> dict[str, mx.array]:
    return tensors if layout == "stacked" else hugging_face(tensors, layout, experts, family != "qwen3_moe")


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
