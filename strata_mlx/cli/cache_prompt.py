"""Save the state after a prompt, so that generate --prompt-cache-file need not read it again.

strata_mlx cache_prompt --prompt "$(cat manual.txt)" --prompt-cache-file manual.safetensors
strata_mlx generate --prompt-cache-file manual.safetensors --prompt "Where is the switch?"
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from . import started
from .experts import add_experts, loading_options
from .options import add_kv_cache, add_model, add_prefill, read_prompt, utf8

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--adapter-path", help="folder of trained LoRA adapters")
    parser.add_argument(
        "--prompt", "-p", type=utf8, required=True, help="what to read; '-' reads it from standard input"
    )
    parser.add_argument("--prompt-cache-file", required=True, help="file to write, named *.safetensors")
    add_prefill(parser)
    add_kv_cache(parser)
    add_experts(parser)


def run(args: argparse.Namespace) -> int:
    text = read_prompt(args.prompt)

    from ..engine import encode
    from ..experts.options import save_profile
    from ..loading import load
    from ..prefill import make_cache, prefill
    from ..prompt_cache import check_destination, save_prompt_cache
    from ..templates import render_chat
    from .generate import prompt_progress

    check_destination(Path(args.prompt_cache_file))

    def read(tokenizer: TokenizerWrapper) -> mx.array:
        if not tokenizer.has_chat_template:
            return encode(tokenizer, tokenizer.encode(text))
        messages = [{"role": "user", "content": text}]
        return encode(tokenizer, tokenizer.encode(render_chat(tokenizer, messages, True, {}), add_special_tokens=False))

    model, tokenizer = load(
        args.model,
        revision=args.revision,
        adapter_path=args.adapter_path,
        **loading_options(args, lambda tokenizer: read(tokenizer).size),
    )
    cache = make_cache(model, args.max_kv_size)
    tokens = read(tokenizer)
    started()
    try:
        prefill(
            tokens,
            model,
            cache,
            prefill_step_size=args.prefill_step_size,
            kv_bits=args.kv_bits,
            kv_group_size=args.kv_group_size,
            quantized_kv_start=args.quantized_kv_start,
            prompt_progress_callback=prompt_progress(tokens.size, args.prefill_step_size),
        )
    finally:
        save_profile(model)
    save_prompt_cache(Path(args.prompt_cache_file), cache, args.model)
    print(f"{args.prompt_cache_file}: the state after {tokens.size} tokens")
    return 0
