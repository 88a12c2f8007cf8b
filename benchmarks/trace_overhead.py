"""What does writing a trace take?

    python benchmarks/trace_overhead.py [--json]

Held-out prompts are decoded with and without a trace, alternately, in one process. ``share`` is the median over rounds,
each with and without, of how much longer the round took; on a busy machine it is noise. ``record_us`` is what writing a
round took by itself, and ``record_share`` that of a median round.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from strata_mlx import load
from strata_mlx.engine import stream_generate
from strata_mlx.speculation.record import Round
from strata_mlx.trace import TraceWriter

DECODING = {"plain": False, "mtp": True}


def decode(model: nn.Module, tokenizer: Any, prompt: list[int], args: Any, mtp: bool, on_round: Any) -> list[float]:
    """When each token came."""
    ends = []
    for _ in stream_generate(model, tokenizer, prompt, args.tokens, mtp=mtp, on_round=on_round):
        ends.append(time.perf_counter())
    return ends


def timed(write: Callable[[Round], None], seconds: list[float]) -> Callable[[Round], None]:
    def on_round(latest: Round) -> None:
        start = time.perf_counter()
        write(latest)
        seconds.append(time.perf_counter() - start)

    return on_round


def compare(args: Any, name: str, folder: Path) -> dict[str, Any]:
    model, tokenizer = load(args.model, mtp=True, slots=args.slots)
    prompts = heldout.windows(tokenizer, args.prompts, 32)
    decode(model, tokenizer, prompts[0], args, DECODING[name], None)
    ratios: list[float] = []
    records: list[float] = []
    rounds: list[float] = []
    for number in tqdm(range(args.passes), desc=name, unit="pass", disable=None):
        for prompt in prompts:
            ends: dict[bool, list[float]] = {}
            for traced in (True, False) if number % 2 else (False, True):
                writer = TraceWriter(folder / "trace")
                writer.begin(model, {})
                on_round = timed(writer.round, records) if traced else None
                ends[traced] = decode(model, tokenizer, prompt, args, DECODING[name], on_round)
                writer.close()
            took = {key: [b - a for a, b in pairwise(value)] for key, value in ends.items()}
            # Tokens of one round come at once.
            pairs = [(a, b) for a, b in zip(took[True], took[False], strict=True) if min(a, b) > 2e-4]
            ratios += [a / b for a, b in pairs]
            rounds += [b for _, b in pairs]
    return {
        "decoding": name,
        "rounds": len(rounds),
        "round_ms": 1e3 * statistics.median(rounds),
        "share": statistics.median(ratios) - 1,
        "record_us": 1e6 * statistics.median(records),
        "record_share": statistics.median(records) / statistics.median(rounds),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", help="a folder or a repository with an MTP head; by default the embedded model")
    parser.add_argument("--slots", type=int, default=32, help="experts of a layer in memory")
    parser.add_argument("--prompts", type=int, default=6, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens for each of them")
    parser.add_argument("--passes", type=int, default=4, help="how often each is decoded in both ways")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [compare(args, name, Path(folder)) for name in DECODING]
    result = {
        "rows": rows,
        "device": mx.default_device().type.name,
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }
    if not report.publish(result, args):
        print(report.table(rows, tuple(rows[0])))


if __name__ == "__main__":
    main()
