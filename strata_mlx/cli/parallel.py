"""Options for several processes that run one model together, on one machine or many."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .options import number, read_prompt

if TYPE_CHECKING:
    from mlx import nn

    from ..experts.traffic import Traffic
    from ..parallel.ranks import Ranks

_BACKENDS = ("ring", "mpi", "jaccl", "jaccl-ring", "nccl")  # as parallel.launch has them, which needs MLX
_TIMEOUT = 20.0  # as parallel.ranks has it


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="share the experts out among the hosts in FILE, which is as for mlx.launch: a process on each has its own "
        "part, and --memory is about that",
    )
    parser.add_argument(
        "--expert-parallel", action="store_true", help="the same, where mlx.launch has started this command already"
    )
    parser.add_argument(
        "--backend", choices=_BACKENDS, help="with --hostfile, what the processes talk through; by default as FILE says"
    )
    parser.add_argument(
        "--placement",
        choices=("even", "profile"),
        help="how experts are shared out: by default equally many each; profile: so that each process has about as "
        "much to do, by what --expert-profile says of earlier runs",
    )
    parser.add_argument(
        "--rank-timeout",
        type=number(float, 0.1),
        default=_TIMEOUT,
        help="seconds of silence after which a process counts as lost, and all others end with an error",
    )


def run_ranks(command: str, args: argparse.Namespace, run: Callable[[Ranks | None], int]) -> int:
    """Run a command as the options say: here and now, as one rank of several, or as ranks that are started for it."""
    from ..parallel.launch import STARTED, launch

    started = STARTED in os.environ
    if args.hostfile is not None and not started:
        # Standard input does not reach the ranks.
        prompt = [f"--prompt={read_prompt('-')}"] if getattr(args, "prompt", None) == "-" else []
        return launch(args.hostfile, args.backend, [command, *args.given, *prompt])
    if not (started or args.expert_parallel):
        for name in ("backend", "placement"):
            if getattr(args, name) is not None:
                raise InputError(f"--{name} is for several processes: give --hostfile or --expert-parallel as well")
        return run(None)
    if getattr(args, "prompt", None) == "-":
        raise InputError("standard input does not reach the processes of mlx.launch: give the prompt itself")
    with _joined(args) as ranks:
        code = run(ranks)
        if code:
            ranks.end(code)
        return code


@contextmanager
def _joined(args: argparse.Namespace) -> Iterator[Ranks]:
    from ..parallel.ranks import expert_parallel

    with expert_parallel(args.rank_timeout) as ranks:
        if ranks.size == 1:
            raise InputError(
                "--expert-parallel: this process is alone; start it by mlx.launch, or give --hostfile instead"
            )
        if not ranks.leads:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        yield ranks


def ranks_options(args: argparse.Namespace, ranks: Ranks | None) -> dict[str, Any]:
    """The arguments for load()."""
    return {} if ranks is None else {"ranks": ranks, "placement": args.placement or "even"}


def describe_ranks(model: nn.Module, args: argparse.Namespace) -> str:
    """A line that says what each has."""
    from ..models.family import text_args
    from ..parallel.placement import share

    experts = text_args(model).num_experts
    held = share(experts, model.ranks.size)
    return (
        f"Ranks: {model.ranks.size}, each with up to {held} of the {experts} experts of a layer, shared out "
        f"{'evenly' if args.placement != 'profile' else 'by the expert profile'}; budgets and reads are of rank 0"
    )


def ranks_report(model: nn.Module, traffic: Traffic) -> dict[str, Any]:
    """What streaming came to at each rank in a request, and what each has sent; on all of them together."""
    from dataclasses import asdict

    from ..experts.streaming import streaming_of

    streaming = streaming_of(model)
    assert streaming is not None
    slot_bytes = sum(table.slots * streaming.expert_bytes(index) for index, table in streaming.tables.items())
    own = {"slots": streaming.slots, "slot_bytes": slot_bytes, **asdict(traffic), "sent": asdict(model.wire)}
    return {"size": model.ranks.size, "each": model.ranks.exchange(own)}


def describe_ranks_report(report: dict[str, Any]) -> str:
    """The same in a line."""
    from ..experts.sizes import format_size

    each = report["each"]
    hits, misses = (sum(rank[name] for rank in each) for name in ("hits", "misses"))
    return (
        f"All {report['size']} ranks: {format_size(sum(rank['slot_bytes'] for rank in each))} of experts in memory, "
        f"{hits:,} hits, {misses:,} misses ({misses / max(hits + misses, 1):.1%}), "
        f"{format_size(sum(rank['bytes'] for rank in each))} read; each sent {format_size(each[0]['sent']['bytes'])} "
        f"in {each[0]['sent']['exchanges']:,} exchanges"
    )
