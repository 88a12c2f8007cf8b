"""Decoder layers whose windows of a few rows run as a handful of kernels; everything else goes mlx-lm's way."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from .. import cuda
from ..experts.streaming import streaming_of
from ..kernels import Build
from ..models.trunk import Trunk
from ..prefill import make_cache
from .check import agree
from .draft import FusedHead
from .matrix import matrix_of
from .mixers import Arrays, AttentionMixer, RecurrentMixer, compiled
from .mixture import Mixture
from .project import MAX_ROWS, project
from .tokens import embed, likeliest

MAX_GRAPHS = 64  # of a layer, for caches of other sizes


class _Steps:
    """How one layer runs: mixer alone, experts alone, or both as one graph. Its weights are the first window's."""

    def __init__(self, layer: nn.Module, build: Build | None):
        kind = RecurrentMixer if "linear_attn" in layer else AttentionMixer
        self._build = build
        self.mixer: RecurrentMixer | AttentionMixer | None = kind.of(layer, build)
        self.mixture = mixture = Mixture.of(layer, build)
        if mixture is not None:
            self.experts = compiled(mixture.begin, build)
        if self.mixer is None:
            return
        compute = self.mixer.compute

        def whole(*arrays: mx.array) -> Arrays:
            assert mixture is not None
            mixed, *rest = compute(*arrays)
            result, *chosen = mixture.begin(mixed)
            return [result, *rest, *chosen]

        self._graphs, self._sizes = (compute, whole), set[tuple[int, ...]]()
        self.renew()

    def renew(self, size: tuple[int, ...] = ()) -> None:
        """Take note of a cache of ``size``. A graph is kept for each, and looked for among all: not among too many."""
        if size in self._sizes:
            return
        self._sizes = {size} if len(self._sizes) >= MAX_GRAPHS else self._sizes | {size}
        if len(self._sizes) == 1:
            self.without, self.whole = (compiled(graph, self._build) for graph in self._graphs)


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
        if mixer is not None and isinstance(cache, KVCache) and cache.keys is not None:
            steps.renew(cache.keys.shape)
        mixture = steps.mixture
        exact = mixture is not None and self.mlp.routing.mode == "exact"
        if mixer is not None and exact:
            result, *chosen = mixer(steps.whole, x, cache)
        else:
            mixed = mixer(steps.without, x, cache)[0] if mixer is not None else self._mixed(x, mask, cache)
            if mixture is None:
                return self._own_way(mixed)
            if not exact:
                return mixture(mixed, self.mlp)
            result, *chosen = steps.experts(mixed)
        if self.mlp.routing.observer is not None:
            self.mlp.routing.observer(self.mlp.layer, chosen[-1])
        if mixture is not None and mixture.experts is None:
            return mixture.serve(self.mlp, result, *chosen)
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


class FusedQuantizedLinear(nn.QuantizedLinear):
    """Rows of a window get the bits that each of them gets alone."""

    build: Build | None = None

    def __call__(self, x: mx.array) -> mx.array:
        return _short(self, x) if _is_short(x) else super().__call__(x)


class FusedLinear(nn.Linear):
    """The same with dense weights."""

    build: Build | None = None

    def __call__(self, x: mx.array) -> mx.array:
        return _short(self, x) if _is_short(x) else super().__call__(x)


class FusedEmbedding(nn.QuantizedEmbedding):
    """The same of an embedding, and of the output head where that is tied to it."""

    build: Build | None = None

    def __call__(self, x: mx.array) -> mx.array:
        matrix = matrix_of(self) if x.size <= MAX_ROWS else None
        return super().__call__(x) if matrix is None else embed(x.astype(mx.uint32), matrix, build=self.build)

    def as_linear(self, x: mx.array) -> mx.array:
        return _short(self, x) if _is_short(x) else super().as_linear(x)


_FUSED = {
    nn.QuantizedLinear: FusedQuantizedLinear,
    nn.Linear: FusedLinear,
    nn.QuantizedEmbedding: FusedEmbedding,
}


def _is_short(x: mx.array) -> bool:
    return x.ndim == 3 and x.shape[0] * x.shape[1] <= MAX_ROWS


def _short(module: Any, x: mx.array) -> mx.array:
    matrix = matrix_of(module)
    assert matrix is not None, "it was looked at when the module was made"
    return project(x, [matrix], build=module.build)


def _taken_over(module: nn.Module, build: Build | None) -> nn.Module:
    """``module``, whose parameters and their names stay, with a call that takes the kernels, where they know it."""
    kind: Any = _FUSED.get(type(module))
    if kind is None or matrix_of(module) is None:
        return module
    fused: nn.Module = kind.__new__(kind)
    nn.Module.__init__(fused)
    fused.__dict__.update(module.__dict__)
    dict.update(fused, module)
    fused.build = build
    return fused


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
    language.model.embed_tokens = _taken_over(language.model.embed_tokens, build)
    if "lm_head" in language:
        language.lm_head = _taken_over(language.lm_head, build)
    if "mtp" in model:
        model.mtp.layers = [_fused(layer, build) for layer in model.mtp.layers]
        model.mtp.picks = partial(likeliest, build=build)
        model.mtp = FusedHead.of(model.mtp, Trunk(model), build) or model.mtp


def _fused(layer: nn.Module, build: Build | None) -> nn.Module:
    parts = set(layer.children()) - {"linear_attn", "self_attn"}
    return FusedLayer(layer, build) if parts == _PARTS else layer


def _tried(model: nn.Module, own: list[nn.Module], fused: list[nn.Module]) -> bool:
    """The first layer of each kind. Streamed experts are not read for that: such a model does without the kernels."""
    if streaming_of(model):
        return False
    kinds = {("linear_attn" in layer, "switch_mlp" in layer.mlp): i for i, layer in reversed(list(enumerate(own)))}
    places, caches = sorted(kinds.values()), [make_cache(model) for _ in range(2)]
    language = getattr(model, "language_model", model)
    tokens = mx.array([[0, 1, 2]])
    whole = [(language.model.embed_tokens, tokens)]
    if "lm_head" in language:
        whole.append((language.lm_head, language.model.embed_tokens(tokens)))
    others = [(module(x), _taken_over(module, None)(x)) for module, x in whole]
    return agree([own[i] for i in places], [fused[i] for i in places], [[c[i] for c in caches] for i in places], others)
