"""The MTP head of the Qwen3-Next, Qwen3.5 and Qwen3.6 families in NumPy and float64, for the tiny checkpoints.

Written from the architecture, not from strata_mlx: norms of the embedding of the next token and of the hidden state,
concatenated in this order, fc, one full-attention MoE layer, norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.tiny import mtp_parameters, text_config

Array = np.ndarray[Any, np.dtype[np.float64]]
TOP_K, HEADS, HEAD_DIM, ROTARY, ROPE_BASE, EPS = 2, 2, 32, 8, 10000.0, 1e-6


@dataclass(frozen=True)
class Weights:
    by_name: dict[str, Array]

    @classmethod
    def of_tiny(cls, family: str) -> Weights:
        return cls({k: np.array(v, np.float64) for k, v in mtp_parameters(family, text_config(family)).items()})

    def __getitem__(self, name: str) -> Array:
        return self.by_name[f"mtp.{name}.weight"]


def mtp_head(w: Weights, embedding: Any, hidden: Any) -> Array:
    """embedding, hidden ``[B, T, D]`` to the normed output ``[B, T, D]``."""
    return np.stack([_head(w, e, h) for e, h in zip(embedding, hidden, strict=True)])


def _head(w: Weights, embedding: Array, hidden: Array) -> Array:
    parts = _norm(embedding, w["pre_fc_norm_embedding"]), _norm(hidden, w["pre_fc_norm_hidden"])
    x = np.concatenate(parts, axis=-1) @ w["fc"].T
    x = x + _attention(w, _norm(x, w["layers.0.input_layernorm"]))
    x = x + np.stack([_experts(w, row) for row in _norm(x, w["layers.0.post_attention_layernorm"])])
    return _norm(x, w["norm"])


def _attention(w: Weights, x: Array) -> Array:
    name = "layers.0.self_attn."
    queries = (x @ w[f"{name}q_proj"].T).reshape(len(x), HEADS, 2 * HEAD_DIM)
    key = _rope(_norm(x @ w[f"{name}k_proj"].T, w[f"{name}k_norm"]))
    value = x @ w[f"{name}v_proj"].T
    future = np.triu(np.ones((len(x), len(x)), bool), 1)
    heads = []
    for head in range(HEADS):
        query, gate = np.split(queries[:, head], 2, axis=-1)
        scores = _rope(_norm(query, w[f"{name}q_norm"])) @ key.T / np.sqrt(HEAD_DIM)
        heads.append(_softmax(np.where(future, -np.inf, scores)) @ value * _sigmoid(gate))
    return np.concatenate(heads, axis=-1) @ w[f"{name}o_proj"].T


def _experts(w: Weights, x: Array) -> Array:
    name = "layers.0.mlp."
    probabilities = _softmax(w[f"{name}gate"] @ x)
    chosen = np.argsort(-probabilities)[:TOP_K]
    result = _sigmoid(w[f"{name}shared_expert_gate"] @ x) * _mlp(x, *(_mlp_weights(w, f"{name}shared_expert.")))
    for expert in chosen:
        matrices = (matrix[expert] for matrix in _mlp_weights(w, f"{name}switch_mlp."))
        result = result + probabilities[expert] / probabilities[chosen].sum() * _mlp(x, *matrices)
    return result


def _mlp_weights(w: Weights, name: str) -> tuple[Array, Array, Array]:
    return w[f"{name}gate_proj"], w[f"{name}up_proj"], w[f"{name}down_proj"]


def _mlp(x: Array, gate: Array, up: Array, down: Array) -> Array:
    g = gate @ x
    return np.asarray(down @ (g * _sigmoid(g) * (up @ x)))


def _rope(x: Array) -> Array:
    """Rotate the first ROTARY dimensions of ``[T, HEAD_DIM]`` by position, first half against second half."""
    half = ROTARY // 2
    angles = np.arange(len(x))[:, None] * ROPE_BASE ** (-np.arange(half) / half)
    first, second, rest = x[:, :half], x[:, half:ROTARY], x[:, ROTARY:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos, rest], axis=-1)


def _norm(x: Array, weight: Array) -> Array:
    x = x.astype(np.float64)
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight)


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))
