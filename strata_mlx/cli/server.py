"""Serve a model to clients of OpenAI's and Anthropic's protocols, with a page that shows what the engine does.

    strata_mlx server
    strata_mlx server --model FOLDER --memory 12GB --port 8080
    STRATA_MLX_API_KEY=... strata_mlx server --host 0.0.0.0

Then http://127.0.0.1:8080 is the page, and http://127.0.0.1:8080/v1 is what OpenAI's clients want as base_url. The
options are those of mlx_lm.server where they apply.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..experts.sizes import format_size, parse_size
from ..policy import Policy
from . import started
from .experts import add_memory, add_streaming, loading_options
from .models import describe_model, load_model
from .options import NotHere, add_dtype, add_model, add_prefill, add_routing, add_sampling, json_options, number
from .parallel import add_ranks, run_ranks
from .policies import add_policy, chosen_policy

if TYPE_CHECKING:
    import socket

    from mlx import nn

    from ..parallel.ranks import Ranks
    from ..server.engine import Engine
    from ..server.limits import Limits
    from ..server.serving import Settings

KEY = "STRATA_MLX_API_KEY"
_NEEDS = {"fastapi": "fastapi", "prometheus_client": "prometheus-client", "sse_starlette": "sse-starlette"}
_NEEDS |= {"uvicorn": "uvicorn"}
_SHARE = 16  # of a memory budget, one part in so many is for earlier prompts, where nobody says how much


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--adapter-path", help="folder of trained LoRA adapters")
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names of the model for clients; by default its own"
    )
    _add_access(parser)
    _add_limits(parser)
    parser.add_argument("--chat-template", help="a chat template instead of the model's own, in Jinja")
    parser.add_argument("--chat-template-args", help="options for the chat template, as a JSON object")
    _add_defaults(parser)
    add_policy(parser)
    add_memory(parser)
    add_streaming(parser)
    add_ranks(parser)
    add_routing(parser)
    add_dtype(parser)
    cache = "the KV cache of a server has the type of --dtype"
    for option, reason in {
        "--trust-remote-code": "code from a model's folder is never run",
        "--draft-model": "speculation uses the model's own MTP head",
        "--num-draft-tokens": "speculation uses the model's own MTP head; see --mtp-max-steps",
        "--use-default-chat-template": "the model's own template is used, or --chat-template",
        "--prompt-concurrency": "prompts are read one after another, in chunks, between the steps of other requests",
        "--prompt-cache-size": "earlier prompts are kept within --prompt-cache-bytes",
        "--pipeline": "experts are shared out among machines, not layers; see --hostfile",
        "--kv-bits": cache,
        "--kv-group-size": cache,
        "--quantized-kv-start": cache,
    }.items():
        parser.add_argument(option, action=NotHere, reason=reason)


def _add_access(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=number(int, 0, 65535), default=8080, help="port to listen at; 0: any free one")
    parser.add_argument(
        "--api-key",
        help=f"what clients have to give as their key; better in the environment, as {KEY}, where no list of processes "
        "shows it",
    )
    parser.add_argument(
        "--allow-anyone", action="store_true", help="listen at an address that others can reach, without a key"
    )
    parser.add_argument(
        "--allowed-origins",
        type=lambda text: [origin for origin in text.split(",") if origin],
        default=[],
        metavar="ORIGIN,...",
        help="pages of other servers that may ask this one, such as https://example.org; '*' for all",
    )
    parser.add_argument(
        "--log-level",
        default="INFO",
        type=str.upper,
        choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
        help="what is logged, on standard error",
    )
    parser.add_argument("--log-prompts", action="store_true", help="log what is asked, too")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--decode-concurrency", type=number(int, 1, 1024), default=16, help="requests that are served at a time"
    )
    parser.add_argument(
        "--max-queue", type=number(int, 0), default=64, help="requests that may wait; more are sent away, to come again"
    )
    parser.add_argument(
        "--max-context",
        type=number(int, 2),
        help="tokens that a request may come to, prompt and answer; by default the model's limit, or with --memory "
        "4096 if that is less",
    )
    parser.add_argument("--max-body", default="8MB", metavar="SIZE", help="the largest request that is read")
    add_prefill(parser)
    parser.add_argument(
        "--prompt-cache-bytes",
        metavar="SIZE",
        help="memory for earlier prompts, which need not be read again; 0 for none; by default 256MB, or a sixteenth "
        "of --memory",
    )


def _add_defaults(parser: argparse.ArgumentParser) -> None:
    """What requests get that do not say."""
    add_sampling(parser)
    parser.add_argument(
        "--max-tokens", type=number(int, 1), default=512, help="tokens of an answer, where the client does not say"
    )


def run(args: argparse.Namespace) -> int:
    return run_ranks("server", args, lambda ranks: _run(args, ranks))


def _run(args: argparse.Namespace, ranks: Ranks | None) -> int:
    missing = [name for module, name in _NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"the server needs {' and '.join(missing)}: install strata-mlx[server]")
    policy = chosen_policy(args)
    template_options = json_options("--chat-template-args", args.chat_template_args)
    limits = _limits(args)
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(message)s")
    if not args.log_prompts:
        logging.getLogger("sse_starlette").setLevel(logging.INFO)  # what it logs to debug it are the answers

    from ..server.chat import check_options
    from ..server.running import listen, share_heaps

    check_options(template_options, "--chat-template-args")
    share_heaps()
    if ranks and not ranks.leads:
        _, engine, _ = _load(args, policy, template_options, limits, ranks)
        started()
        engine.follow()
        return 0
    with listen(args.host, args.port) as listening:  # minutes before the model is there
        model, engine, settings = _load(args, policy, template_options, limits, ranks)
        started()
        _serve(model, engine, settings, listening)
    return 0


def _limits(args: argparse.Namespace) -> Limits:
    from ..server.limits import LOOPBACK, Limits
    from ..server.running import is_loopback

    key = os.environ.get(KEY) if args.api_key is None else args.api_key
    if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
        raise InputError(f"--api-key or {KEY}: a key has printable ASCII characters, one at least")
    here = is_loopback(args.host)
    if not here and key is None and not args.allow_anyone:
        raise InputError(
            f"--host {args.host}: others can reach this server there; give a key that they need (--api-key, or {KEY}), "
            f"or --allow-anyone"
        )
    return Limits(
        hosts=LOOPBACK | {args.host.lower()} if here else None,
        origins=tuple(args.allowed_origins),
        key=key,
        body=parse_size(args.max_body, "--max-body"),
    )


def _load(
    args: argparse.Namespace,
    policy: Policy,
    template_options: dict[str, Any],
    limits: Limits,
    ranks: Ranks | None,
) -> tuple[nn.Module, Engine, Settings]:
    from ..experts.budget import CONTEXT
    from ..models.family import text_args
    from ..server import app  # noqa: F401  what has been imported counts as memory in use
    from ..server.engine import Engine
    from ..server.serving import Sampling, Settings

    prefix_bytes = _prefix_bytes(args)
    if ranks:  # which all keep the same prompts
        prefix_bytes = min(ranks.exchange(prefix_bytes))
    streaming = loading_options(args, lambda _: args.max_context or CONTEXT, streams=ranks is not None)
    if args.memory is not None:
        streaming |= {"sequences": args.decode_concurrency, "prefixes": prefix_bytes}
    template = {"chat_template": args.chat_template} if args.chat_template else None
    model, tokenizer, routing = load_model(args, policy, ranks, tokenizer_config=template, **streaming)
    longest = text_args(model).max_position_embeddings
    max_context = min(args.max_context or (CONTEXT if args.memory else longest), longest)
    engine = Engine(
        model,
        tokenizer,
        policy=policy,
        max_queue=args.max_queue,
        concurrency=args.decode_concurrency,
        prefix_bytes=prefix_bytes,
        prefill_step_size=args.prefill_step_size,
        max_context=max_context,
    )
    settings = Settings(
        tokenizer,
        names=tuple(args.served_model_name or (_name(args.model),)),
        sampling=Sampling(args.max_tokens, args.temp, args.top_p, args.top_k, args.min_p),
        template_options=template_options,
        limits=limits,
        max_context=max_context,
        log_prompts=args.log_prompts,
    )
    print(
        f"{describe_model(args, policy, model, routing)}\n"
        f"Requests: {args.decode_concurrency} at a time with up to {max_context} tokens, {args.max_queue} may wait; "
        f"{format_size(prefix_bytes)} for earlier prompts",
        flush=True,
    )
    return model, engine, settings


def _prefix_bytes(args: argparse.Namespace) -> int:
    from ..experts.budget import budget_bytes
    from ..server.engine import PREFIX_BYTES

    if args.prompt_cache_bytes is not None:
        return 0 if args.prompt_cache_bytes == "0" else parse_size(args.prompt_cache_bytes, "--prompt-cache-bytes")
    return PREFIX_BYTES if args.memory is None else budget_bytes(args.memory) // _SHARE


def _name(model: str | None) -> str:
    """What clients call the model: a folder's name, and no more of where it lies."""
    if model is None:
        return "strata-mlx-embedded"
    return Path(model).resolve().name if Path(model).is_dir() else model


def _serve(model: nn.Module, engine: Engine, settings: Settings, listening: socket.socket) -> None:
    from ..experts.options import save_profile
    from ..server.app import make_app
    from ..server.running import serve, url_of

    def ready() -> None:
        url = url_of(listening)
        print(f"Serving at {url} (the page), {url}/v1 (OpenAI) and {url} (Anthropic); Ctrl-C ends", flush=True)

    def ends() -> None:
        engine.close()
        save_profile(model)

    serve(make_app(engine, settings), listening, ready=ready, ends=ends)
