"""Options for a memory budget and for experts that stay on disk, and what is said about them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..experts.eviction import DEFAULT_EVICTION, EVICTIONS
from .options import number

if TYPE_CHECKING:
    from mlx import nn

    from ..experts.budget import Fit
    from ..experts.traffic import Traffic

_NEED_MEMORY = ("context", "eviction", "expert_profile", "pin", "io_threads")


def add_experts(parser: argparse.ArgumentParser) -> None:
    add_memory(parser)
    parser.add_argument(
        "--context",
        type=number(int, 1),
        help="with --memory, tokens to have room for; by default the prompt and --max-tokens",
    )
    add_streaming(parser)


def add_streaming(parser: argparse.ArgumentParser) -> None:
    """Options that say how experts are read, beside --memory."""
    parser.add_argument(
        "--eviction",
        choices=EVICTIONS,
        help=f"with --memory, which expert makes room for another; by default {DEFAULT_EVICTION}",
    )
    parser.add_argument(
        "--expert-profile",
        type=Path,
        metavar="FILE",
        help="with --memory, begin with the experts that earlier runs used most, and save what this one uses",
    )
    parser.add_argument(
        "--pin",
        type=Path,
        metavar="FILE",
        help='with --memory, experts that always stay in memory, as JSON: {"0": [3, 17], ...} by layer',
    )
    parser.add_argument("--io-threads", type=number(int, 1, 64), help="with --memory, threads that read experts")


def add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="what everything may take together, such as 12GB or auto; experts that find no room stay on disk and are "
        "read when they are needed",
    )


def loading_options(args: argparse.Namespace, context: Callable[[Any], int], streams: bool = False) -> dict[str, Any]:
    """The arguments for load(). ``context`` tells the tokens to have room for, given the tokenizer. streams: whether
    experts are read one by one without a budget, too.

    Raises InputError for an option that would do nothing.
    """
    if args.memory is None:
        for name in _NEED_MEMORY[:1] if streams else _NEED_MEMORY:
            if getattr(args, name, None) is not None:
                raise InputError(
                    f"--{name.replace('_', '-')} is for experts that stay on disk: give --memory as well, such as 12GB"
                )
    given = {"eviction": args.eviction, "expert_profile": args.expert_profile}
    given |= {"pinned": args.pin, "io_threads": args.io_threads}
    budget = {
        "memory": args.memory,
        "context": getattr(args, "context", None) or context,
        "prefill_step_size": args.prefill_step_size,
    }
    return {
        **(budget if args.memory is not None else {}),
        **{name: value for name, value in given.items() if value is not None},
    }


def describe_memory(fit: Fit, args: argparse.Namespace) -> str:
    """A line that says how the budget is spent, and which options do nothing."""
    idle = [f"--{name.replace('_', '-')}" for name in _NEED_MEMORY[1:] if getattr(args, name) is not None]
    if fit.streams or not idle:
        return f"Memory: {fit}"
    return f"Memory: {fit} ({', '.join(idle)} {'has' if len(idle) == 1 else 'have'} nothing to do)"


def describe_traffic(model: nn.Module, traffic: Traffic, mode: str) -> str:
    """A line that says what streaming came to in a request of the given routing mode."""
    from ..experts.sizes import format_size

    report = traffic_report(model, traffic, mode)
    share = report["slots"] / report["experts"]
    return (
        f"Experts: {share:.0%} of {report['experts']} x {report['moe_layers']} in memory "
        f"({format_size(report['slot_bytes'])}), {traffic.hits:,} hits, {traffic.misses:,} misses "
        f"({report['miss_rate']:.1%}), {format_size(traffic.bytes)} read in {traffic.read_seconds:.2f} s, stalled "
        f"{traffic.stall_seconds:.2f} s; {mode}"
    )


def traffic_report(model: nn.Module, traffic: Traffic, mode: str) -> dict[str, Any]:
    """The same, ready for JSON."""
    from dataclasses import asdict

    from ..experts.streaming import streaming_of
    from ..models.family import text_args

    streaming = streaming_of(model)
    assert streaming is not None
    return {
        "mode": mode,
        "slots": streaming.slots,
        "experts": text_args(model).num_experts,
        "moe_layers": len(streaming.layers),
        "slot_bytes": sum(table.slots * streaming.expert_bytes(index) for index, table in streaming.tables.items()),
        "miss_rate": traffic.misses / max(traffic.hits + traffic.misses, 1),
        **asdict(traffic),
    }
