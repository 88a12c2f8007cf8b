"""Write text from a prompt. The options are those of mlx_lm.generate.

strata_mlx generate --prompt "class Stack:"
cat question.txt | strata_mlx generate --model Qwen/Qwen3-Next-80B-A3B-Instruct --prompt - --max-tokens 500
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..policy import Policy
from ..templates import render_chat
from ..trace import TraceWriter
from . import started
from .experts import add_experts, describe_traffic, loading_options, traffic_report
from .models import describe_model, load_model
from .options import (
    NotHere,
    add_dtype,
    add_kv_cache,
    add_model,
    add_prefill,
    add_routing,
    add_sampling,
    boolean,
    json_options,
    number,
    read_prompt,
    utf8,
)
from .parallel import add_ranks, describe_ranks_report, ranks_report, run_ranks
from .policies import add_policy, chosen_policy

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..engine import GenerationResponse
    from ..parallel.ranks import Ranks
    from ..routing import Routing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--adapter-path", help="folder of trained LoRA adapters")
    parser.add_argument(
        "--prompt",
        "-p",
        type=utf8,
        default="hello",
        help="what to continue or answer; '-' reads it from standard input",
    )
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=number(int, 1, also=(-1,)),
        default=100,
        help="at most this many; -1: no limit",
    )
    _add_chat(parser)
    _add_sampling(parser)
    add_policy(parser)
    add_prefill(parser)
    parser.add_argument("--prompt-cache-file", help="state saved by cache_prompt, which the prompt continues")
    add_kv_cache(parser)
    add_experts(parser)
    add_ranks(parser)
    add_routing(parser)
    add_dtype(parser)
    parser.add_argument("--verbose", type=boolean, default=True, help="False prints the text alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write what every round did and took, as a line of JSON each"
    )
    for option, reason in {
        "--trust-remote-code": "code from a model's folder is never run",
        "--image": "only the text part of a model is run",
        "--quantize-activations": "activations are computed in the type of --dtype",
        "-qa": "activations are computed in the type of --dtype",
        "--draft-model": "speculation uses the model's own MTP head",
        "--num-draft-tokens": "speculation uses the model's own MTP head",
        "--use-default-chat-template": "mlx_lm does not read it either; the model's own template is used",
    }.items():
        parser.add_argument(option, action=NotHere, reason=reason)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--extra-eos-token", nargs="+", default=(), help="tokens that end the text too")
    parser.add_argument("--system-prompt", type=utf8, help="system message, if the model has a chat template")
    parser.add_argument(
        "--prefill-response", type=utf8, help="beginning of the answer, if the model has a chat template"
    )
    parser.add_argument("--ignore-chat-template", action="store_true", help="give the model the prompt as it is")
    parser.add_argument("--chat-template-config", help="more options for the chat template, as a JSON object")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add_sampling(parser)
    parser.add_argument(
        "--xtc-probability", type=number(float, 0, 1), default=0.0, help="how often XTC drops likely tokens"
    )
    parser.add_argument(
        "--xtc-threshold", type=number(float, 0, 0.5), default=0.1, help="probability that XTC calls likely"
    )
    parser.add_argument(
        "--min-tokens-to-keep", type=number(int, 1), default=1, help="tokens that --min-p always leaves"
    )
    parser.add_argument("--seed", type=number(int, 0, 2**64 - 1), help="makes sampling repeatable")


def run(args: argparse.Namespace) -> int:
    return run_ranks("generate", args, lambda ranks: _run(args, ranks))


def _run(args: argparse.Namespace, ranks: Ranks | None) -> int:
    template_config = json_options("--chat-template-config", args.chat_template_config)
    policy = _policy(args)
    text = read_prompt(args.prompt.replace("\\n", "\n").replace("\\t", "\t"))
    trace = TraceWriter(args.trace) if args.trace and not (ranks and ranks.rank) else None
    try:
        return _generate(args, template_config, policy, text, trace, ranks)
    finally:
        if trace:
            trace.close()


def _generate(
    args: argparse.Namespace,
    template_config: dict[str, Any],
    policy: Policy,
    text: str,
    trace: TraceWriter | None,
    ranks: Ranks | None,
) -> int:
    import mlx.core as mx

    from ..engine import stream_generate
    from ..experts.budget import CONTEXT
    from ..experts.options import save_profile
    from ..prefill import make_cache
    from ..prompt_cache import check_fits, load_prompt_cache

    if args.seed is not None:
        mx.random.seed(args.seed)
    saved = None
    if args.prompt_cache_file is not None:
        for option, value in {"--max-kv-size": args.max_kv_size, "--system-prompt": args.system_prompt}.items():
            if value is not None:
                raise InputError(f"{option} comes too late for the saved state in --prompt-cache-file; leave it out")
        saved, args.model = load_prompt_cache(Path(args.prompt_cache_file), args.model)

    def context(tokenizer: TokenizerWrapper) -> int:
        read = 0 if saved is None else max(getattr(layer, "offset", 0) for layer in saved)
        most = read + len(_encode(tokenizer, text, args, template_config))
        most += args.max_tokens if args.max_tokens > 0 else CONTEXT
        return min(most, args.max_kv_size + args.prefill_step_size) if args.max_kv_size else most

    model, tokenizer, routing = load_model(
        args, policy, ranks, **loading_options(args, context, streams=ranks is not None)
    )
    for token in args.extra_eos_token:
        _add_eos(tokenizer, token)
    cache = make_cache(model, args.max_kv_size)
    if saved is not None:
        check_fits(Path(args.prompt_cache_file), saved, model, cache)
        cache = saved
    prompt = _encode(tokenizer, text, args, template_config)
    if args.verbose and not args.json:
        print(f"{describe_model(args, policy, model, routing)}\n{'=' * 10}", flush=True)
    responses = stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens=args.max_tokens,
        **policy.options(),
        sampler=_sampler(args, tokenizer, model),
        prompt_cache=cache,
        prefill_step_size=args.prefill_step_size,
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        quantized_kv_start=args.quantized_kv_start,
        prompt_progress_callback=prompt_progress(len(prompt), args.prefill_step_size) if args.verbose else None,
        on_round=trace.round if trace else None,
    )
    if trace:
        trace.begin(model, {**_traced_options(args), "retention": str(policy.retention), "routing": routing.to_dict()})
        responses = trace.follow(responses)
    started()
    try:
        return _print(responses, args, routing, model)
    finally:
        save_profile(model)


def _traced_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that say how a text is made, for the header of its trace."""
    names = ("model", "max_tokens", "mtp", "mtp_max_steps", "drafting", "temp", "top_p", "min_p", "top_k", "seed")
    options = {name: getattr(args, name) for name in (*names, "memory", "eviction")}
    return {**options, "policy": None if args.policy is None else str(args.policy)}


def _print(responses: Any, args: argparse.Namespace, routing: Routing, model: Any) -> int:
    """Show the text as it comes, then the speeds; Ctrl-C shows those of what has been generated so far."""
    from ..engine import summary

    text, last, interrupted = "", None, False
    try:
        for last in responses:
            text += last.text
            if not args.json:
                print(last.text, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    traffic = last.experts if last else None
    ranks = ranks_report(model, traffic) if model.ranks and traffic and not interrupted else None
    if args.json:
        experts = traffic_report(model, traffic, routing.mode) if traffic else None
        record = _record(text, last, interrupted) | {"memory": model.fit and model.fit.to_dict(), "experts": experts}
        record |= {"ranks": ranks} if ranks else {}
        print(json.dumps({**record, "routing": routing.to_dict()}))
    else:
        print()
        if args.verbose:
            print("=" * 10)
            print(summary(last) if last else "interrupted before the first token")
            if last and last.speculation:
                print(last.speculation)
            if traffic:
                print(describe_traffic(model, traffic, routing.mode))
            if ranks:
                print(describe_ranks_report(ranks))
            if routing.mode == "biased":
                print(f"Routing: {routing.price}")
    return 130 if interrupted else 0


def _record(text: str, last: GenerationResponse | None, interrupted: bool) -> dict[str, Any]:
    """What --json prints; what is not known before the first token is None."""
    return {
        "text": text,
        "prompt_tokens": last and last.prompt_tokens,
        "prompt_tps": last and last.prompt_tps,
        "generation_tokens": last.generation_tokens if last else 0,
        "generation_tps": last and last.generation_tps,
        "peak_memory_gb": last and last.peak_memory,
        "finish_reason": "interrupted" if interrupted else last and last.finish_reason,
        "mtp": last.speculation.to_dict() if last and last.speculation else None,
    }


def _policy(args: argparse.Namespace) -> Policy:
    """What the options come to; args.mtp, args.mtp_max_steps and args.drafting are then what they come to."""
    policy = chosen_policy(args)
    repeats = args.seed is not None and args.temp > 0
    if args.mtp in (None, "auto") and (args.max_kv_size or args.kv_bits or (repeats and policy.by_the_clock)):
        policy = replace(policy, mtp="off")
    args.mtp, args.mtp_max_steps, args.drafting = policy.mtp, policy.max_steps, policy.drafting
    return policy


def _add_eos(tokenizer: TokenizerWrapper, token: str) -> None:
    """As in mlx_lm, ``token`` is a token or the number of one."""
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary and token not in map(str, vocabulary.values()):
        raise InputError(f"--extra-eos-token {token!r} is not one of the model's tokens")
    tokenizer.add_eos_token(token)


def _encode(
    tokenizer: TokenizerWrapper, text: str, args: argparse.Namespace, template_config: dict[str, Any]
) -> list[int]:
    """The prompt's tokens, by the model's chat template if it has one.

    After a saved prompt, only what the template puts from the new message on belongs to the prompt.
    """
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return list(tokenizer.encode(text, add_special_tokens=args.prompt_cache_file is None))
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt is not None else []
    messages.append({"role": "user", "content": text})
    prefill = args.prefill_response is not None
    if prefill:
        messages.append({"role": "assistant", "content": args.prefill_response})

    prompt = render_chat(tokenizer, messages, prefill, template_config)
    if args.prompt_cache_file is not None:
        marker = "<query>"
        user = len(messages) - (2 if prefill else 1)
        marked = [*messages[:user], {**messages[user], "content": marker}, *messages[user + 1 :]]
        rendered = render_chat(tokenizer, marked, prefill, template_config)
        if marker not in rendered:
            raise InputError("the model's chat template changes the prompt; use --ignore-chat-template")
        prompt = prompt[rendered.index(marker) :]
    return list(tokenizer.encode(prompt, add_special_tokens=False))


def _sampler(args: argparse.Namespace, tokenizer: TokenizerWrapper, model: Any) -> Any:
    from mlx_lm.sample_utils import make_sampler

    from ..models.family import text_args
    from ..speculation.sampling import Sampling

    vocabulary = text_args(model).vocab_size
    if args.top_k >= vocabulary:
        raise InputError(f"--top-k {args.top_k} must be less than the model's {vocabulary} tokens")
    if args.min_tokens_to_keep > vocabulary:
        raise InputError(f"--min-tokens-to-keep {args.min_tokens_to_keep} is more than the model's {vocabulary} tokens")
    if args.xtc_probability == 0:
        return Sampling(args.temp, args.top_p, args.min_p, args.min_tokens_to_keep, args.top_k)
    return make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
    )


def prompt_progress(tokens: int, step_size: int) -> Any:
    """A progress bar on standard error, as a callback, for a prompt of more than one chunk."""
    if tokens <= step_size or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    bar = tqdm(total=tokens, unit="token", desc="Prompt", leave=False)

    def update(done: int, total: int) -> None:
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return update
