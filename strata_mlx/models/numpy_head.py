"""The MTP head of the Qwen families by NumPy, for drafts on the CPU.

A draft is a forward of one row: some two hundred operations, which MLX's CPU backend takes longer to begin than to
compute. Nothing hangs on the bits of a draft: the trunk confirms every token.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU, SwitchLinear
from numpy.typing import NDArray

from ..device import evaluate, on_cpu
from ..routing import Router
from .attention import Attention
from .few_rows import product, takes
from .moe import MoEBlock
from .mtp import DraftHead, MTPHead
from .trunk import Trunk

Rows = NDArray[np.float32]  # [T, D], if nothing else is said

_KNOWN = {
    MTPHead,
    qwen3_next.Qwen3NextDecoderLayer,
    qwen3_5.DecoderLayer,
    qwen3_next.Qwen3NextMLP,
    Attention,
    MoEBlock,
    SwitchGLU,
    SwitchLinear,
    SwiGLU,
    nn.Linear,
    nn.RMSNorm,
    nn.RoPE,
}
_ROWS = 64  # up to which NumPy is faster: of all but the last it needs keys and values only


def for_drafts(head: DraftHead) -> DraftHead:
    """``head`` as drafts have it: by NumPy on the CPU, if all its parts are known and dense float32; else itself."""
    known = on_cpu() and {type(module) for module in head.modules()} <= _KNOWN
    return NumPyHead(head) if known and _takes(head) else head


def _takes(head: DraftHead) -> bool:
    parameters = tree_flatten(head.parameters())
    return all(value.dtype == mx.float32 and not name.endswith("bias") for name, value in parameters) and all(
        isinstance(layer.mlp, MoEBlock)
        and layer.mlp.router.kind == "softmax"
        and layer.mlp.across is None
        and not layer.self_attn.rope.traditional
        for layer in head.layers
    )


class NumPyHead(DraftHead):
    """Computes what ``head`` does, up to rounding, over the same caches of one text: a few rows by NumPy, at once, of
    which it returns the last one alone. Many rows, and what a routing observer watches, are left to ``head`` itself.
    Its weights are those that ``head`` has now.
    """

    def __init__(self, head: DraftHead):
        super().__init__([], head.takes)
        self._whole = (head,)  # in a tuple, its parameters are not ours
        self._embedding, self._hidden = _Norm(head.pre_fc_norm_embedding), _Norm(head.pre_fc_norm_hidden)
        self._fc, self._norm = _matrix(head.fc), _Norm(head.norm)
        self._layers = [_Layer(layer) for layer in head.layers]

    def read(
        self, trunk: Trunk, tokens: mx.array, hidden: mx.array, cache: list[Any] | None = None, head: int = 0
    ) -> mx.array:
        batch, rows, _ = hidden.shape
        if batch > 1 or rows > _ROWS or self._watched:
            return self._whole[0].read(trunk, tokens, hidden, cache, head)
        cache = cache or self.make_cache()
        evaluate((tokens, hidden, [layer.state for layer in cache]), "drafting")
        parts = self._embedding(_embedded(trunk.embed, tokens)), self._hidden(_view(hidden)[0])
        x = product(np.concatenate(parts, axis=-1), self._fc)
        for layer, c in zip(self._layers, cache, strict=True):
            x = layer(x, c, 1 if layer is self._layers[-1] else rows)
        return mx.array(self._norm(x)[None])

    @property
    def _watched(self) -> bool:
        """Whether somebody notes which experts rows take, who may compare what is drafted with another run's."""
        return any(layer.block.routing.observer is not None for layer in self._layers)

    def make_cache(self) -> list[Any]:
        return self._whole[0].make_cache()

    def likeliest(self, trunk: Trunk, hidden: mx.array, head: int = 0) -> tuple[mx.array, mx.array]:
        if self._watched or not takes(trunk.head):
            return super().likeliest(trunk, hidden, head)
        evaluate((hidden, trunk.head.weight), "drafting")
        (logits,) = product(_view(hidden)[0], _matrix(trunk.head))
        token = int(logits.argmax())
        return mx.array([token], mx.uint32), mx.array(float(1 / np.exp(logits - logits[token]).sum()))


class _Layer:
    def __init__(self, layer: nn.Module):
        self._before_attention, self._attend = _Norm(layer.input_layernorm), _Attention(layer.self_attn)
        self._before_experts, self._mix = _Norm(layer.post_attention_layernorm), _Mixture(layer.mlp)
        self.block: MoEBlock = layer.mlp

    def __call__(self, x: Rows, cache: Any, last: int) -> Rows:
        """Of the ``last`` rows; the cache gets all."""
        x = x[-last:] + self._attend(self._before_attention(x), cache, last)
        return x + self._mix(self._before_experts(x))


class _Norm:
    def __init__(self, norm: nn.Module):
        self._weight, self._eps = _view(norm.weight), np.float32(norm.eps)

    def __call__(self, x: Rows) -> Rows:
        mean = np.einsum("...d,...d->...", x, x)[..., None] / np.float32(x.shape[-1])
        return np.asarray(x / np.sqrt(mean + self._eps) * self._weight)


class _Attention:
    def __init__(self, attention: nn.Module):
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        self._q, self._k, self._v, self._o = (_matrix(attention[name]) for name in names)
        self._q_norm, self._k_norm = _Norm(attention.q_norm), _Norm(attention.k_norm)
        self._heads, self._groups = attention.num_attention_heads, attention.num_key_value_heads
        self._scale, rope = np.float32(attention.scale), attention.rope
        self._turns = rope.scale * rope.base ** (-np.arange(0, rope.dims, 2) / rope.dims)  # radians for a token

    def __call__(self, x: Rows, cache: Any, last: int) -> Rows:
        count = len(x)
        q, gate = np.split(product(x[-last:], self._q).reshape(last, self._heads, -1), 2, axis=-1)
        k, v = (product(x, weight).reshape(count, self._groups, -1) for weight in (self._k, self._v))
        angles = np.arange(cache.offset, cache.offset + count)[:, None, None] * self._turns  # [T, 1, R / 2]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        q, k = _turned(self._q_norm(q), cos[-last:], sin[-last:]), _turned(self._k_norm(k), cos, sin)
        y = self._read(q, *_extended(cache, k.swapaxes(0, 1), v.swapaxes(0, 1)))
        return product((y * _sigmoid(gate)).reshape(last, -1), self._o)

    def _read(self, q: Rows, keys: Rows, values: Rows) -> Rows:
        """Causal attention of q ``[T, H, D]``, the last T tokens, to all ``[G, L, D]``: ``[T, H, D]``."""
        count, width = len(q), q.shape[-1]
        grouped = q.reshape(count, self._groups, -1, width).transpose(1, 2, 0, 3)  # [G, H / G, T, D]
        scores = grouped.reshape(self._groups, -1, width) @ keys.swapaxes(1, 2) * self._scale  # [G, H / G * T, L]
        if count > 1:
            length = scores.shape[-1]
            later = np.arange(length) > np.arange(length - count, length)[:, None]  # [T, L]
            scores.reshape(self._groups, -1, count, length)[..., later] = -np.inf
        y = (_softmax(scores) @ values).reshape(grouped.shape)
        return np.asarray(y.transpose(2, 0, 1, 3).reshape(q.shape))


def _extended(cache: Any, k: Rows, v: Rows) -> tuple[Rows, Rows]:
    """Keys and values ``[G, L, D]`` of a KVCache, whose state is evaluated, with those of T more tokens ``[G, T, D]``.

    Where there is room they are written into the arrays: who holds those has an offset too, and reads no row after it.
    """
    start, end = cache.offset, cache.offset + k.shape[1]
    if cache.keys is None or cache.keys.shape[2] < end:
        evaluate(cache.update_and_fetch(mx.array(k[None]), mx.array(v[None])), "drafting")
        evaluate((cache.keys, cache.values), "drafting")
    keys, values = _view(cache.keys)[0], _view(cache.values)[0]
    keys[:, start:end], values[:, start:end], cache.offset = k, v, end
    return keys[:, :end], values[:, :end]


class _Mixture:
    """The experts of a layer, which its block routes."""

    def __init__(self, block: MoEBlock):
        names = ("gate_proj", "up_proj", "down_proj")
        self._block, self._gate = block, _matrix(block.gate)
        self._experts = [_view(block.switch_mlp[name].weight).swapaxes(1, 2) for name in names]  # [E, in, out]
        self._shared = [_matrix(block.shared_expert[name]) for name in names] if "shared_expert" in block else None
        self._shared_gate = _matrix(block.shared_expert_gate) if self._shared else None

    def __call__(self, x: Rows) -> Rows:
        block, logits = self._block, mx.array(product(x, self._gate)[None])
        chosen = block.routing.route(block.layer, logits, block.router, plain=_choose)
        evaluate(chosen, "drafting")
        ids, weights = (_view(each)[0] for each in chosen)  # [T, K]
        y = np.stack([self._mix(*row) for row in zip(x, ids.tolist(), weights, strict=True)])
        if self._shared and self._shared_gate is not None:
            gate, up, down = self._shared
            y += _sigmoid(product(x, self._shared_gate)) * product(_swiglu(product(x, gate), product(x, up)), down)
        return y

    def _mix(self, x: Rows, ids: list[int], weights: Rows) -> Rows:
        """Of one row, ``[D]``."""
        gate, up, down = self._experts
        gates = np.stack([x @ gate[i] for i in ids])
        inner = _swiglu(gates, np.stack([x @ up[i] for i in ids])) * weights[:, None]
        return np.asarray(sum(row @ down[i] for row, i in zip(inner, ids, strict=True)))


def _choose(logits: mx.array, router: Router, _: mx.array | None) -> tuple[mx.array, mx.array]:
    """As plain_router() for a softmax router."""
    p = _softmax(_view(logits))
    ids = np.argpartition(p, -router.top_k, axis=-1)[..., -router.top_k :]
    weights = np.take_along_axis(p, ids, axis=-1)
    if router.norm_topk:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return mx.array(ids.astype(np.uint32)), mx.array(weights * np.float32(router.scale))


def _embedded(table: Any, tokens: mx.array) -> Rows:
    """Embeddings ``[T, D]`` of tokens ``[1, T]``, which are evaluated."""
    affine = type(table) is nn.QuantizedEmbedding and table.mode == "affine" and table.scales.dtype == mx.float32
    if not affine or table.bits not in (2, 4, 8):  # the others do not divide a word
        rows = table(tokens).astype(mx.float32)
        evaluate(rows, "drafting")
        return np.asarray(_view(rows)[0])
    words, scales, biases = (_view(table[name])[_view(tokens)[0]] for name in ("weight", "scales", "biases"))
    places = np.arange(0, 32, table.bits, dtype=np.uint32)
    values = (words[..., None] >> places & (1 << table.bits) - 1).reshape(*scales.shape, -1)
    return np.asarray((values * scales[..., None] + biases[..., None]).reshape(len(words), -1))


def _turned(x: Rows, cos: Rows, sin: Rows) -> Rows:
    """``x [T, H, D]`` rotated in its first R columns, of which the second half goes with the first."""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], axis=-1)


def _swiglu(gate: Rows, up: Rows) -> Rows:
    return gate * _sigmoid(gate) * up


def _sigmoid(x: Rows) -> Rows:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))  # exp(-x) would overflow


def _softmax(x: Rows) -> Rows:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def _matrix(linear: nn.Module) -> Rows:
    """``[in, out]``."""
    return np.asarray(_view(linear.weight).T)


def _view(x: mx.array) -> Any:
    """The same memory, once it is evaluated."""
    return np.array(x, copy=False)
