"""What the fused kernels compute, in float64 NumPy, written from the definitions of the layers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from strata_mlx.fused.matrix import Matrix

Floats = NDArray[np.float64]


def wide(x: mx.array) -> Floats:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def dense(matrix: Matrix) -> Floats:
    """The weights behind a matrix, unpacked by hand."""
    if not matrix.bits:
        return wide(matrix.weight)
    words = np.array(matrix.weight)
    shifts = np.arange(0, 32, matrix.bits, dtype=np.uint32)
    codes = (words[..., None] >> shifts & (1 << matrix.bits) - 1).reshape(*words.shape[:-1], -1)
    scales, biases = (np.repeat(wide(x), matrix.group, axis=-1) for x in (matrix.scales, matrix.biases))
    return codes * scales + biases


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def silu(x: Floats) -> Floats:
    return x * sigmoid(x)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def gated_delta(projected: Floats, tail: Floats, state: Floats, layer: Any) -> tuple[Floats, Floats, Floats]:
    """One sequence: ``[T, N]``, ``[K-1, C]`` and ``[Hv, Dv, Dk]``."""
    hk, hv, dk, dv = layer.k_heads, layer.v_heads, layer.k_dim, layer.v_dim
    ratio, tokens = hv // hk, len(projected)
    if layer.interleaved:
        main, gates = np.split(projected, [2 * hk * dk + 2 * hv * dv], axis=-1)
        main = main.reshape(tokens, hk, -1)
        q, k, v, z = np.split(main, [dk, 2 * dk, 2 * dk + ratio * dv], axis=-1)
        b, a = np.split(gates.reshape(tokens, hk, -1), 2, axis=-1)
    else:
        bounds = np.cumsum([hk * dk, hk * dk, hv * dv, hv * dv, hv])
        q, k, v, z, b, a = np.split(projected, bounds, axis=-1)
    q, k, v, z, b, a = (x.reshape(tokens, -1) for x in (q, k, v, z, b, a))
    inputs = np.concatenate([tail, np.concatenate([q, k, v], axis=-1)])
    conv, taps = wide(layer.conv)[:, :, 0], layer.conv.shape[1]
    out = silu(np.stack([(inputs[t : t + taps] * conv.T).sum(0) for t in range(tokens)]))
    q, k, v = np.split(out, [hk * dk, 2 * hk * dk], axis=-1)
    q, k = (np.repeat(x.reshape(tokens, hk, dk), ratio, axis=1) for x in (q, k))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q = q / np.sqrt(dk)
    v, z = v.reshape(tokens, hv, dv), z.reshape(tokens, hv, dv)
    decay = np.exp(-np.exp(wide(layer.A_log)) * np.log1p(np.exp(a + wide(layer.dt_bias))))
    beta, state, rows = sigmoid(b), state.copy(), []
    for t in range(tokens):
        state *= decay[t][:, None, None]
        delta = (v[t] - np.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
        state += delta[..., None] * k[t][:, None]
        rows.append(np.einsum("hvk,hk->hv", state, q[t]))
    y = rms_norm(np.stack(rows), wide(layer.norm), layer.eps) * silu(z)
    return y.reshape(tokens, -1), inputs[tokens:], state


def rotate(x: Floats, positions: NDArray[np.int64], frequencies: Floats) -> Floats:
    """``[T, H, D]``: the first dimensions, in halves, by the angles."""
    half = len(frequencies)
    angles = (positions[:, None] * frequencies).astype(np.float32).astype(np.float64)[:, None]  # as every RoPE has them
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    turned = first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)
    return np.concatenate([*turned, rest], axis=-1)


def attention_heads(projected: Floats, offset: int, layer: Any) -> tuple[Floats, Floats, Floats, Floats]:
    """q, gate ``[T, H, D]``, k and v ``[T, G, D]``."""
    tokens, positions = len(projected), offset + np.arange(len(projected))
    q, k, v = np.split(projected, np.cumsum([2 * layer.heads * layer.dim, layer.groups * layer.dim]), axis=-1)
    q, gate = np.split(q.reshape(tokens, layer.heads, -1), 2, axis=-1)
    k, v = k.reshape(tokens, layer.groups, -1), v.reshape(tokens, layer.groups, -1)
    frequencies = wide(layer.frequencies)
    q = rotate(rms_norm(q, wide(layer.q_norm), layer.eps), positions, frequencies)
    return q, gate, rotate(rms_norm(k, wide(layer.k_norm), layer.eps), positions, frequencies), v


def attend(q: Floats, keys: Floats, values: Floats, gate: Floats, offset: int, scale: float) -> Floats:
    """q, gate ``[T, H, D]``, keys and values ``[G, L, D]``."""
    tokens, heads, _ = q.shape
    out = np.zeros_like(q)
    for t in range(tokens):
        for h in range(heads):
            seen = offset + t + 1
            k, v = (x[h // (heads // len(keys)), :seen] for x in (keys, values))
            scores = k @ q[t, h] * scale
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v / weights.sum()
    return (out * sigmoid(gate)).reshape(tokens, -1)
