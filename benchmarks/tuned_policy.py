"""Does a tuned policy pay for real? Held-out prompts, decoded with the defaults, with the policy, and plainly.

    strata_mlx tune --slots 32 --output policy.json
    python benchmarks/tuned_policy.py --policy policy.json --slots 32 [--json] [--keep NAME]

The ways take turns on every prompt, each run in another order, so that a slow spell of the machine hits all of them; a
ratio is the median over runs of the ratio of their whole tokens per second. The prompts come after those that tune
takes by default. The text is greedy; whatever drafts, it is the same up to logits that are equal within rounding.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from strata_mlx import Policy, load
from strata_mlx.engine import stream_generate

PROMPT_TOKENS, TUNED_ON = 32, 32  # tokens of a prompt, and documents that tune takes
COLUMNS = ("way", "tokens_per_s", "of_defaults", "lowest", "highest", "accepted_per_round")


def decode(model: nn.Module, tokenizer: Any, prompt: list[int], tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """The tokens after the first, their seconds, the ids, and what drafting came to."""
    ids, start, last = [], 0.0, None
    for last in stream_generate(model, tokenizer, prompt, tokens, **options):
        ids.append(last.token)
        if len(ids) == 1:
            start = time.perf_counter()
    seconds = time.perf_counter() - start
    return {"tokens": len(ids) - 1, "seconds": seconds, "ids": ids, "speculation": last and last.speculation}


def run(args: Any) -> dict[str, Any]:
    model, tokenizer = load(args.model, mtp=True, **({"slots": args.slots} if args.slots else {}))
    policy = Policy.load(args.policy)
    policy.check_model(model)
    ways: dict[str, dict[str, Any]] = {"defaults": {}, "tuned": policy.options(), "plain": {"mtp": False}}
    prompts = heldout.windows(tokenizer, TUNED_ON + args.prompts, PROMPT_TOKENS)[TUNED_ON:]
    for options in ways.values():  # fills slots, and compiles
        decode(model, tokenizer, prompts[0], args.tokens, options)
    made: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in ways}
    shuffle = random.Random(0).shuffle
    for _ in tqdm(range(args.runs), desc="Runs", unit="run"):
        for name in ways:
            made[name].append([])
        for prompt in prompts:
            order = list(ways)
            shuffle(order)
            for name in order:
                made[name][-1].append(decode(model, tokenizer, prompt, args.tokens, ways[name]))
    rows = [row(name, made[name], made["defaults"]) for name in ways]
    texts = {name: [each["ids"] for each in runs[0]] for name, runs in made.items()}
    return {
        "rows": rows,
        "texts_that_differ": sum(
            ids != plain
            for name in ("defaults", "tuned")
            for ids, plain in zip(texts[name], texts["plain"], strict=True)
        ),
        "policy": str(policy.retention) if policy.mtp != "off" else "no drafts",
        "slots": args.slots,
        "runs": args.runs,
        "prompts": args.prompts,
        "tokens": args.tokens,
        "device": mx.default_device().type.name,
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }


def row(name: str, runs: list[list[dict[str, Any]]], defaults: list[list[dict[str, Any]]]) -> dict[str, Any]:
    speeds, others = ([rate(each) for each in of] for of in (runs, defaults))
    ratios = [speed / other for speed, other in zip(speeds, others, strict=True)]
    drafting = [each["speculation"] for each in runs[0] if each["speculation"]]
    rounds = sum(each.rounds for each in drafting)
    return {
        "way": name,
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_of_runs": speeds,
        "of_defaults": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "accepted_per_round": sum(each.accepted for each in drafting) / rounds if rounds else None,
    }


def rate(decoded: list[dict[str, Any]]) -> float:
    return sum(each["tokens"] for each in decoded) / sum(each["seconds"] for each in decoded)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--policy", type=Path, required=True, help="what strata_mlx tune wrote, with the same slots")
    parser.add_argument("--model", help="a folder or a repository with an MTP head; by default the embedded model")
    parser.add_argument("--slots", type=int, help="experts of a layer in memory; by default all of them")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=9, help="held-out prompts of each run")
    parser.add_argument("--tokens", type=int, default=128, help="tokens for each of them")
    args = parser.parse_args()
    result = run(args)
    if not report.publish(result, args):
        print(report.table(result["rows"], COLUMNS))
        print(f"policy: {result['policy']}; texts that differ from plain decoding: {result['texts_that_differ']}")


if __name__ == "__main__":
    main()
