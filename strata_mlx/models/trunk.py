"""The trunk of a model in two pieces, layers and output head, so that a draft head can have the hidden states."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from ..device import evaluate, on_cpu
from ..experts.ahead import a_layer_ahead
from .few_rows import multiply, takes


class Hidden(NamedTuple):
    """What the trunk makes of tokens ``[B, T]``, lazily: hidden states ``[B, T, D]``, the final norm apart."""

    before: mx.array
    after: mx.array

    def first(self, rows: int) -> Hidden:
        """Those of the first ``rows`` tokens."""
        if rows == self.after.shape[1]:
            return self
        return Hidden(self.before[:, :rows], self.after[:, :rows])


def make_mask(layer: nn.Module, x: mx.array, cache: Any) -> Any:
    """What a layer's ``mask`` is for input ``[B, T, D]`` in most families; a model with others has a make_mask()."""
    return (create_ssm_mask if getattr(layer, "is_linear", False) else create_attention_mask)(x, cache)


class Trunk:
    """The layers, embedding and output head of a loaded model of any family; it holds no state of its own."""

    def __init__(self, model: nn.Module):
        self._streaming = getattr(model, "streaming", None)  # and not the model, whose head may hold a trunk
        language = getattr(model, "language_model", model)
        self.embed: nn.Module = language.model.embed_tokens
        self.layers: list[nn.Module] = language.model.layers
        self.norm: nn.Module = language.model.norm
        self._mask = getattr(language, "make_mask", make_mask)
        self.head: Any = None if language.args.tie_word_embeddings else language.lm_head

    def __call__(self, tokens: mx.array, cache: list[Any], *, begin: bool = False) -> Hidden:
        """The model's own operations, bit for bit. ``cache`` has an entry per layer.

        begin: have a CPU compute each layer while the next one's operations are still being listed. Layers that stream
        see to that themselves.
        """
        begin = begin and on_cpu() and self._streaming is None
        x = self.embed(tokens)
        masks: dict[tuple[bool, bool], Any] = {}
        with a_layer_ahead(self._streaming):
            for layer, c in zip(self.layers, cache, strict=True):
                kind = getattr(layer, "is_linear", False), getattr(layer, "is_sliding_window", False)
                if kind not in masks:  # of the first layer of each kind, as in mlx-lm
                    masks[kind] = self._mask(layer, x, c)
                x = layer(x, mask=masks[kind], cache=c)
                if begin:
                    evaluate(x, "computing a layer", wait=False)
        return Hidden(x, self.norm(x))

    def logits(self, hidden: mx.array) -> mx.array:
        """Of normed hidden states ``[B, T, D]``: ``[B, T, V]``."""
        return self.embed.as_linear(hidden) if self.head is None else self.head(hidden)

    def rounded_logits(self, hidden: mx.array) -> mx.array:
        """logits() up to rounding, sooner where there is a faster way, for verify windows and drafts: their tokens are
        those of the exact ones unless two logits are equal within rounding. May evaluate ``hidden``.
        """
        return multiply(hidden, self.head.weight) if takes(self.head) else self.logits(hidden)
