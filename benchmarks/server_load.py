"""Put the server under load: race mlx_lm.server on the same weights, then let clients misbehave for minutes.

    python benchmarks/server_load.py --json
    python benchmarks/server_load.py --minutes 1 --rounds 1        # a short look

Both servers have the same files (the embedded model's trunk, experts in 4 bits, with float32 scales, because MLX's CPU
backend is several times slower with bfloat16 ones) and the same number of requests at a time; nobody drafts. They take
turns on the same held-out prompts, which neither has seen before, with 1, 4 and 16 streams; the first round of each
warms up. A speed is the median over rounds, a ratio the median over the pairs of one round. same_text: the share of
answers that are mlx_lm.server's to the letter.

Then 16 clients go about our server, started afresh: most ask and read their answers, others hang up in the middle of
one, send bodies that are no JSON, values that are out of range, 9 MB, or half of a body. Each answer is compared with
the one that the same request got when it was alone. Its memory for earlier prompts is small, so that it is full from
the beginning.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from benchmarks.models import embedded_with_float32_scales
from benchmarks.serving import processes, throughput
from benchmarks.serving.client import Prompt
from benchmarks.serving.soak import soak, summary
from strata_mlx.checkpoint import Checkpoint
from strata_mlx.loading import load_tokenizer

STREAMS = (1, 4, 16)
PROMPT_TOKENS = 48
SOAKED = 24  # prompts, from a few tokens to this many of each document:
SOAKED_TOKENS = (4, 300)
PREFIX_BYTES = "8MB"
GOALS = {"at least": 1.0, "goal": 1.5}  # ours over mlx_lm.server, at each number of streams
MEMORY_GROWTH = 0.02


def race_prompts(tokenizer: Any, count: int, tokens: int) -> Iterator[Prompt]:
    for window in heldout.windows(tokenizer, count, PROMPT_TOKENS):
        yield Prompt(tokenizer.decode(window), tokens)


def soak_prompts(tokenizer: Any) -> list[Prompt]:
    low, high = SOAKED_TOKENS
    lengths = [low + (high - low) * number * number // SOAKED**2 for number in range(SOAKED)]
    windows = heldout.windows(tokenizer, SOAKED, high)
    return [
        Prompt(tokenizer.decode(window[:length]), 8 + 5 * (number % 16))
        for number, (window, length) in enumerate(zip(windows, lengths, strict=True))
    ]


def run_race(args: Any, model: Path, tokenizer: Any) -> list[dict[str, Any]]:
    needed = sum(STREAMS) * args.each * (args.rounds + 1)
    prompts = race_prompts(tokenizer, needed, args.tokens)
    with ExitStack() as stack:
        servers = [start(model, max(STREAMS)) for start in (processes.ours, processes.mlx_lm)]
        for server in servers:
            stack.callback(server.close)
        bar = stack.enter_context(tqdm(total=needed * len(servers), desc="Race", unit="request", disable=None))
        return throughput.rows(throughput.race(servers, prompts, STREAMS, args.rounds, args.each, bar.update))


def run_soak(args: Any, model: Path, tokenizer: Any) -> dict[str, Any]:
    server = processes.ours(model, args.streams, "--prompt-cache-bytes", PREFIX_BYTES)
    seconds = 60 * args.minutes
    try:
        with tqdm(total=round(seconds), desc="Soak", unit="s", disable=None) as bar:
            findings = asyncio.run(
                soak(
                    server,
                    soak_prompts(tokenizer),
                    args.streams,
                    seconds,
                    args.seed,
                    lambda passed: bar.update(int(passed) - bar.n),
                )
            )
    finally:
        server.close()
    return summary(findings)


def verdicts(race: list[dict[str, Any]], soaked: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What must hold, what was found, and whether that is enough."""
    found: list[dict[str, Any]] = []
    for row in race:
        if row["server"] == "ours":
            for name, least in GOALS.items():
                reached = row["of_mlx_lm"]
                found.append(_verdict(f"{row['streams']} streams, {name}", reached, least, reached >= least))
    if soaked:
        found.append(_verdict("wrong answers", len(soaked["wrong"]), 0, not soaked["wrong"]))
        found.append(_verdict("failed requests", len(soaked["failed"]), 0, not soaked["failed"]))
        growth = soaked["memory_growth"]
        if growth is not None:
            found.append(_verdict("growth of memory", growth, MEMORY_GROWTH, growth <= MEMORY_GROWTH))
    return found


def _verdict(name: str, reached: float, limit: float, met: bool) -> dict[str, Any]:
    return {"goal": name, "reached": reached, "limit": limit, "met": met}


def run(args: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as work:
        model = embedded_with_float32_scales(Path(work) / "model")
        tokenizer = load_tokenizer(Checkpoint.open(model))
        race = run_race(args, model, tokenizer) if args.rounds else []
        soaked = run_soak(args, model, tokenizer) if args.minutes else None
    return {
        "race": race,
        "soak": soaked,
        "verdicts": verdicts(race, soaked),
        "tokens": args.tokens,
        "rounds": args.rounds,
        "requests_per_stream": args.each,
        "streams_of_soak": args.streams,
        "device": mx.default_device().type.name,
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of the clients that misbehave; 0: none")
    parser.add_argument("--streams", type=int, default=16, help="clients at a time in those minutes")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of the race that count, after one that warms up; 0: none"
    )
    parser.add_argument("--each", type=int, default=2, help="requests of each stream in a round")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer in the race")
    parser.add_argument("--seed", type=int, default=0, help="of what clients do")
    args = parser.parse_args()
    result = run(args)
    if report.publish(result, args):
        return
    if result["race"]:
        print(report.table(result["race"], list(result["race"][0])), end="\n\n")
    for name, value in (result["soak"] or {}).items():
        print(f"{name.replace('_', ' ')}: {value}")
    print(report.table(result["verdicts"], ("goal", "reached", "limit", "met")))


if __name__ == "__main__":
    main()
