"""Multi-token-prediction (MTP) heads: what drafts tokens from the hidden states of the trunk."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from ..errors import CheckpointError
from .trunk import Hidden, Trunk, make_mask

Mask = Callable[[nn.Module, mx.array, Any], Any]  # a layer, its input [B, T, D] and its cache, to a mask
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


class DraftHead(nn.Module):
    """One head, or several that take turns: head i makes draft i of a chain, the last one all that follow.

    Head i predicts token t+2+i from that token t+1+i is and from hidden states of token t: the trunk's for the first
    head, and for a later one those that the head before it made, if they are ``chained``, or the trunk's again.

    takes: which of the trunk's hidden states, "before" or "after" the final norm; a wrong choice lowers the acceptance.
    layers: of all heads in order. Embedding and output head are the trunk's, unless a head has its own.
    """

    heads: int = 1
    chained: bool = True
    # What takes a row of logits [1, V] to its likeliest token [1] and the probability of that [1], where there is a
    # kernel for it.
    picks: Callable[[mx.array], tuple[mx.array, mx.array]] | None = None

    def __init__(self, layers: list[nn.Module], takes: str, mask: Mask = make_mask):
        super().__init__()
        if takes not in Hidden._fields:
            raise CheckpointError(f"mtp_hidden is {takes!r}, expected one of {', '.join(Hidden._fields)}")
        self.takes = takes
        self.layers = layers
        self._mask = mask

    def __call__(
        self, embedding: mx.array, hidden: mx.array, cache: list[Any] | None = None, head: int = 0
    ) -> mx.array:
        """Head ``head`` on embeddings of tokens t+1+head and hidden states of tokens t, both ``[B, T, D]``.

        cache: from make_cache(), of all heads; the head extends its own part. Returns the normed hidden states
        ``[B, T, D]`` that the output head takes. They are also the ``hidden`` of the next chained step.
        """
        raise NotImplementedError  # each family has its own wiring: this is what they have in common

    def read(
        self, trunk: Trunk, tokens: mx.array, hidden: mx.array, cache: list[Any] | None = None, head: int = 0
    ) -> mx.array:
        """The same with tokens ``[B, T]`` instead of their embeddings."""
        return self(self.embed(trunk, tokens, head), hidden, cache, head)

    def make_cache(self) -> list[Any]:
        """An empty cache for each of ``layers``."""
        return [KVCache() for _ in self.layers]

    def embed(self, trunk: Trunk, tokens: mx.array, head: int = 0) -> Any:  # noqa: ARG002
        """Embeddings ``[B, T, D]`` of tokens ``[B, T]``, as head ``head`` takes them."""
        return trunk.embed(tokens)

    def logits(self, trunk: Trunk, hidden: mx.array, head: int = 0) -> mx.array:  # noqa: ARG002
        """Logits ``[B, T, V]``, up to rounding, by what head ``head`` returned."""
        return trunk.rounded_logits(hidden)

    def likeliest(self, trunk: Trunk, hidden: mx.array, head: int = 0) -> tuple[mx.array, mx.array]:
        """The likeliest token ``[1]`` by one row ``[1, 1, D]`` of what head ``head`` returned, and its probability,
        a float32 scalar.
        """
        logits = self.logits(trunk, hidden, head)[0]
        if self.picks:
            token, probability = self.picks(logits)
            return token, probability[0]
        return mx.argmax(logits, axis=-1), confidence(logits)


def confidence(logits: mx.array) -> mx.array:
    """The probability of the likeliest token by one row of logits ``[1, V]``, a float32 scalar."""
    logits = logits.astype(mx.float32)
    return mx.exp(mx.max(logits) - mx.logsumexp(logits))


class MTPHead(DraftHead):
    """Of the Qwen3-Next, Qwen3.5 and Qwen3.6 families (``mtp.*`` tensors): one head.

    layers: full-attention MoE layers of the family. hidden_size: of the trunk. eps: of its RMSNorms.
    """

    def __init__(self, layers: list[nn.Module], hidden_size: int, eps: float, takes: str = "after"):
        super().__init__(layers, takes)
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def __call__(
        self,
        embedding: mx.array,
        hidden: mx.array,
        cache: list[Any] | None = None,
        head: int = 0,  # noqa: ARG002
    ) -> mx.array:
        x = self.fc(mx.concatenate([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], axis=-1))
        return self._through(x, cache)

    def _through(self, x: mx.array, cache: list[Any] | None) -> mx.array:
        """Layers and norm on ``[B, T, D]``."""
        cache = cache or [None] * len(self.layers)
        mask = self._mask(self.layers[0], x, cache[0])
        for layer, c in zip(self.layers, cache, strict=True):
            x = layer(x, mask, c)
        result: mx.array = self.norm(x)
        return result


class SharedHead(nn.Module):
    """A norm, and the output head where it is not the trunk's."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=eps)


class NextTokenLayers(DraftHead):
    """Of the DeepSeek, GLM and MiMo families: a decoder layer of the family for each head, which gets norms of its two
    inputs, a projection of both and a norm of its output, under the names that checkpoints have.

    The wiring is that of DeepSeek-V3, arXiv 2412.19437, section 2.2: eh_proj on [enorm(embedding), hnorm(hidden)], the
    layer, and the shared head with a norm of its own. As its checkpoints are served, in order of that concatenation.

    chained: see DraftHead. cache_of: makes the cache of a layer.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        hidden_size: int,
        eps: float,
        takes: str = "after",
        *,
        chained: bool = True,
        mask: Mask = make_mask,
        cache_of: Callable[[], Any] = KVCache,
    ):
        super().__init__(layers, takes, mask)
        self.heads, self.chained, self._cache_of = len(layers), chained, cache_of
        for layer in layers:
            layer.enorm = nn.RMSNorm(hidden_size, eps=eps)
            layer.hnorm = nn.RMSNorm(hidden_size, eps=eps)
            layer.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
            layer.shared_head = SharedHead(hidden_size, eps)

    def __call__(
        self, embedding: mx.array, hidden: mx.array, cache: list[Any] | None = None, head: int = 0
    ) -> mx.array:
        layer, c = self.layers[head], cache[head] if cache else None
        x = layer.eh_proj(mx.concatenate([layer.enorm(embedding), layer.hnorm(hidden)], axis=-1))
        return layer.shared_head.norm(layer(x, self._mask(layer, x, c), c))

    @property
    def norm(self) -> nn.Module:
        """That of the last head's output."""
        return self.layers[-1].shared_head.norm

    def make_cache(self) -> list[Any]:
        return [self._cache_of() for _ in self.layers]

    def embed(self, trunk: Trunk, tokens: mx.array, head: int = 0) -> Any:
        layer = self.layers[head]
        return layer.embed_tokens(tokens) if "embed_tokens" in layer else trunk.embed(tokens)

    def logits(self, trunk: Trunk, hidden: mx.array, head: int = 0) -> mx.array:
        shared = self.layers[head].shared_head
        return shared.head(hidden) if "head" in shared else trunk.rounded_logits(hidden)

    def give_own(self, head: int, part: str, vocabulary: int) -> None:
        """Let a head have its own "embed_tokens" or "shared_head.head", for ``vocabulary`` tokens."""
        layer = self.layers[head]
        width = layer.enorm.weight.shape[0]
        if part == "embed_tokens":
            layer.embed_tokens = nn.Embedding(vocabulary, width)
        else:
            layer.shared_head.head = nn.Linear(width, vocabulary, bias=False)


OWN_PARTS = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}  # and what they may be copies of


def after_the_trunk(stored: str, config: dict[str, Any]) -> str:
    """Our name for a stored one of DeepSeek and GLM, whose MTP layers are numbered on after the trunk's."""
    match, layers = _LAYER.match(stored), config.get("num_hidden_layers")
    if match is None or type(layers) is not int or int(match[1]) < layers:
        return stored
    return f"mtp.layers.{int(match[1]) - layers}.{stored[match.end() :]}"
