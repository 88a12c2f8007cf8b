"""MTP heads in NumPy and float64, from a checkpoint's own tensors and written from the published architectures.

Nothing of strata_mlx or mlx_lm is used. DeepSeek-V3 (technical report, section 2.2) and GLM-4.5: the embedding of the
next token and the hidden state, normed and concatenated in this order, ``eh_proj``, a decoder layer,
``shared_head.norm`` and the output head. MiMo-V2-Flash: the same around a dense layer with a sliding window, and
``final_layernorm``. Qwen: ``mtp.fc`` of the same two, a layer with full attention, ``mtp.norm``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.tiny import read

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tensors:
    """Those of a checkpoint under a prefix."""

    by_name: dict[str, Array]
    prefix: str = ""

    def __getitem__(self, name: str) -> Array:
        return self.by_name[f"{self.prefix}{name}"]

    def get(self, name: str) -> Array | None:
        return self.by_name.get(f"{self.prefix}{name}")

    def under(self, name: str) -> Tensors:
        return Tensors(self.by_name, f"{self.prefix}{name}.")


@dataclass(frozen=True)
class Reference:
    """A checkpoint: the language model's configuration and all tensors."""

    config: dict[str, Any]
    tensors: Tensors

    @classmethod
    def open(cls, folder: Path) -> Reference:
        config = json.loads((folder / "config.json").read_text())
        by_name: dict[str, Array] = {}
        for file in folder.glob("*.safetensors"):
            by_name |= {name: np.array(array).astype(np.float64) for name, array in read(file).items()}
        text = {**config.get("text_config", config), "model_type": config["model_type"]}
        return cls(text, Tensors(by_name))

    def embed(self, tokens: NDArray[Any]) -> Array:
        name = "language_model." if self.config["model_type"] == "qwen3_5_moe" else ""
        return self.tensors[f"model.{name}embed_tokens.weight"][tokens]

    def head(self, number: int, embedding: Array, hidden: Array) -> Array:
        """The normed output ``[B, T, D]`` of the ``number``-th MTP layer.

        embedding ``[B, T, D]`` is of the next tokens, hidden ``[B, T, D]`` the trunk's or the layer before's.
        """
        return np.stack([self._head(number, e, h) for e, h in zip(embedding, hidden, strict=True)])

    def logits(self, number: int, normed: Array) -> Array:
        """``[..., V]`` of the ``number``-th MTP layer's output."""
        own = self.tensors.get(f"{self._name(number)}.shared_head.head.weight")
        if own is not None:
            return normed @ own.T
        head = self.tensors.get("lm_head.weight")
        return normed @ (self.embed(np.arange(self.config["vocab_size"])) if head is None else head).T

    def layer(self, name: str, x: Array, sliding: bool = False) -> Array:
        """A decoder layer with attention over ``[T, D]``."""
        w = self.tensors.under(name)
        attention = latent_attention if "kv_lora_rank" in self.config else self._attention(sliding)
        x = x + attention(self.config, w.under("self_attn"), self._norm(x, w["input_layernorm.weight"]))
        second = w.get("pre_mlp_layernorm.weight")
        normed = self._norm(x, w["post_attention_layernorm.weight"] if second is None else second)
        return x + feed_forward(self.config, w.under("mlp"), normed)

    def _head(self, number: int, embedding: Array, hidden: Array) -> Array:
        name = self._name(number)
        if self.config["model_type"].startswith("qwen"):
            w, names = self.tensors.under("mtp"), ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        else:
            w, names = self.tensors.under(name), ("enorm", "hnorm", "eh_proj", self._last_norm())
        of_embedding, of_hidden, projection, last = (w[f"{part}.weight"] for part in names)
        both = np.concatenate([self._norm(embedding, of_embedding), self._norm(hidden, of_hidden)], axis=-1)
        return self._norm(self.layer(name, both @ projection.T, sliding=True), last)

    def _name(self, number: int) -> str:
        family = self.config["model_type"]
        if family.startswith("qwen"):
            return f"mtp.layers.{number}"
        if family == "mimo_v2_flash":
            return f"model.mtp.layers.{number}"
        return f"model.layers.{self.config['num_hidden_layers'] + number}"

    def _last_norm(self) -> str:
        return "final_layernorm" if self.config["model_type"] == "mimo_v2_flash" else "shared_head.norm"

    def _norm(self, x: Array, weight: Array) -> Array:
        if self.config["model_type"] in ("qwen3_next", "qwen3_5_moe"):
            weight = weight + 1
        return rms_norm(x, weight, self.config.get("rms_norm_eps") or self.config["layernorm_epsilon"])

    def _attention(self, sliding: bool) -> Any:
        family = self.config["model_type"]
        if family == "mimo_v2_flash" and sliding:
            return sliding_attention
        return gated_attention if family in ("qwen3_next", "qwen3_5_moe") else attention


def gated_attention(c: dict[str, Any], w: Tensors, x: Array) -> Array:
    """Qwen's: every query comes with a gate for what its head finds; norms are stored less one."""
    heads, size, eps = c["num_attention_heads"], c["head_dim"], c["rms_norm_eps"]
    rope = c.get("rope_parameters", c)
    rotary, base = int(size * rope["partial_rotary_factor"]), rope["rope_theta"]
    queries, gates = np.split((x @ w["q_proj.weight"].T).reshape(len(x), heads, 2 * size), 2, axis=-1)
    keys = (x @ w["k_proj.weight"].T).reshape(len(x), -1, size)
    values = (x @ w["v_proj.weight"].T).reshape(len(x), -1, size)
    queries = rotate_half(rms_norm(queries, w["q_norm.weight"] + 1, eps), rotary, base)
    keys = rotate_half(rms_norm(keys, w["k_norm.weight"] + 1, eps), rotary, base)
    found = attend(queries, keys, values, size**-0.5) * sigmoid(gates)
    return found.reshape(len(x), -1) @ w["o_proj.weight"].T


def attention(c: dict[str, Any], w: Tensors, x: Array) -> Array:
    """Grouped queries, with biases and norms of queries and keys where they are stored."""
    kinds = c["head_dim"], c.get("v_head_dim", c["head_dim"]), c["rope_theta"]
    return _attention(c, w, x, *kinds, window=None)


def sliding_attention(c: dict[str, Any], w: Tensors, x: Array) -> Array:
    """MiMo's: the last ``sliding_window_size`` tokens, the query's own among them, and a sink for each head."""
    kinds = c["swa_head_dim"], c["swa_v_head_dim"], c["swa_rope_theta"]
    return _attention(c, w, x, *kinds, window=c["sliding_window_size"])


def _attention(
    c: dict[str, Any], w: Tensors, x: Array, size: int, value_size: int, base: float, window: int | None
) -> Array:
    rotary = int(size * c.get("partial_rotary_factor", 1.0))
    queries, keys = (_project(w, part, x).reshape(len(x), -1, size) for part in ("q", "k"))
    values = _project(w, "v", x).reshape(len(x), -1, value_size) * (c.get("attention_value_scale") or 1.0)
    of_queries, of_keys = w.get("q_norm.weight"), w.get("k_norm.weight")
    if of_queries is not None and of_keys is not None:
        queries = rms_norm(queries, of_queries, c["rms_norm_eps"])
        keys = rms_norm(keys, of_keys, c["rms_norm_eps"])
    queries, keys = rotate_half(queries, rotary, base), rotate_half(keys, rotary, base)
    found = attend(queries, keys, values, size**-0.5, window, w.get("attention_sink_bias"))
    return found.reshape(len(x), -1) @ w["o_proj.weight"].T


def _project(w: Tensors, part: str, x: Array) -> Array:
    bias = w.get(f"{part}_proj.bias")
    return x @ w[f"{part}_proj.weight"].T + (0 if bias is None else bias)


def latent_attention(c: dict[str, Any], w: Tensors, x: Array) -> Array:
    """DeepSeek's multi-head latent attention (DeepSeek-V2, section 2.1), with YaRN where it is configured."""
    heads, plain, rotary = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    low, eps = c["kv_lora_rank"], c["rms_norm_eps"]
    if c["q_lora_rank"] is None:
        queries = x @ w["q_proj.weight"].T
    else:
        queries = rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], eps) @ w["q_b_proj.weight"].T
    queries = queries.reshape(len(x), heads, plain + rotary)
    latent, shared_key = np.split(x @ w["kv_a_proj_with_mqa.weight"].T, [low], axis=-1)
    both = rms_norm(latent, w["kv_a_layernorm.weight"], eps) @ w["kv_b_proj.weight"].T
    keys, values = np.split(both.reshape(len(x), heads, -1), [plain], axis=-1)
    frequencies, scale = yarn(c)
    rotated = np.repeat(rotate_pairs(shared_key[:, None], frequencies), heads, axis=1)
    keys = np.concatenate([keys, rotated], axis=-1)
    queries = np.concatenate([queries[..., :plain], rotate_pairs(queries[..., plain:], frequencies)], axis=-1)
    found = attend(queries, keys, values, scale * (plain + rotary) ** -0.5)
    return found.reshape(len(x), -1) @ w["o_proj.weight"].T


def attend(
    queries: Array, keys: Array, values: Array, scale: float, window: int | None = None, sinks: Array | None = None
) -> Array:
    """Causal attention of ``[T, H, K]`` over ``[T, G, K]`` and ``[T, G, V]`` where G divides H: ``[T, H, V]``."""
    length, heads = queries.shape[:2]
    keys, values = (np.repeat(a, heads // a.shape[1], axis=1) for a in (keys, values))
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    scores = np.where(seen, np.einsum("qhd,khd->hqk", queries, keys) * scale, -np.inf)
    weights = np.exp(scores)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:  # a key without a value
        total = total + np.exp(sinks)[:, None, None]
    return np.einsum("hqk,khd->qhd", weights / total, values)


def rotate_half(x: Array, rotary: int, base: float) -> Array:
    """Rotate the first ``rotary`` of ``[T, H, K]`` by position, first half against second half."""
    half = rotary // 2
    angles = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos, rest], axis=-1)


def rotate_pairs(x: Array, frequencies: Array) -> Array:
    """Rotate ``[T, H, K]`` by position, each even dimension against the odd one after it."""
    angles = np.arange(len(x))[:, None, None] * frequencies
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def yarn(c: dict[str, Any]) -> tuple[Array, float]:
    """Rotary frequencies ``[K / 2]`` and the factor of attention's scores (Peng et al., *YaRN*, 2023, section 3.2; the
    factor as in DeepSeek-V2, where ``mscale`` equals ``mscale_all_dim``).
    """
    size, base, scaling = c["qk_rope_head_dim"], c["rope_theta"], c["rope_scaling"]
    frequencies = base ** (-np.arange(0, size, 2) / size)
    if scaling is None:
        return frequencies, 1.0

    def dimension(rotations: float) -> float:
        """The one that rotates so often within the original context."""
        context = scaling["original_max_position_embeddings"]
        return size * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(dimension(scaling["beta_fast"])), math.ceil(dimension(scaling["beta_slow"]))
    slow = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
    scale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
    return frequencies * (1 - slow) + frequencies / scaling["factor"] * slow, scale**2


def feed_forward(c: dict[str, Any], w: Tensors, x: Array) -> Array:
    """Dense where the layer has no router."""
    router = w.get("gate.weight")
    if router is None:
        return mlp(w, x)
    choose = choose_by_sigmoid if w.get("gate.e_score_correction_bias") is not None else choose_by_softmax
    routed = np.stack([_experts(w, row, *choose(c, w, router @ row)) for row in x])
    if w.get("shared_experts.up_proj.weight") is not None:
        return routed + mlp(w.under("shared_experts"), x)
    if w.get("shared_expert.up_proj.weight") is not None:
        return routed + sigmoid(x @ w["shared_expert_gate.weight"].T) * mlp(w.under("shared_expert"), x)
    return routed


def choose_by_softmax(c: dict[str, Any], w: Tensors, scores: Array) -> tuple[NDArray[np.intp], Array]:  # noqa: ARG001
    """Experts and their weights ``[K]`` by the router's scores ``[E]``."""
    probabilities = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    chosen = np.argsort(-probabilities)[: c["num_experts_per_tok"]]
    weights = probabilities[chosen]
    return chosen, weights / weights.sum() if c["norm_topk_prob"] else weights


def choose_by_sigmoid(c: dict[str, Any], w: Tensors, scores: Array) -> tuple[NDArray[np.intp], Array]:
    """The bias decides on experts alone, within the groups whose two best experts promise most (DeepSeek-V3, 2.1.2)."""
    own = sigmoid(scores)
    biased = (own + w["gate.e_score_correction_bias"]).reshape(c["n_group"], -1)
    promise = np.sort(biased, axis=-1)[:, -2:].sum(-1)
    biased[np.argsort(-promise)[c["topk_group"] :]] = -np.inf
    chosen = np.argsort(-biased.reshape(-1))[: c["num_experts_per_tok"]]
    weights = own[chosen] / own[chosen].sum() if c["norm_topk_prob"] else own[chosen]
    return chosen, weights * (c["routed_scaling_factor"] or 1.0)


def _experts(w: Tensors, x: Array, chosen: NDArray[np.intp], weights: Array) -> Array:
    return np.asarray(sum(weight * _expert(w, int(e), x) for e, weight in zip(chosen, weights, strict=True)))


def _expert(w: Tensors, number: int, x: Array) -> Array:
    fused = w.get("experts.gate_up_proj")
    if fused is None:
        return mlp(w.under(f"experts.{number}"), x)
    gate, up = np.split(fused[number], 2)
    return w["experts.down_proj"][number] @ (silu(gate @ x) * (up @ x))


def mlp(w: Tensors, x: Array) -> Array:
    gate, up = x @ w["gate_proj.weight"].T, x @ w["up_proj.weight"].T
    return (silu(gate) * up) @ w["down_proj.weight"].T


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)


def silu(x: Array) -> Array:
    return np.asarray(x * sigmoid(x))


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))
