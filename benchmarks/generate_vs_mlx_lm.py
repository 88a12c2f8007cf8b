"""Compare plain decoding with mlx_lm's on the same files, prompts and machine, in one run.

    python benchmarks/generate_vs_mlx_lm.py [--json]

Exactness: greedy tokens and log-probabilities over held-out prompts, both in float32. Speed: decoding the embedded
model, quantised and as float32, in alternating runs; from the start of the process to the first token; and by compute
type.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from benchmarks.models import embedded_as_float32
from strata_mlx import load, loading
from strata_mlx.device import DTYPES
from strata_mlx.engine import generate_step
from strata_mlx.errors import StrataError
from strata_mlx.hub import EMBEDDED

GAP = 1e-4  # two logits closer than this may swap when sums are taken in another order
PROMPT_TOKENS = 32
Step = Callable[..., Iterator[tuple[Any, mx.array]]]


def compare_tokens(ours: nn.Module, theirs: nn.Module, prompts: list[list[int]], length: int) -> dict[str, Any]:
    """Greedy decoding of ``length`` tokens by both; a prompt counts up to the first position where they part."""
    differences, largest, compared = [], 0.0, 0
    for number, prompt in enumerate(tqdm(prompts, desc="Exactness", unit="prompt")):
        pairs = zip(
            generate_step(mx.array(prompt), ours, max_tokens=length),
            mlx_lm_generate_step(mx.array(prompt), theirs, max_tokens=length),
            strict=True,
        )
        for position, ((token, logprobs), (other, expected)) in enumerate(pairs):
            compared += 1
            largest = max(largest, float(np.abs(np.array(logprobs - expected)).max()))
            if token != other:
                second, best = np.sort(np.array(expected))[-2:].tolist()
                differences.append({"prompt": number, "position": position, "gap": best - second})
                break
    return {
        "mismatches": sum(difference["gap"] > GAP for difference in differences),
        "within_gap": [difference for difference in differences if difference["gap"] <= GAP],
        "tokens_compared": compared,
        "largest_logit_difference": largest,
    }


def decode_speed(step: Step, model: nn.Module, prompt: list[int], tokens: int) -> float:
    """Tokens per second after the first one."""
    generator = step(mx.array(prompt), model, max_tokens=tokens)
    next(generator)
    start = time.perf_counter()
    count = sum(1 for _ in generator)
    return count / (time.perf_counter() - start)


def compare_speed(
    ours: nn.Module, theirs: nn.Module, prompt: list[int], tokens: int, pairs: int, name: str
) -> dict[str, Any]:
    """Alternating runs; the ratio is the median over the pairs, so that a slow spell of the machine hits both."""
    rows = []
    for _ in tqdm(range(pairs + 1), desc=f"Speed, {name}", unit="pair"):
        rows.append(
            (
                decode_speed(generate_step, ours, prompt, tokens),
                decode_speed(mlx_lm_generate_step, theirs, prompt, tokens),
            )
        )
    ratios = sorted(a / b for a, b in rows[1:])  # the first pair warms up
    return {
        "ours_tps": statistics.median(a for a, _ in rows[1:]),
        "mlx_lm_tps": statistics.median(b for _, b in rows[1:]),
        "speedup": statistics.median(ratios),
        "speedup_range": [ratios[0], ratios[-1]],
    }


def first_token_seconds(package: str, model: Path) -> float:
    """From the start of ``PACKAGE generate`` to the first text after the line that both print before it."""
    command = [sys.executable, "-m", package, "generate", "--model", str(model), "--prompt", "class Stack:", "-m", "16"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        seen = b""
        while not seen.partition(b"==========\n")[2]:
            seen += (chunk := os.read(process.stdout.fileno(), 4096))
            if not chunk:
                raise RuntimeError(f"{' '.join(command)} ended without text")
        return time.perf_counter() - start


def compare_first_token(model: Path, pairs: int, name: str) -> dict[str, Any]:
    rows = [
        (first_token_seconds("strata_mlx", model), first_token_seconds("mlx_lm", model))
        for _ in tqdm(range(pairs + 1), desc=f"First token, {name}", unit="pair")
    ]
    return {
        "ours_s": statistics.median(a for a, _ in rows[1:]),
        "mlx_lm_s": statistics.median(b for _, b in rows[1:]),
        "ratio": statistics.median(a / b for a, b in rows[1:]),
    }


def compute_types(models: dict[str, Path], prompt: list[int], tokens: int) -> list[dict[str, Any]]:
    """Decoding speed by what the weights are and what is computed in: the reason for ``--dtype auto``."""
    rows = []
    for weights, path in models.items():
        for dtype in DTYPES:
            try:
                model, _ = load(path, dtype=dtype)
                decode_speed(generate_step, model, prompt, tokens)
                speed: float | str = decode_speed(generate_step, model, prompt, tokens)
            except StrataError as error:
                speed = str(error)
            rows.append({"weights": weights, "compute": dtype, "tokens_per_s": speed})
    return rows


def run(work: Path, args: Any) -> dict[str, Any]:
    dense = embedded_as_float32(work / "float32")
    ours, tokenizer = load(dense)
    theirs, _ = mlx_lm.load(str(dense))
    prompts = heldout.windows(tokenizer, args.prompts, PROMPT_TOKENS)
    result = compare_tokens(ours, theirs, prompts, args.tokens)
    dense_speed = compare_speed(ours, theirs, prompts[0], 128, args.pairs, "float32")
    del ours, theirs
    ours, theirs = loading.load()[0], mlx_lm.load(str(EMBEDDED))[0]
    quantised_speed = compare_speed(ours, theirs, prompts[0], 48, args.pairs, "quantised")
    del ours, theirs
    first = {
        "quantised": compare_first_token(EMBEDDED, args.pairs, "quantised"),
        "float32": compare_first_token(dense, args.pairs, "float32"),
    }
    return {
        **result,
        "speedup_quantised": quantised_speed["speedup"],
        "speedup_float32": dense_speed["speedup"],
        "first_token_ratio": first["quantised"]["ratio"],  # the embedded model as it is; float32 is in "first_token"
        "quantised": quantised_speed,
        "float32": dense_speed,
        "first_token": first,
        "compute_types": compute_types({"quantised": EMBEDDED, "float32": dense}, prompts[0], 48),
        "device": mx.default_device().type.name,
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=50, help="held-out prompts for exactness")
    parser.add_argument("--tokens", type=int, default=128, help="tokens for each of them")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of alternating runs for each speed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), args)
    if report.publish(result, args):
        return
    print(f"tokens compared {result['tokens_compared']}, mismatches {result['mismatches']}, ", end="")
    print(f"largest difference of a log-probability {result['largest_logit_difference']:.2e}\n")
    speeds = [{"model": name, **result[name]} for name in ("quantised", "float32")]
    print(report.table(speeds, ("model", "ours_tps", "mlx_lm_tps", "speedup", "speedup_range")), end="\n\n")
    first = [{"model": name, **row} for name, row in result["first_token"].items()]
    print(report.table(first, ("model", "ours_s", "mlx_lm_s", "ratio")), end="\n\n")
    print(report.table(result["compute_types"], ("weights", "compute", "tokens_per_s")))


if __name__ == "__main__":
    main()
