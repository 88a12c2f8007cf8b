"""Plain decoding against mlx_lm on the same files, and against what bounds it, in one run.

    python benchmarks/gpu_decode.py [--json] [--synthetic qwen3-next-80b --layers 8] [--model FOLDER ...]

For each model: tokens per second of both in alternating runs; a step taken apart into building the graph, handing it to
the device and waiting for it; the launches of a step, counted in its graph; and two floors of a token: what it reads,
over the bandwidth of memory, and its launches, at the price of an empty kernel in a chain of such in a compiled graph.
Then prompts in chunks, in alternating runs too, and the first token of a new process after 'strata_mlx warmup'.

Made for GPUs, where both compute in the checkpoint's type. Runs on a CPU too, where it is of little use.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from benchmarks.generate_vs_mlx_lm import PROMPT_TOKENS, compare_speed
from benchmarks.make_synthetic import SHAPES, make_synthetic
from benchmarks.route_kernel import TOP_K, empty_kernel
from strata_mlx import load
from strata_mlx.device import on_cpu
from strata_mlx.hub import EMBEDDED
from strata_mlx.models.family import text_args
from strata_mlx.prefill import make_cache

CHAIN, REPEATS = 256, 15
# Operations that give another view of an array, or leave it as it is: they launch nothing, or a copy at worst.
VIEWS = (
    "AsStrided", "Broadcast", "BroadcastAxes", "Contiguous", "Copy", "Depends", "ExpandDims", "Flatten",
    "Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
)  # fmt: skip

# A process that reads a short prompt, given the model and the time at which it was started.
FIRST_TOKEN = """
import json, sys, time
import mlx.core as mx
from strata_mlx import load
from strata_mlx.engine import generate_step
imported = time.time()
model, _ = load(sys.argv[1])
loaded = time.time()
next(generate_step(mx.arange(100, 120), model, max_tokens=2))
ended = time.time()
started = float(sys.argv[2])
print(json.dumps({"process_s": ended - started, "load_s": loaded - imported, "after_load_s": ended - loaded}))
"""


class Side(NamedTuple):
    """A model and how its cache is made."""

    model: nn.Module
    cache: Callable[[nn.Module], list[Any]]


def token_ids(count: int, vocabulary: int) -> mx.array:
    return mx.array(np.random.default_rng(0).integers(0, vocabulary, count).astype(np.int32))


# Decoding, and what it is made of


def next_token(side: Side, token: mx.array, cache: list[Any]) -> mx.array:
    """Lazily, ``[1, 1]`` after ``[1, 1]``."""
    return mx.argmax(side.model(token, cache=cache)[:, -1:], axis=-1)


def after_prompt(side: Side, prompt: mx.array) -> tuple[mx.array, list[Any]]:
    cache = side.cache(side.model)
    token = next_token(side, prompt[None], cache)
    mx.eval(token)
    return token, cache


def step_parts(side: Side, prompt: mx.array, steps: int) -> dict[str, float]:
    """Microseconds of a step that the next one does not overlap: medians."""
    token, cache = after_prompt(side, prompt)
    times: dict[str, list[float]] = {"build": [], "encode": [], "wait": []}
    for step in range(2 * steps):
        marks = [time.perf_counter()]
        token = next_token(side, token, cache)
        marks.append(time.perf_counter())
        mx.async_eval(token)
        marks.append(time.perf_counter())
        mx.eval(token)
        marks.append(time.perf_counter())
        if step >= steps:  # the first half warms up
            for values, start, end in zip(times.values(), marks[:-1], marks[1:], strict=True):
                values.append(1e6 * (end - start))
    parts = {f"{name}_us": statistics.median(values) for name, values in times.items()}
    return {**parts, "step_us": sum(parts.values())}


def launches(side: Side, prompt: mx.array) -> int:
    """Of a step: the operations in its graph that are more than views."""
    token, cache = after_prompt(side, prompt)
    token = next_token(side, token, cache)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "graph.dot")
        mx.export_to_dot(file, token)
        operations = re.findall(r'label ="(\w+)"', Path(file).read_text())
    mx.eval(token)
    return sum(operation not in VIEWS for operation in operations)


def bytes_per_token(side: Side, prompt: mx.array) -> int:
    """What a step has to read of weights and states, and to write of recurrent states."""
    _, cache = after_prompt(side, prompt)
    args, total = text_args(side.model), 0
    for name, array in tree_flatten(side.model.parameters()):
        if name.startswith("mtp."):
            continue
        if ".switch_mlp." in name:
            total += array.nbytes * args.num_experts_per_tok // args.num_experts
        elif ".embed_tokens." in name and not args.tie_word_embeddings:
            total += array.nbytes // args.vocab_size
        else:
            total += array.nbytes
    for layer in cache:
        size = sum(array.nbytes for _, array in tree_flatten(layer.state) if isinstance(array, mx.array))
        total += 2 * size if isinstance(layer, ArraysCache) else size * layer.offset // layer.keys.shape[2]
    return total


# Floors


def measured_bandwidth() -> float:
    """Bytes per second, read and written, of a large element-wise operation."""
    x = mx.zeros(1 << (24 if on_cpu() else 28))
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        mx.eval(x + 1)
        seconds.append(time.perf_counter() - start)
    return 2 * x.nbytes / min(seconds)


def launch_us() -> float:
    """Microseconds of a launch in a chain: of an empty kernel, or of an element-wise operation on the CPU, which has no
    kernels.
    """
    x = mx.zeros((1, TOP_K))
    kernel = (lambda x: [mx.abs(x)]) if on_cpu() else empty_kernel(1)

    def chain(x: mx.array) -> mx.array:
        for _ in range(CHAIN):
            x = kernel(x)[0]
        return x

    run = chain if on_cpu() else mx.compile(chain)  # the CPU's would make one operation of it
    seconds = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        mx.eval(run(x))
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds[2:]) / CHAIN


# Prompts


def prefill_seconds(side: Side, tokens: mx.array, chunk: int) -> float:
    cache = side.cache(side.model)
    mx.clear_cache()
    start = time.perf_counter()
    for first in range(0, tokens.size, chunk):
        side.model(tokens[None, first : first + chunk], cache=cache)
        mx.eval([layer.state for layer in cache])
    return time.perf_counter() - start


def compare_prefill(ours: Side, theirs: Side, tokens: mx.array, args: Any) -> dict[str, Any]:
    rows = [
        tuple(tokens.size / prefill_seconds(side, tokens, args.chunk) for side in (ours, theirs))
        for _ in tqdm(range(args.pairs + 1), desc=f"Prompts of {tokens.size}", unit="pair")
    ][1:]  # the first pair warms up
    ratios = sorted(a / b for a, b in rows)
    return {
        "tokens": tokens.size,
        "ours_tps": statistics.median(a for a, _ in rows),
        "mlx_lm_tps": statistics.median(b for _, b in rows),
        "ratio": statistics.median(ratios),
        "ratio_range": [ratios[0], ratios[-1]],
    }


# The first token of another process


def child(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, *arguments], env=report.environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def first_token(folder: Path, processes: int) -> dict[str, Any]:
    warmup = child("-m", "strata_mlx", "warmup", "--model", str(folder), "--no-mtp", "--json")
    warmup["kernels"] = [{key: kernels[key] for key in ("of", "compiled", "kept")} for kernels in warmup["kernels"]]
    runs = [child("-c", FIRST_TOKEN, str(folder), str(time.time())) for _ in range(processes)]
    return {"warmup": warmup, **{name: statistics.median(run[name] for run in runs) for name in runs[0]}}


def measure(name: str, folder: Path, floors: dict[str, float], args: Any) -> dict[str, Any]:
    first = first_token(folder, args.pairs)  # before there are models in memory here
    ours, theirs = Side(load(folder)[0], make_cache), Side(mlx_lm.load(str(folder))[0], make_prompt_cache)
    tokens = token_ids(max(PROMPT_TOKENS, *args.prefill), text_args(ours.model).vocab_size)
    prompt = tokens[:PROMPT_TOKENS]
    speed = compare_speed(ours.model, theirs.model, prompt.tolist(), args.tokens, args.pairs, name)  # type: ignore[arg-type]
    steps = []
    for side_name, side in {"ours": ours, "mlx_lm": theirs}.items():
        read, count, token = bytes_per_token(side, prompt), launches(side, prompt), 1e6 / speed[f"{side_name}_tps"]
        floor = {"read": 1e6 * read / floors["bandwidth"], "launches": count * floors["launch_us"]}
        steps.append(
            {
                "of": side_name,
                "token_us": token,
                **step_parts(side, prompt, args.steps),
                "launches": count,
                "bytes": read,
                "read_floor_us": floor["read"],
                "launch_floor_us": floor["launches"],
                "over_floor": token / max(floor.values()),
            }
        )
    return {
        "model": name,
        "decode": speed,
        "steps": steps,
        "prefill": [compare_prefill(ours, theirs, tokens[:count], args) for count in args.prefill],
        "first_token": first,
    }


def run(work: Path, args: Any) -> dict[str, Any]:
    models = {folder.name: folder for folder in args.model} or {"embedded": EMBEDDED}
    if args.synthetic:
        name = f"{args.synthetic}, {args.layers} layers"
        models[name] = Path(make_synthetic(args.synthetic, args.layers, work / "synthetic", progress=True)["path"])
    floors = {"bandwidth": args.bandwidth or measured_bandwidth(), "launch_us": launch_us()}
    return {
        "device": mx.device_info().get("device_name", mx.default_device().type.name),
        "floors": floors,
        "chunk": args.chunk,
        "models": [measure(name, folder, floors, args) for name, folder in models.items()],
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }


_SPEEDS = ("ours_tps", "mlx_lm_tps")
_STEP = ("token_us", "build_us", "encode_us", "wait_us", "launches", "read_floor_us", "launch_floor_us", "over_floor")
TABLES: dict[tuple[str, ...], Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    (*_SPEEDS, "speedup", "speedup_range"): lambda model: [model["decode"]],
    ("of", *_STEP): lambda model: model["steps"],
    ("tokens", *_SPEEDS, "ratio"): lambda model: model["prefill"],
    ("process_s", "load_s", "after_load_s"): lambda model: [model["first_token"]],
}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, nargs="+", default=[], help="folders; by default the embedded model")
    parser.add_argument("--synthetic", choices=SHAPES, help="a model with random weights in these shapes as well")
    parser.add_argument("--layers", type=int, default=8, help="of the synthetic model")
    parser.add_argument("--bandwidth", type=float, help="of memory, in bytes per second; by default it is measured")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of alternating runs, and new processes")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a run of decoding")
    parser.add_argument("--steps", type=int, default=64, help="steps that are taken apart")
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 4096], help="tokens of prompts")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prompt at a time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), args)
    if report.publish(result, args):
        return
    floors = result["floors"]
    print(f"bandwidth {floors['bandwidth']:.3g} bytes/s, a launch {floors['launch_us']:.2f} microseconds")
    for columns, part in TABLES.items():
        rows = [{"model": model["model"], **row} for model in result["models"] for row in part(model)]
        print(f"\n{report.table(rows, ('model', *columns))}")


if __name__ == "__main__":
    main()
