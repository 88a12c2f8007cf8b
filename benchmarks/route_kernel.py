"""What routing costs per layer on a GPU: microseconds inside one graph of chained layers.

    python benchmarks/route_kernel.py [--json] [--keep NAME]

Each graph holds 256 layers, each of which routes logits that depend on the layer before. Measured side by side in one
run: the fused kernel (selection and group plan in one launch), two kernels, the selection kernel alone, mlx-lm's chain
of operations (softmax, argpartition, take, divide), and the launch floor: an empty kernel in the same graph.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from strata_mlx import kernels
from strata_mlx.errors import Fault
from strata_mlx.kernels import MAX_FUSED_ROWS, SIMD, KernelSpec, Launch
from strata_mlx.routing import RoutingPolicy
from strata_mlx.routing.group_plan import plan_ops
from strata_mlx.routing.ops import plain_router, select_ops
from strata_mlx.routing.router import Router

LAYERS, TOP_K, REPEATS = 256, 10, 15
ROWS, EXPERTS = (1, 2, 4, 8, 64, 512), (128, 256, 512)
Layer = Callable[[mx.array], list[mx.array]]  # logits [T, E] to arrays that are ready when the layer is


def layers(rows: int, experts: int) -> dict[str, Layer]:
    """A function per way of routing."""
    rng = np.random.default_rng(rows * experts)
    resident = mx.array(rng.random(experts) < 0.5)
    tables = RoutingPolicy(0.85, 0.4, 3).tables(TOP_K)
    kinds = mx.zeros(rows, mx.uint8)
    mx.eval(resident, kinds)

    drafts = mx.zeros(rows, mx.bool_)

    def selection(x: mx.array) -> list[mx.array]:
        return kernels.route_select(x, resident, tables, kinds, top_k=TOP_K)

    def both(x: mx.array) -> list[mx.array]:
        ids, weights = kernels.route_select(x, resident, tables, kinds, top_k=TOP_K)
        return [weights, kernels.group_plan(ids, resident, expert_count=experts)]

    def fused(x: mx.array) -> list[mx.array]:
        return kernels.route_fused(x, resident, tables, kinds, top_k=TOP_K)

    def ops(x: mx.array) -> list[mx.array]:
        ids, weights = select_ops(x, resident, tables, drafts, top_k=TOP_K)
        return [weights, plan_ops(ids, resident, True).entries]

    def plain(x: mx.array) -> list[mx.array]:
        return list(plain_router(x, Router(TOP_K)))

    ways: dict[str, Layer] = {
        "floor": empty_kernel(rows),
        "select": selection,
        "two_kernels": both,
        "ops": ops,
        "plain_ops": plain,
    }
    return {"fused": fused, **ways} if rows <= MAX_FUSED_ROWS else ways


def empty_kernel(rows: int, build: kernels.Build | None = None) -> Layer:
    """A kernel with as many threads and the same output that does nothing but write one number per row."""
    spec = KernelSpec("empty", ("logits",), (("weights", mx.float32),))
    launch = Launch((), (SIMD * rows, 1, 1), (SIMD, 1, 1), ((rows, TOP_K),))

    def run(x: mx.array) -> list[mx.array]:
        return spec.run([x], launch, build)

    return run


def microseconds(ways: dict[str, Layer], logits: mx.array) -> dict[str, float]:
    """Per layer and way, in graphs of LAYERS of them; the ways take turns, so that a slow spell hits all."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS + 2):
        for name, layer in ways.items():
            x = logits
            start = time.perf_counter()
            for _ in range(LAYERS):
                # The same logits again, once this layer's output is there: a dependency and no work.
                x = mx.depends([logits], layer(x))[0]
            mx.eval(x)
            times[name].append((time.perf_counter() - start) / LAYERS * 1e6)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def measure() -> list[dict[str, Any]]:
    result = []
    for rows, experts in tqdm([(t, e) for e in EXPERTS for t in ROWS], desc="Shapes", disable=not sys.stderr.isatty()):
        logits = mx.array(np.random.default_rng(0).normal(0, 2, (rows, experts)).astype(np.float32))
        row = microseconds(layers(rows, experts), logits)
        best = row.get("fused", row["two_kernels"])
        result.append(
            {"T": rows, "E": experts, **row, "over_ops": best / row["ops"], "over_floor": best / row["floor"]}
        )
    return result


def main() -> None:
    parser = report.parser(__doc__)
    args = parser.parse_args()
    try:
        kernels.default_build()
    except Fault as error:
        sys.exit(f"error: {error}")
    rows = measure()
    small = [row for row in rows if row["T"] <= MAX_FUSED_ROWS]
    result = {
        "device": mx.device_info().get("device_name", mx.default_device().type.name),
        "layers": LAYERS,
        "top_k": TOP_K,
        "worst_over_ops": max(row["over_ops"] for row in small),
        "worst_over_floor": max(row["over_floor"] for row in small),
        "rows": rows,
    }
    if report.publish(result, args):
        return
    names = ("T", "E", "floor", "fused", "select", "two_kernels", "ops", "plain_ops", "over_ops", "over_floor")
    print(report.table(rows, names))


if __name__ == "__main__":
    main()
