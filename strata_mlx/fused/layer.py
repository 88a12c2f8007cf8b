"""Decoder layers whose windows of a few rows run as a handful of kernels; everything else goes mlx-lm's way."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import cuda
from ..kernels import Build
from ..prefill import make_cache
from .check import agree
from .matrix import Matrix, matrix_of
from .mixers import Arrays, AttentionMixer, RecurrentMixer, compiled
from .mixture import Mixture
from .project import MAX_ROWS, project
from .tokens import embed


class _Steps:
    """How one layer runs: mixer alone, experts alone, or both as one graph. Its weights are the first window's."""

    def __init__(self, layer: nn.Module, build: Build | None):
        kind = RecurrentMixer if "linear_attn" in layer else AttentionMixer
        self.mixer: RecurrentMixer | AttentionMixer | None = kind.of(layer, build)
        self.mixture = mixture = Mixture.of(layer, build)
        if mixture is not None:
            self.experts = compiled(mixture.compute, build)
        if self.mixer is None:
            return
        compute = self.mixer.compute

        def whole(*arrays: mx.array) -> Arrays:
            assert mixture is not None
            mixed, *rest = compute(*arrays)
            result, ids = mixture.compute(mixed)
            return [result, *rest, ids]

        self.without, self.whole = compiled(compute, build), compiled(whole, build)


class FusedLayer(nn.Module):
    """Takes over a decoder layer, parameters and their names included.

    Windows of up to MAX_ROWS rows, over caches that hold no padding, take the kernels as far as those know the layer's
    parts; all else takes the layer's own way. build: what builds the kernels; by default that of MLX's GPU backend.
    """

    def __init__(self, layer: nn.Module, build: Build | None = None):
        super().__init__()
        self.__dict__.update(layer.__dict__)
        dict.update(self, layer)
        self._build = build
        self._made: _Steps | None = None

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        result: mx.array
        steps = self._steps()
        if x.shape[0] * x.shape[1] > MAX_ROWS:
            if isinstance(steps.mixer, RecurrentMixer) and steps.mixer.reads(x, mask, cache):
                return self._own_way(steps.mixer.read(x, self.linear_attn, cache))
            return self._own_way(self._mixed(x, mask, cache))
        mixer = steps.mixer if steps.mixer is not None and steps.mixer.takes(x, mask, cache) else None
        mixture = steps.mixture
        whole = mixture is not None and mixture.experts is not None and self.mlp.routing.mode == "exact"
        if mixer is not None and whole:
            result, ids = mixer(steps.whole, x, cache)
        else:
            mixed = mixer(steps.without, x, cache)[0] if mixer is not None else self._mixed(x, mask, cache)
            if mixture is None:
                return self._own_way(mixed)
            if not whole:
                return mixture(mixed, self.mlp)
            result, ids = steps.experts(mixed)
        if self.mlp.routing.observer is not None:
            self.mlp.routing.observer(self.mlp.layer, ids)
        return result

    def _mixed(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        mixer = self.linear_attn if "linear_attn" in self else self.self_attn
        result: mx.array = x + mixer(self.input_layernorm(x), mask, cache)
        return result

    def _own_way(self, mixed: mx.array) -> mx.array:
        result: mx.array = mixed + self.mlp(self.post_attention_layernorm(mixed))
        return result

    def _steps(self) -> _Steps:
        if self._made is None:
            self._made = _Steps(self, self._build)
        return self._made


class FusedLinear(nn.Module):
    """Takes over a linear layer: rows of a window get the bits that each of them gets alone."""

    def __init__(self, linear: nn.Module, matrix: Matrix, build: Build | None):
        super().__init__()
        dict.update(self, linear)
        self.freeze()
        self._matrix, self._build, self._own_way = matrix, build, linear.__call__

    def __call__(self, x: mx.array) -> mx.array:
        if x.ndim == 3 and x.shape[0] * x.shape[1] <= MAX_ROWS:
            return project(x, [self._matrix], build=self._build)
        result: mx.array = self._own_way(x)
        return result


class FusedEmbedding(nn.QuantizedEmbedding):
    """Takes over a quantised embedding, and the output head where that is tied to it."""

    def __init__(self, embedding: nn.QuantizedEmbedding, matrix: Matrix, build: Build | None):
        nn.Module.__init__(self)
        dict.update(self, embedding)
        for name in ("group_size", "bits", "mode", "num_embeddings", "dims"):
            setattr(self, name, getattr(embedding, name))
        self.freeze()
        self._matrix, self._build = matrix, build

    def __call__(self, x: mx.array) -> mx.array:
        if x.size <= MAX_ROWS:
            return embed(x, self._matrix, build=self._build)
        result: mx.array = super().__call__(x)
        return result

    def as_linear(self, x: mx.array) -> mx.array:
        if x.ndim == 3 and x.shape[0] * x.shape[1] <= MAX_ROWS:
            return project(x, [self._matrix], build=self._build)
        result: mx.array = super().as_linear(x)
        return result


_PARTS = {"input_layernorm", "post_attention_layernorm", "mlp"}


def fuse(model: nn.Module, build: Build | None = None) -> None:
    """Let layers, embedding and output head of a loaded ``model`` run as kernels where they can; on Metal, where no
    release has been tried, only after two layers have been seen to compute the same.
    """
    if build is None and mx.cuda.is_available() and cuda.available():
        cuda.shorthands()
    language = getattr(model, "language_model", model)
    trunk = language.model.layers
    fused = [_fused(layer, build) for layer in trunk]
    if build is None and mx.metal.is_available() and not _tried(model, trunk, fused):
        return
    language.model.layers = fused
    if "mtp" in model:
        model.mtp.layers = [_fused(layer, build) for layer in model.mtp.layers]
    embedding, head = language.model.embed_tokens, language.get("lm_head")
    if type(embedding) is nn.QuantizedEmbedding and (matrix := matrix_of(embedding)) is not None:
        language.model.embed_tokens = FusedEmbedding(embedding, matrix, build)
    if head is not None and (matrix := matrix_of(head)) is not None:
        language.lm_head = FusedLinear(head, matrix, build)


def _fused(layer: nn.Module, build: Build | None) -> nn.Module:
    parts = set(layer.children()) - {"linear_attn", "self_attn"}
    return FusedLayer(layer, build) if parts == _PARTS else layer


def _tried(model: nn.Module, own: list[nn.Module], fused: list[nn.Module]) -> bool:
    """The first layer of each kind."""
    kinds = {("linear_attn" in layer, "switch_mlp" in layer.mlp): i for i, layer in reversed(list(enumerate(own)))}
    places, caches = sorted(kinds.values()), [make_cache(model) for _ in range(2)]
    return agree([own[i] for i in places], [fused[i] for i in places], [[c[i] for c in caches] for i in places])
