"""A prompt goes into the caches of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from .checkpoint.precision import AFFINE_BITS, AFFINE_GROUP_SIZES
from .device import evaluate, integer
from .errors import InputError
from .experts.pressure import relieve
from .models.family import text_args

if TYPE_CHECKING:
    from .experts.budget import Fit

KEPT_TOKENS = 4  # at the beginning of a context, when its cache is of limited size; as in mlx_lm
Progress = Callable[[int, int], None]  # tokens read so far, tokens of the whole prompt
Forward = Callable[[mx.array, int], Any]  # a chunk and where it begins, to what must be evaluated


def make_cache(model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
    """An empty cache per layer. ``max_kv_size`` bounds those of attention layers: the first tokens and the latest stay.

    Unlike mlx_lm's, the bound holds for models that mix attention with recurrent layers too.
    """
    cache = make_prompt_cache(model)
    if max_kv_size is None:
        return cache
    if max_kv_size <= KEPT_TOKENS:
        raise InputError(
            f"max_kv_size is {max_kv_size}, which must be more than the {KEPT_TOKENS} tokens that are always kept"
        )
    return [RotatingKVCache(max_kv_size, KEPT_TOKENS) if isinstance(layer, KVCache) else layer for layer in cache]


def prefill(
    prompt: mx.array,
    model: nn.Module,
    cache: list[Any],
    *,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Progress | None = None,
) -> None:
    """Bring the whole ``prompt`` ``[N]`` into ``cache``, in place, for a prompt-cache file. Arguments as in
    generate_step().
    """
    check_tokens(prompt, model)
    quantise = kv_quantiser(cache, model, kv_bits, kv_group_size, quantized_kv_start)
    forward = plain_forward(model, cache, quantise)
    read_tokens(
        prompt, forward, rows_at_a_time(model, prefill_step_size), prompt_progress_callback or ignore, prompt.size
    )


def ignore(*_: int) -> None:
    """Where nobody asks for progress."""


def plain_forward(model: nn.Module, cache: list[Any], quantise: Callable[[], None]) -> Forward:
    """Reads a chunk into ``cache`` alone."""

    def forward(chunk: mx.array, _: int) -> Any:
        relieve(model)
        model(chunk[None], cache=cache)
        quantise()
        return [layer.state for layer in cache]

    return forward


def rows_at_a_time(model: nn.Module, asked: int) -> int:
    """How many tokens of a prompt go through the layers at a time: not more than a memory budget has room for."""
    fit: Fit | None = getattr(model, "fit", None)
    return asked if fit is None else min(asked, fit.chunk)


def read_tokens(tokens: mx.array, forward: Forward, step_size: int, report: Progress, total: int) -> None:
    """Give ``tokens`` ``[N]`` to ``forward``, ``step_size`` at a time, evaluate what it returns, and report progress
    towards ``total`` tokens.
    """
    if step_size < 1:
        raise InputError(f"prefill_step_size is {step_size}, which must be at least 1")
    report(0, total)
    for start in range(0, tokens.size, step_size):
        chunk = tokens[start : min(start + step_size, tokens.size)]
        state = forward(chunk, start)
        evaluate(state, f"reading tokens {start} to {start + chunk.size} of the prompt")
        report(start + chunk.size, total)
        mx.clear_cache()


def check_tokens(tokens: mx.array, model: nn.Module) -> None:
    """Raise InputError unless ``tokens`` are token ids ``[N]`` of the model's vocabulary, at least one."""
    if tokens.size == 0:
        raise InputError("the prompt is empty; give it at least one token")
    if tokens.ndim != 1 or not mx.issubdtype(tokens.dtype, mx.integer):
        raise InputError(f"the prompt is {tokens.dtype} of shape {tokens.shape}, expected token ids of shape [N]")
    vocabulary = text_args(model).vocab_size
    low, high = integer(mx.min(tokens)), integer(mx.max(tokens))
    if low < 0 or high >= vocabulary:
        raise InputError(
            f"token id {low if low < 0 else high} of the prompt is not in the model's vocabulary of {vocabulary}"
        )


def kv_quantiser(
    cache: list[Any], model: nn.Module, bits: int | None, group_size: int, start: int
) -> Callable[[], None]:
    """What quantises the attention caches in place once they hold ``start`` tokens; nothing if ``bits`` is None."""
    if bits is None:
        return lambda: None
    args = text_args(model)
    head_dim = args.head_dim
    if hasattr(args, "kv_lora_rank"):
        raise InputError("kv_bits: mlx_lm's latent attention takes no quantised cache; leave it out for this model")
    if bits not in AFFINE_BITS or group_size not in AFFINE_GROUP_SIZES or head_dim % group_size:
        raise InputError(
            f"a KV cache of {bits} bits in groups of {group_size} is not possible: bits must be one of {AFFINE_BITS}, "
            f"and the group size one of {AFFINE_GROUP_SIZES} that divides the head dimension {head_dim}"
        )
    for layer in cache:
        if isinstance(layer, RotatingKVCache) and not layer.keep:
            raise InputError("kv_bits: the cache of a sliding window cannot be quantised; leave it out for this model")
        if isinstance(layer, RotatingKVCache):
            raise InputError("a cache of limited size cannot be quantised; give max_kv_size or kv_bits, not both")
        if isinstance(layer, QuantizedKVCache) and (layer.bits, layer.group_size) != (bits, group_size):
            raise InputError(
                f"the cache has {layer.bits} bits in groups of {layer.group_size}; ask for the same or for none, not "
                f"for {bits} in groups of {group_size}"
            )
    return functools.partial(maybe_quantize_kv_cache, cache, start, group_size, bits)
