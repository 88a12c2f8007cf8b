"""Compile what a GPU needs to run a model, once, so that no prompt has to wait for it.

On an NVIDIA GPU, kernels are compiled when they are first used, which takes minutes for the first prompt. This command
uses all that generate and tune use with a model, given the same options: prompts of several lengths, single steps,
windows of drafts where there is an MTP head, the routing of a policy. What is compiled is kept in the user's cache
folder, for every later process and also after a reboot, until MLX, this package or the GPU is another. On other devices
there is little or nothing to compile, which is said.

strata_mlx warmup
strata_mlx warmup --model FOLDER --memory 40GB --mtp
strata_mlx warmup --model FOLDER --policy policy.json --json
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from . import started
from .experts import add_experts, loading_options
from .models import describe_model, load_model
from .options import add_dtype, add_model, add_prefill, add_routing
from .policies import add_policy, chosen_policy

if TYPE_CHECKING:
    from mlx import nn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--adapter-path", help="folder of trained LoRA adapters")
    add_policy(parser)
    add_prefill(parser)
    add_experts(parser)
    add_routing(parser)
    add_dtype(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, and no progress bar")


def run(args: argparse.Namespace) -> int:
    policy = chosen_policy(args)

    import mlx.core as mx

    from .. import warmup

    before = warmup.kept()
    model, _, routing = load_model(args, policy, **loading_options(args, lambda _: warmup.CONTEXT))
    started()
    if not args.json:
        print(describe_model(args, policy, model, routing), flush=True)
    seconds = _rehearse(model, progress=not args.json)
    after = warmup.kept()
    kernels = [
        {"of": name, "compiled": len(after[name] - before[name]), "kept": len(after[name]), "folder": str(folder)}
        for name, (folder, _) in warmup.stores().items()
    ]
    report = {"device": mx.default_device().type.name, "kernels": kernels, **seconds}
    print(json.dumps(report) if args.json else _describe(report))
    return 0


def _rehearse(model: nn.Module, progress: bool) -> dict[str, Any]:
    """Returns what took how long, in seconds; of the first token, with all of our kernels compiled before it."""
    from tqdm import tqdm

    from .. import warmup

    quiet = None if progress else True  # None: where nobody looks
    start = time.perf_counter()
    with tqdm(desc="Compiling", unit="kernel", disable=quiet, leave=False) as bar:
        for done, total in warmup.compile_ahead(model):
            bar.total = total
            bar.update(done - bar.n)
    ahead = time.perf_counter() - start
    warmup.first_token_seconds(model)
    first = time.perf_counter() - start
    for work in tqdm(warmup.rehearsal(model), desc="Rehearsing", unit="text", disable=quiet, leave=False):
        work()
    return {
        "ahead_seconds": ahead,
        "seconds": time.perf_counter() - start,
        "first_token_seconds": {"before": first, "after": warmup.first_token_seconds(model)},
    }


def _describe(report: dict[str, Any]) -> str:
    kernels = report["kernels"]
    if not kernels:
        return "What is compiled on this device is kept by the system, and cannot be counted"
    if not any(store["compiled"] for store in kernels):
        kept = ", ".join(f"{store['kept']} of {store['of']} in {store['folder']}" for store in kernels)
        return f"Nothing was left to compile (kept: {kept})"
    first, lines = report["first_token_seconds"], []
    for store in kernels:
        lines.append(f"Compiled: {store['compiled']} kernels of {store['of']}, kept in {store['folder']}")
    lines.append(f"First token: {first['before']:.2f} s, and now {first['after']:.2f} s")
    return "\n".join(
        [*lines, f"Warm-up: {report['seconds']:.1f} s, {report['ahead_seconds']:.1f} s of it side by side"]
    )
