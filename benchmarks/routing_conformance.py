"""Conformance of the routing executors over the published grid: 158,400 cases against the float64 reference.

    python benchmarks/routing_conformance.py --json --executors ops

The grid is 12 trials x E x b x r x protect x draft flag x row kind x residency at K = 10. A case fails where
an id differs or a weight is off by more than 2e-7. ``legacy_failures`` counts the cases in which the recovery
of earlier kernels fails (inverse factor 1 where the tail keeps r), which shows that the grid can tell.

That rule can matter only where r1 is active (r > 1: 3 of 5 values), with a protected rank before the tail
and a tail before the end (protect 2..9: 8 of 11), which has no bonus of its own (b <= 1: 2 of 5), on a row
that is no draft row with the draft flag (3 of 4), and with residents (2 of 4). With 36 trials that makes
36 x 3 x 8 x 2 x 3 x 2 = 10,368. Where half of the experts are resident, some pick no resident in the tail.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strata_mlx import kernels
from strata_mlx.errors import InputError
from strata_mlx.routing import Executor, RoutingPolicy, reference, select_ops
from strata_mlx.routing.executors import kernel_executor
from strata_mlx.routing.policy import HEAD, INVERSE


def _on_host() -> Executor:
    """The Metal text, compiled as C++ and run thread by thread (tests/host)."""
    from tests.host.host import HostBuild

    return kernel_executor(HostBuild())


def _on_gpu(available: Callable[[], bool]) -> Executor:
    if not available():
        raise InputError("--executors: MLX has no such backend on this machine")
    return kernel_executor(kernels.default_build())


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "ops": lambda: select_ops,
    "host": _on_host,
    "cuda": lambda: _on_gpu(mx.cuda.is_available),
    "metal": lambda: _on_gpu(mx.metal.is_available),
}

TRIALS, TOP_K, TOLERANCE = 12, 10, 2e-7
EXPERTS = (32, 256, 512)
B_BONUSES = (math.log(0.5), 0.0, math.log(2.0), math.log(4.0), 0.85)
R_BONUSES = (
    0.0,
    math.log(0.5),
    math.log(2.0),
    math.log(4.0),
    0.4,
)  # r = 1 first: the others are compared with it
PROTECTS = range(11)
RESIDENCIES = ("null", "missing", "resident", "mixed")
DRAFT_ROWS = np.arange(2 * TRIALS) >= TRIALS  # every trial once as a head row and once as a suffix row


@dataclass
class Tally:
    """What one executor did."""

    failures: int = 0
    draft_row_failures: int = 0
    worst_error: float = 0.0
    changed_without_r1: int = 0  # rows with r <= 1, or draft rows with the draft flag, that differ from r = 1
    seconds: float = 0.0


@dataclass(frozen=True)
class Batch:
    """The cases that share a policy and a residency map, as the rows of one window."""

    logits: NDArray[np.float32]  # [24, E]
    probabilities: list[NDArray[np.float64]] = field(repr=False)
    resident: NDArray[np.bool_] | None
    policy: RoutingPolicy
    without_r1: tuple[float, int, bool, str, int]  # names the batch that has r = 1 and is otherwise equal


def make_logits(experts: int) -> NDArray[np.float32]:
    """Normal logits ``[12, E]`` from nearly uniform to peaked rows; odd trials are rounded and so tied.

    Scores of this seed are equal or at least 1e-6 apart, so that float32 and float64 must pick the same ids.
    """
    rng = np.random.default_rng(experts)
    rows = []
    for trial in range(TRIALS):
        row = rng.normal(size=experts)
        row = np.round(row * 4) / 4 if trial % 2 else row
        rows.append(row * 0.25 * 1.3**trial)  # standard deviations of 0.25 to 4.5
    return np.array(rows, np.float32)


def make_residency(kind: str, experts: int) -> NDArray[np.bool_] | None:
    if kind == "null":
        return None
    share = {"missing": 0.0, "resident": 1.0, "mixed": 0.5}[kind]
    return np.random.default_rng(experts + 1).random(experts) < share


def grid() -> Iterator[Batch]:
    for experts in EXPERTS:
        logits = np.concatenate([make_logits(experts)] * 2)
        probabilities = [reference.probabilities(row)[0] for row in logits]
        for kind in RESIDENCIES:
            resident = make_residency(kind, experts)
            for b, protect, draft, r in product(B_BONUSES, PROTECTS, (False, True), R_BONUSES):
                policy = RoutingPolicy(b, r, protect, draft)
                yield Batch(logits, probabilities, resident, policy, (b, protect, draft, kind, experts))


def expected(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """ids and weights ``[24, K]`` of the reference."""
    rows = [
        reference.route_row(p, batch.resident, batch.policy, TOP_K, bool(draft))
        for p, draft in zip(batch.probabilities, DRAFT_ROWS, strict=True)
    ]
    weights = [reference.normalise(row.recovered, True, 1.0) for row in rows]
    return np.array([row.ids for row in rows]), np.array(weights)


def legacy_tables(policy: RoutingPolicy) -> NDArray[np.float32]:
    """The tables with the inverse factors of the earlier kernels: 1 on a tail that keeps r."""
    tables = policy.tables(TOP_K)
    if policy.moce_bonus <= 0:
        kinds = slice(None) if not policy.draft_moce else HEAD
        tables[kinds, INVERSE, max(1, policy.protect) :] = 1
    return tables


def compute(
    executor: Executor, batch: Batch, tables: NDArray[np.float32]
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    resident = None if batch.resident is None else mx.array(batch.resident)
    ids, weights = executor(mx.array(batch.logits), resident, tables, mx.array(DRAFT_ROWS), top_k=TOP_K)
    return np.array(ids), np.array(weights)


def run(names: list[str]) -> tuple[int, int, dict[str, Tally]]:
    """Cases, legacy failures, and a tally for each executor."""
    executors = {name: find_executor(name) for name in names}
    tallies = {name: Tally() for name in names}
    baselines: dict[tuple[object, ...], bytes] = {}
    cases = legacy_failures = 0
    batches = len(EXPERTS) * len(RESIDENCIES) * len(B_BONUSES) * len(R_BONUSES) * len(PROTECTS) * 2
    for batch in tqdm(grid(), total=batches, unit="batch", disable=not sys.stderr.isatty()):
        ids, weights = expected(batch)
        cases += len(ids)
        wrong_ids, wrong_weights = compute(select_ops, batch, legacy_tables(batch.policy))
        legacy_failures += int(_failed(wrong_ids, wrong_weights, ids, weights).sum())
        for name, executor in executors.items():
            start = time.perf_counter()
            got = compute(executor, batch, batch.policy.tables(TOP_K))
            tallies[name].seconds += time.perf_counter() - start
            failed = _failed(*got, ids, weights)
            tallies[name].failures += int(failed.sum())
            tallies[name].draft_row_failures += int(failed[DRAFT_ROWS].sum())
            same = (got[0] == ids).all(axis=1)
            error = float(np.abs(got[1] - weights)[same].max(initial=0.0))
            tallies[name].worst_error = max(tallies[name].worst_error, error)
            tallies[name].changed_without_r1 += _changed(name, batch, got, baselines)
    return cases, legacy_failures, tallies


def _failed(
    ids: NDArray[np.uint32],
    weights: NDArray[np.float32],
    true_ids: NDArray[np.int64],
    true_weights: NDArray[np.float64],
) -> NDArray[np.bool_]:
    off = ~(np.abs(weights - true_weights) <= TOLERANCE)  # a NaN is off
    failed: NDArray[np.bool_] = (ids != true_ids).any(axis=1) | off.any(axis=1)
    return failed


def _changed(
    name: str,
    batch: Batch,
    got: tuple[NDArray[np.uint32], NDArray[np.float32]],
    baselines: dict[tuple[object, ...], bytes],
) -> int:
    """How many rows that r may not touch differ in any bit from those of the batch with r = 1."""
    bits = np.concatenate([got[0], got[1].view(np.uint32)], axis=1)
    baseline = np.frombuffer(baselines.setdefault((name, *batch.without_r1), bits.tobytes()), np.uint32)
    untouchable = np.ones(len(bits), bool) if batch.policy.r1_bonus <= 0 else DRAFT_ROWS & batch.policy.draft_moce
    differs = (bits != baseline.reshape(bits.shape)).any(axis=1)
    return int((differs & untouchable).sum())


def find_executor(name: str) -> Executor:
    if name not in EXECUTORS:
        raise InputError(f"--executors: unknown {name!r}, expected some of {', '.join(EXECUTORS)}")
    return EXECUTORS[name]()


def main(argv: list[str] | None = None) -> int:
    """Prints the report; the exit code is 1 where an executor failed, 2 where the arguments are wrong."""
    parser = argparse.ArgumentParser(description="Routing executors against the float64 reference.")
    parser.add_argument("--executors", default="ops", help=f"comma-separated, of: {', '.join(EXECUTORS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        cases, legacy_failures, tallies = run(args.executors.split(","))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    report = {
        "cases": cases,
        "legacy_failures": legacy_failures,
        "executors": {name: vars(tally) for name, tally in tallies.items()},
        "seconds": round(time.perf_counter() - start, 1),
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"{cases:,} cases; the legacy recovery fails {legacy_failures:,} of them")
        for name, tally in tallies.items():
            print(f"{name}: {tally}")
    bad = any(t.failures or t.changed_without_r1 or t.worst_error > TOLERANCE for t in tallies.values())
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
