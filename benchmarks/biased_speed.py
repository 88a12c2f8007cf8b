"""What biased routing gains in speed: experts streamed exactly and with residents preferred, side by side.

    python benchmarks/biased_speed.py [--slots 32] [--read-ms 0.5] [--json] [--keep NAME]

The embedded model continues the beginnings of held-out documents greedily, by plain decoding and with its MTP head
drafting in every round. The policies take turns on each document, in an order that rotates, after a document that warms
up; slots stay filled. ``speed`` is the median over documents of the ratio to exact routing in the same way of decoding,
``range`` its least and greatest; misses and picks are those of the prompt too. The texts differ, since biased routing
changes them; its price in perplexity is residency_tradeoff.py's to measure.

A miss is as cheap as can be here, where the files are in the page cache. With --read-ms, reading an expert takes so
much longer, and only one is read at a time, as from a slower disk.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from strata_mlx import RoutingPolicy, load, set_routing, stream_generate
from strata_mlx.experts import ExpertStore
from strata_mlx.experts.traffic import Traffic
from strata_mlx.models.moe import make_routing

PROMPT_TOKENS = 32
EXACT = RoutingPolicy()
# The README's, which miss about half as often as exact LRU with 32 of 128 experts in memory.
POLICIES = (EXACT, RoutingPolicy(0.72), RoutingPolicy(kind="margin", margin=0.033))
DRAFTING = (*POLICIES, RoutingPolicy(kind="margin", margin=0.012, sure_margin=0.075))


def slow_down(store: ExpertStore, seconds: float) -> None:
    """Let every expert take so much longer to read, one at a time."""
    read, disk = store._read, threading.Lock()

    def slowed(*job: Any) -> int:
        with disk:
            time.sleep(seconds)
        return read(*job)

    store._read = slowed  # type: ignore[method-assign, assignment]


def turn(model: nn.Module, tokenizer: Any, prompt: list[int], tokens: int, drafts: bool) -> tuple[float, Traffic]:
    """Tokens per second of one continuation, and what was read for it."""
    *_, last = stream_generate(model, tokenizer, prompt, tokens, mtp=drafts)
    assert last.experts is not None, "some experts have no slot"
    return last.generation_tps, last.experts


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--slots", type=int, default=32, help="of 128 experts in each layer")
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96, help="that each is continued by")
    parser.add_argument("--read-ms", type=float, default=0.0, help="that reading an expert takes longer")
    args = parser.parse_args()
    model, tokenizer = load(slots=args.slots, mtp=True)
    tokenizer.eos_token_ids.clear()
    if args.read_ms:
        slow_down(model.streaming.store, args.read_ms / 1e3)
    prompts = heldout.windows(tokenizer, args.documents + 1, PROMPT_TOKENS)
    ways = [(drafts, policy) for drafts, policies in ((False, POLICIES), (True, DRAFTING)) for policy in policies]
    turns: dict[tuple[bool, RoutingPolicy], list[tuple[float, Traffic]]] = {way: [] for way in ways}
    for number, prompt in enumerate(tqdm(prompts, desc="Speed", unit="document", disable=None)):
        first = number % len(ways)
        for drafts, policy in ways[first:] + ways[:first]:
            set_routing(model, make_routing(model, policy, None))
            found = turn(model, tokenizer, prompt, args.tokens, drafts)
            if number:
                turns[drafts, policy].append(found)
    rows = []
    for (drafts, policy), own in turns.items():
        exact = turns[drafts, EXACT]
        ratios = [speed / other for (speed, _), (other, _) in zip(own, exact, strict=True)]
        rows.append(
            {
                "decoding": "drafting" if drafts else "plain",
                "policy": str(policy),
                "tokens_per_s": median(speed for speed, _ in own),
                "speed": median(ratios),
                "range": [min(ratios), max(ratios)],
                "misses_per_pick": sum(t.misses for _, t in own) / sum(t.picks for _, t in own),
                "read_us_per_expert": 1e6 * sum(t.read_seconds for _, t in own) / sum(t.misses for _, t in own),
            }
        )
    options = {name: getattr(args, name) for name in ("slots", "documents", "tokens", "read_ms")}
    result = {**options, "device": mx.default_device().type.name, "cores": os.cpu_count(), "rows": rows}
    if not report.publish(result, args):
        print(report.table(rows, tuple(rows[0])))


if __name__ == "__main__":
    main()
