"""Decoding: a prompt goes in, tokens come out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import maybe_quantize_kv_cache, wired_limit
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .checkpoint.precision import AFFINE_BITS, AFFINE_GROUP_SIZES
from .device import evaluate
from .errors import Fault, InputError
from .models.family import text_args
from .models.moe import blocks

Sampler = Callable[[mx.array], mx.array]  # log-probabilities [1, V] to a token [1]
KEPT_TOKENS = 4  # at the beginning of a context, when its cache is of limited size; as in mlx_lm
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]  # tokens [N], logits [1, V] to logits [1, V]


@dataclass
class GenerationResponse:
    """One step of stream_generate(), with the fields of mlx_lm's.

    text: the next segment of text, possibly empty. token: its id. logprobs: ``[V]`` float, of the model and the logits
    processors, before the sampler. from_draft: whether a draft head proposed it. prompt_tps, generation_tps: tokens
    per second.
    peak_memory: GB (1e9 bytes) that MLX has held at most. finish_reason: None, "stop" (end-of-sequence token) or
    "length".
    """

    text: str
    token: int
    logprobs: mx.array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None


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


def generate_step(
    prompt: mx.array,
    model: nn.Module,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    prompt_cache: list[Any] | None = None,
    max_kv_size: int | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, mx.array]]:
    """Yield tokens and their log-probabilities ``[V]``. The arguments are those of mlx_lm.generate.generate_step.

    prompt: token ids ``[N]``, at least one. max_tokens: how many to yield; -1 for no end. prompt_cache: continued in
    place; afterwards it holds the prompt and the tokens, save the last one where max_tokens was reached.
    prompt_progress_callback: called with the tokens read so far and those of the whole prompt.
    The device works on the next token while the caller has the last one.

    Raises InputError for arguments out of range and Fault where the logits are not finite.
    """
    if max_tokens < -1:
        raise InputError(f"max_tokens is {max_tokens}; use a positive number, or -1 for no limit")
    cache = make_cache(model, max_kv_size) if prompt_cache is None else prompt_cache
    report = prompt_progress_callback or _ignore
    quantise = _kv_quantiser(cache, model, kv_bits, kv_group_size, quantized_kv_start)
    sampler = sampler or (lambda logprobs: mx.argmax(logprobs, axis=-1))
    _check_tokens(prompt, model)
    for block in blocks(model):
        block.routing.begin()
    seen = prompt[:-1]

    def step(tokens: mx.array, number: int) -> tuple[mx.array, mx.array, mx.array]:
        nonlocal seen
        logits = model(tokens[None], cache=cache)[:, -1, :]
        if logits_processors:
            seen = mx.concatenate([seen, tokens])
            for process in logits_processors:
                logits = process(seen, logits)
        quantise()
        total = mx.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = logits - total
        result = sampler(logprobs), logprobs.squeeze(0), total
        evaluate(result, f"computing token {number}", wait=False)
        return result

    _prefill(prompt[:-1], model, cache, quantise, prefill_step_size, report, prompt.size)
    token, logprobs, total = step(prompt[-1:], 1)
    count = 0
    while count != max_tokens:
        count += 1
        following = step(token, count + 1) if count != max_tokens else None
        evaluate((token, logprobs, total), f"computing token {count}")
        # The sum of exponentials is not finite where one logit is NaN or +inf, or all are -inf.
        if not np.isfinite(total.item()):
            raise Fault(
                f"the model's logits for token {count} are not finite: its weights are broken or overflow their type"
            )
        if count == 1:
            report(prompt.size, prompt.size)
        yield _int(token), logprobs
        if count % 256 == 0:
            mx.clear_cache()
        if following:
            token, logprobs, total = following


def prefill(
    prompt: mx.array,
    model: nn.Module,
    cache: list[Any],
    *,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
) -> None:
    """Bring the whole ``prompt`` ``[N]`` into ``cache``, in place, for a prompt-cache file. Arguments as in
    generate_step().
    """
    _check_tokens(prompt, model)
    quantise = _kv_quantiser(cache, model, kv_bits, kv_group_size, quantized_kv_start)
    _prefill(prompt, model, cache, quantise, prefill_step_size, prompt_progress_callback or _ignore, prompt.size)


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Yield a GenerationResponse for each generated token; the last one has a ``finish_reason``.

    prompt: text or token ids. max_tokens: at least 1, or -1 for no limit. kwargs: of generate_step().
    """
    if max_tokens == 0:
        raise InputError("max_tokens is 0: nothing would be generated; use -1 for no limit")
    tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    tokens = encode(tokenizer, prompt)
    detokenizer = tokenizer.detokenizer
    with wired_limit(model):
        start = time.perf_counter()
        prompt_time = 0.0
        for count, (token, logprobs) in enumerate(generate_step(tokens, model, max_tokens=max_tokens, **kwargs), 1):
            if count == 1:
                prompt_time = time.perf_counter() - start
                start = time.perf_counter()
            stop = token in tokenizer.eos_token_ids
            if not stop:
                detokenizer.add_token(token)
            reason = "stop" if stop else "length" if count == max_tokens else None
            if reason:
                detokenizer.finalize()
            yield GenerationResponse(
                text=detokenizer.last_segment,
                token=token,
                logprobs=logprobs,
                from_draft=False,
                prompt_tokens=tokens.size,
                prompt_tps=tokens.size / prompt_time,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - start),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=reason,
            )
            if reason:
                return


def generate(
    model: nn.Module, tokenizer: Any, prompt: str | Sequence[int], verbose: bool = False, **kwargs: Any
) -> str:
    """Generate a whole response and return its text; ``verbose`` prints it as it comes, and the speeds after it."""
    text, response = "", None
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response:
        print(f"\n{'=' * 10}\n{summary(response)}")
    return text


def summary(response: GenerationResponse) -> str:
    """The lines that mlx_lm prints after a text."""
    return (
        f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {response.peak_memory:.3f} GB"
    )


def encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | Sequence[int]) -> mx.array:
    """Token ids ``[N]`` of a prompt; a string that begins with the beginning-of-sequence token does not get another."""
    ids: Any = prompt
    if isinstance(prompt, str):
        add = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        ids = tokenizer.encode(prompt, add_special_tokens=add)
    try:
        return mx.array(ids, dtype=None if len(ids) else mx.int32)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"the prompt is neither text nor a sequence of token ids: {error}") from error


def _ignore(*_: int) -> None:
    pass


def _int(array: mx.array) -> int:
    value = array.item()
    assert isinstance(value, int)
    return value


def _prefill(
    tokens: mx.array,
    model: nn.Module,
    cache: list[Any],
    quantise: Callable[[], None],
    step_size: int,
    report: Callable[[int, int], None],
    total: int,
) -> None:
    """Bring ``tokens`` into the cache, ``step_size`` at a time, and report progress towards ``total`` tokens."""
    if step_size < 1:
        raise InputError(f"prefill_step_size is {step_size}, which must be at least 1")
    report(0, total)
    for start in range(0, tokens.size, step_size):
        chunk = tokens[start : min(start + step_size, tokens.size)]
        model(chunk[None], cache=cache)
        quantise()
        evaluate([layer.state for layer in cache], f"reading tokens {start} to {start + chunk.size} of the prompt")
        report(start + chunk.size, total)
        mx.clear_cache()


def _check_tokens(tokens: mx.array, model: nn.Module) -> None:
    if tokens.size == 0:
        raise InputError("the prompt is empty; give it at least one token")
    if tokens.ndim != 1 or not mx.issubdtype(tokens.dtype, mx.integer):
        raise InputError(f"the prompt is {tokens.dtype} of shape {tokens.shape}, expected token ids of shape [N]")
    vocabulary = text_args(model).vocab_size
    low, high = _int(mx.min(tokens)), _int(mx.max(tokens))
    if low < 0 or high >= vocabulary:
        raise InputError(
            f"token id {low if low < 0 else high} of the prompt is not in the model's vocabulary of {vocabulary}"
        )


def _kv_quantiser(
    cache: list[Any], model: nn.Module, bits: int | None, group_size: int, start: int
) -> Callable[[], None]:
    """What quantises the attention caches in place once they hold ``start`` tokens; nothing if ``bits`` is None."""
    if bits is None:
        return lambda: None
    head_dim = text_args(model).head_dim
    if bits not in AFFINE_BITS or group_size not in AFFINE_GROUP_SIZES or head_dim % group_size:
        raise InputError(
            f"a KV cache of {bits} bits in groups of {group_size} is not possible: bits must be one of {AFFINE_BITS}, "
            f"and the group size one of {AFFINE_GROUP_SIZES} that divides the head dimension {head_dim}"
        )
    for layer in cache:
        if isinstance(layer, RotatingKVCache):
            raise InputError("a cache of limited size cannot be quantised; give max_kv_size or kv_bits, not both")
        if isinstance(layer, QuantizedKVCache) and (layer.bits, layer.group_size) != (bits, group_size):
            raise InputError(
                f"the cache has {layer.bits} bits in groups of {layer.group_size}; ask for the same or for none, not "
                f"for {bits} in groups of {group_size}"
            )
    return functools.partial(maybe_quantize_kv_cache, cache, start, group_size, bits)
