"""What a window of T rows costs against a single row: the price of verifying drafts, ours and mlx_lm's.

    python benchmarks/gpu_verify_cost.py [--json]

Windows of 1 to 8 held-out tokens go through the whole model, logits included, after the same context, and are taken
back again: ours as speculation does it, mlx_lm's on the same files with its own caches, on whatever device MLX uses.
All are measured in turn, each time in another order, so that a slow spell of the machine favours none. A cost is a
ratio of times of one turn; the table has the median. Our time is also given for all layers and for the output head.

The files are the embedded model's; on a CPU its trunk with scales in float32, which mlx_lm multiplies faster.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from benchmarks.models import for_mlx_lm
from strata_mlx import load
from strata_mlx.models.trunk import Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.speculation.window import Window

ROWS = range(1, 9)
Measured = Callable[[mx.array], Any]  # tokens [T] to what is to be evaluated


class Ours:
    """Windows as SpeculativeDecoder runs them."""

    def __init__(self, model: nn.Module, context: mx.array):
        self._trunk, self.cache = Trunk(model), make_cache(model)
        hidden = self._trunk(context[None], self.cache).after
        mx.eval(hidden, [layer.state for layer in self.cache])
        self._hidden = mx.contiguous(hidden[:, -max(ROWS) :])

    def window(self, tokens: mx.array) -> None:
        window = Window(self.cache, tokens.size)
        hidden = self._trunk(tokens[None], window.layers, begin=tokens.size > 1).after
        mx.eval(self.logits(hidden))
        window.commit(0)

    def layers(self, tokens: mx.array) -> None:
        window = Window(self.cache, tokens.size)
        mx.eval(self._trunk(tokens[None], window.layers).after)
        window.commit(0)

    def head(self, tokens: mx.array) -> None:
        mx.eval(self.logits(self._hidden[:, : tokens.size]))

    def logits(self, hidden: mx.array) -> mx.array:
        """Exact ones of a plain step."""
        return (self._trunk.logits if hidden.shape[1] == 1 else self._trunk.rounded_logits)(hidden)


class Theirs:
    """Windows through mlx_lm's model, over caches that are put back afterwards."""

    def __init__(self, model: nn.Module, context: mx.array):
        self._model, self.cache = model, make_prompt_cache(model)
        mx.eval(model(context[None], cache=self.cache), [layer.state for layer in self.cache])

    def window(self, tokens: mx.array) -> None:
        before = [list(layer.cache) if isinstance(layer, ArraysCache) else layer.offset for layer in self.cache]
        mx.eval(self._model(tokens[None], cache=self.cache))
        for layer, state in zip(self.cache, before, strict=True):
            if isinstance(layer, ArraysCache):
                layer.cache = state
            else:
                layer.trim(layer.offset - state)


def parts(ours: Ours, theirs: Theirs) -> dict[str, Measured]:
    """By name, what is measured."""
    return {"ours": ours.window, "mlx_lm": theirs.window, "our layers": ours.layers, "our head": ours.head}


def measure(measured: dict[str, Measured], tokens: mx.array, turns: int) -> dict[str, dict[int, list[float]]]:
    """Seconds by part and rows, one of each turn. ``tokens`` has windows for all turns."""
    seconds: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in measured}
    order = [(name, rows) for name in measured for rows in ROWS]
    for name, rows in order:  # the first run of each compiles
        measured[name](tokens[:rows])
    for turn in tqdm(range(turns), desc="Windows", unit="turn", disable=None):
        random.Random(turn).shuffle(order)
        start = turn * max(ROWS) % (tokens.size - max(ROWS))
        for name, rows in order:
            window = tokens[start : start + rows]
            mx.eval(window)
            begun = time.perf_counter()
            measured[name](window)
            seconds[name][rows].append(time.perf_counter() - begun)
    return seconds


def row(name: str, seconds: dict[int, list[float]]) -> dict[str, Any]:
    one = seconds[1]
    return {
        "part": name,
        "ms": {rows: 1e3 * statistics.median(times) for rows, times in seconds.items()},
        "least_ms": {rows: 1e3 * min(times) for rows, times in seconds.items()},
        "cost": {
            rows: statistics.median(a / b for a, b in zip(times, one, strict=True)) for rows, times in seconds.items()
        },
    }


def run(work: Path, args: Any) -> dict[str, Any]:
    path = for_mlx_lm(args.model, work / "float32")
    model, tokenizer = load(path)
    (text,) = heldout.windows(tokenizer, 1, args.context + 64 * max(ROWS))
    context, tokens = mx.array(text[: args.context]), mx.array(text[args.context :])
    measured = parts(Ours(model, context), Theirs(mlx_lm.load(str(path))[0], context))
    rows = [row(name, seconds) for name, seconds in measure(measured, tokens, args.turns).items()]
    by_name = {each["part"]: each["cost"] for each in rows}
    return {
        "cost_of_4": by_name["ours"][4],
        "mlx_lm_cost_of_4": by_name["mlx_lm"][4],
        "rows": rows,
        "context": args.context,
        "turns": args.turns,
        "device": mx.default_device().type.name,
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", help="a folder that mlx_lm can load too; by default the embedded model")
    parser.add_argument("--context", type=int, default=256, help="tokens before the windows")
    parser.add_argument("--turns", type=int, default=60, help="how often each window is measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), args)
    if report.publish(result, args):
        return
    columns = {f"T = {rows}": rows for rows in ROWS}
    rows = [
        {"part": each["part"], "ms": each["ms"][1], **{name: each["cost"][rows] for name, rows in columns.items()}}
        for each in result["rows"]
    ]
    print(report.table(rows, ("part", "ms", *columns)))


if __name__ == "__main__":
    main()
