"""What a biased routing policy costs in quality and saves in reads, against exact routing, on given text.

Every document is read token by token, once with exact routing and once with each policy. Intervals of 95 % are
bootstrapped over documents.

strata_mlx evaluate
strata_mlx evaluate --data notes/ --slots 32 64 --route-policy '{"kind": "margin", "margin": 0.02}'
strata_mlx evaluate --model FOLDER --memory 12GB --data notes/ --json > evaluation.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..errors import InputError
from ..routing.policy import named_policy
from .experts import add_memory
from .options import add_model, number

if TYPE_CHECKING:
    from collections.abc import Iterator

    import mlx.nn as nn

    from ..texts import Tokens

SHARE = 4  # of a layer's experts, one in so many has a slot where nobody says how many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_data(parser)
    parser.add_argument("--documents", type=number(int, 2), default=16, help="how many, at most")
    parser.add_argument("--tokens", type=number(int, 2), default=96, help="of each document; shorter ones are left out")
    parser.add_argument(
        "--route-policy",
        action="append",
        metavar="POLICY",
        help="a policy to price, as a JSON file or as JSON text; may be given several times; without it, a usual few",
    )
    add_memory(parser)
    parser.add_argument(
        "--slots",
        type=number(int, 1),
        nargs="+",
        metavar="N",
        help="without --memory: as if each MoE layer held so many experts, by default a quarter; nothing is read",
    )
    parser.add_argument("--eviction", help="which expert makes room for another; by default as in generate")
    parser.add_argument("--json", action="store_true", help="print one JSON object, which tune --evaluation takes")


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        metavar="PATH",
        help='text files, folders of them, or .jsonl files with {"prompt": ...} lines; without it, the sources of '
        "installed packages (mlx, mlx_lm, huggingface_hub)",
    )


def run(args: argparse.Namespace) -> int:
    policies = [named_policy(text) for text in args.route_policy or ()]
    if args.memory is not None and args.slots is not None:
        raise InputError("--memory and --slots both say how many experts are in memory; give one of them")

    from ..evaluation import USUAL, evaluate, steps
    from ..experts.eviction import DEFAULT_EVICTION
    from ..experts.streaming import streaming_of
    from ..loading import load
    from ..models.family import text_args
    from . import started

    eviction = args.eviction or DEFAULT_EVICTION
    budget = {} if args.memory is None else {"memory": args.memory, "context": args.tokens, "eviction": eviction}
    model, tokenizer = load(args.model, revision=args.revision, **budget)
    started()
    documents = read_documents(args, tokenizer)
    experts = text_args(model).num_experts
    slots: list[int | None] = [None]
    if streaming_of(model) is None:
        slots = list(args.slots or [max(experts // SHARE, blocks_top_k(model))])
    policies = policies or list(USUAL)
    total = steps(documents, policies, slots)
    with progress("Evaluating", total, "token", quiet=False) as report:
        rows = evaluate(model, documents, policies, slots=slots, eviction=eviction, report=report)
    result = {**describe(model, args), "experts": experts, "rows": rows}
    if args.json:
        print(json.dumps(result, allow_nan=False))
    else:
        print_table(result)
    return 0


def blocks_top_k(model: nn.Module) -> int:
    from ..models.moe import blocks

    return max(block.router.top_k for block in blocks(model))


def read_documents(args: argparse.Namespace, tokenizer: Any) -> list[Tokens]:
    """Of --data, --documents times --tokens. Raises InputError where there are fewer than two."""
    from ..texts import beginnings, installed, read

    texts = read(args.data) if args.data else installed()
    documents = beginnings(texts, tokenizer, args.documents, args.tokens)
    if len(documents) < 2:
        raise InputError(
            f"{'--data' if args.data else 'the installed packages'}: {len(documents)} documents of {args.tokens} "
            "tokens; there must be two: give more text, or a smaller --tokens"
        )
    return documents


@contextmanager
def progress(what: str, total: int, unit: str, quiet: bool) -> Iterator[Callable[[int], object]]:
    """A progress bar on standard error, where that is a terminal; what it gives is called with each advance."""
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=unit, disable=True if quiet else None, leave=False) as bar:
        yield bar.update


def describe(model: nn.Module, args: argparse.Namespace) -> dict[str, Any]:
    """What was measured on."""
    from ..experts.streaming import streaming_of
    from ..replay.costs import measured_on

    streaming = streaming_of(model)
    return {
        "model": args.model or "the embedded model",
        "data": [str(path) for path in args.data] if args.data else "sources of installed packages",
        "measured_on": measured_on(model),
        "streams": streaming is not None,
        "slots_of_model": streaming.slots if streaming else None,
        "version": __version__,
    }


def print_table(result: dict[str, Any]) -> None:
    rows = result["rows"]
    print(f"{rows[0]['documents']} documents, {rows[0]['tokens']:,} tokens predicted; intervals of 95 % over documents")
    header = (
        f"{'policy':34}{'perplexity':>12}{'price':>9}{'':19}{'agreement':>11}{'KL, nats':>10}{'misses':>9}{'saved':>8}"
    )
    last = object()
    for row in rows:
        if row["slots"] != last:
            last = row["slots"]
            held = last if last is not None else result["slots_of_model"]
            print(f"\n{held} of {result['experts']} experts of a layer in memory, {row['eviction']}\n{header}")
        low, high = row["price_interval"]
        between = f"({low:+.1%} to {high:+.1%})"
        print(
            f"{row['name'][:33]:34}{row['perplexity']:12.3f}{row['price']:+9.2%} {between:18}{row['agreement']:11.1%}"
            f"{row['kl']:10.4f}{row['misses']:9.1%}{row['misses_saved']:8.1%}"
        )
    print(
        "\nprice: how much the perplexity rises. agreement: likeliest tokens that are those of exact routing. misses:"
    )
    print("selected experts that were not in memory; saved: how many fewer than with exact routing.")
