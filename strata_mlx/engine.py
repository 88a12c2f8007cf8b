"""Decoding: a prompt goes in, tokens come out."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .device import evaluate, integer
from .errors import Fault, InputError
from .experts.ahead import a_layer_ahead
from .experts.pressure import relieve
from .experts.streaming import streaming_of
from .experts.traffic import Traffic
from .models.moe import blocks
from .prefill import (
    Progress,
    check_tokens,
    ignore,
    kv_quantiser,
    make_cache,
    plain_forward,
    read_tokens,
    rows_at_a_time,
)
from .speculation.decoder import SpeculativeDecoder, Token
from .speculation.record import Round, Summary
from .speculation.retention import Retention
from .speculation.sampling import LogitsProcessor, Sampler
from .speculation.window import check_rollback


@dataclass
class GenerationResponse:
    """One step of stream_generate(), with the fields of mlx_lm's.

    text: the next segment of text, possibly empty. token: its id. logprobs: ``[V]`` float, of the model and the logits
    processors, before the sampler. from_draft: whether a draft head proposed it. prompt_tps, generation_tps: tokens
    per second.
    peak_memory: GB (1e9 bytes) that MLX has held at most. finish_reason: None, "stop" (end-of-sequence token) or
    "length". speculation: what drafting has come to so far; None where there is none. experts: what reading experts
    has come to so far in this request; None where all are in memory.
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
    speculation: Summary | None = None
    experts: Traffic | None = None


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
    prompt_progress_callback: Progress | None = None,
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
    report = prompt_progress_callback or ignore
    quantise = kv_quantiser(cache, model, kv_bits, kv_group_size, quantized_kv_start)
    sampler = sampler or (lambda logprobs: mx.argmax(logprobs, axis=-1))
    check_tokens(prompt, model)
    for block in blocks(model):
        block.routing.begin()
    seen, streaming = prompt[:-1], streaming_of(model)

    def step(tokens: mx.array, number: int) -> tuple[mx.array, mx.array, mx.array]:
        nonlocal seen
        with a_layer_ahead(streaming):
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

    rows = rows_at_a_time(model, prefill_step_size)
    read_tokens(prompt[:-1], plain_forward(model, cache, quantise), rows, report, prompt.size)
    token, logprobs, total = step(prompt[-1:], 1)
    count = 0
    while count != max_tokens:
        count += 1
        relieve(model)
        following = step(token, count + 1) if count != max_tokens else None
        evaluate((token, logprobs, total), f"computing token {count}")
        # The sum of exponentials is not finite where one logit is NaN or +inf, or all are -inf.
        if not np.isfinite(total.item()):
            raise Fault(
                f"the model's logits for token {count} are not finite: its weights are broken or overflow their type"
            )
        if count == 1:
            report(prompt.size, prompt.size)
        yield integer(token), logprobs
        if count % 256 == 0:
            mx.clear_cache()
        if following:
            token, logprobs, total = following


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    *,
    mtp: bool | str = "auto",
    retention: Retention | None = None,
    max_steps: int | None = None,
    drafting: str = "chained",
    on_round: Callable[[Round], object] | None = None,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Yield a GenerationResponse for each generated token; the last one has a ``finish_reason``.

    prompt: text or token ids. max_tokens: at least 1, or -1 for no limit. kwargs: of generate_step().
    mtp: True drafts with the model's MTP head in every round. "auto" drafts while it pays by the clock, where the model
    has a head and its caches can be rolled back; greedy text is the same, but a seed does not repeat a sampled one.
    retention, max_steps, drafting: as in SpeculativeDecoder, for drafts. on_round: told every round before its tokens
    are given, and without drafting every step; the seconds of the first are then those of the prompt too.
    """
    if max_tokens == 0:
        raise InputError("max_tokens is 0: nothing would be generated; use -1 for no limit")
    tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    tokens = encode(tokenizer, prompt)
    detokenizer = tokenizer.detokenizer
    streaming = streaming_of(model)
    before = streaming.traffic() if streaming else Traffic()
    decoder = None
    if _speculates(model, mtp, kwargs):
        given = {name: value for name, value in kwargs.items() if name not in _CACHE_OPTIONS}
        given |= {"retention": retention, "max_steps": max_steps, "drafting": drafting, "auto": mtp == "auto"}
        given["on_round"] = on_round
        decoder = SpeculativeDecoder(model, tokenizer, prompt=tokens, max_tokens=max_tokens, **given)
    steps = decoder or _plain(tokens, model, on_round, max_tokens=max_tokens, **kwargs)
    with wired_limit(model), closing(steps) as decoded:
        start = time.perf_counter()
        prompt_time = 0.0
        for count, (token, logprobs, from_draft) in enumerate(decoded, 1):
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
                from_draft=from_draft,
                prompt_tokens=tokens.size,
                prompt_tps=tokens.size / prompt_time,
                generation_tokens=count,
                generation_tps=count / (time.perf_counter() - start),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=reason,
                speculation=decoder.summary if decoder else None,
                experts=streaming.traffic() - before if streaming else None,
            )
            if reason:
                return


def _plain(
    tokens: mx.array, model: nn.Module, on_round: Callable[[Round], object] | None, **kwargs: Any
) -> Generator[Token, None, None]:
    start = time.perf_counter()
    for token, logprobs in generate_step(tokens, model, **kwargs):
        if on_round:
            on_round(Round((), 0, 0, 1, 0.0, time.perf_counter() - start, 0.0))
        yield Token(token, logprobs, from_draft=False)
        start = time.perf_counter()


_CACHE_OPTIONS = ("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start")  # of generate_step()


def _speculates(model: nn.Module, mtp: bool | str, options: dict[str, Any]) -> bool:
    """Whether to draft. Raises InputError where that is asked for and the caches cannot be rolled back."""
    if mtp not in (True, False, "auto"):
        raise InputError(f"mtp is {mtp!r}, expected True, False or 'auto'")
    if mtp is False or (mtp == "auto" and "mtp" not in model):
        return False
    try:
        for name in ("max_kv_size", "kv_bits"):
            if options.get(name) is not None:
                raise InputError(
                    f"{name} makes caches that speculation cannot roll back; leave it out, or give mtp=False"
                )
        check_rollback(options.get("prompt_cache") or [])
    except InputError:
        if mtp == "auto":
            return False
        raise
    return True


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
