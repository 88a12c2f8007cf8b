"""Conformance of the retention policy: its decisions and its parser against an independent reference.

    python benchmarks/retention_decisions.py --json
    python -O benchmarks/retention_decisions.py

A decision is one retained length: of one sequence under one policy, on one draft path, taken at once (``retain``) or
candidate by candidate (``gate``). The reference decides whole arrays with NumPy and shares no code with the policy. The
parser is checked against values written down here. ``--sequences`` scales every kind; the default of 100,000 random
sequences (seed 12345) takes about 20 seconds.
"""

import argparse
import contextlib
import io
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import parser, table
from strata_mlx.errors import InputError
from strata_mlx.speculation.retention import CUMULATIVE_VARIABLE, PATHS, SCHEDULE_VARIABLE, RetentionPolicy

SEED, SEQUENCES = 12345, 100_000
INVALID = [math.nan, math.inf, -math.inf, -0.1, -5e-324, math.nextafter(1, 2), 2.0, 1e308]

PROBABILITIES = {
    "0": 0.0,
    "1": 1.0,
    "-0": 0.0,
    "+.5": 0.5,
    "1.": 1.0,
    "0.1": 0.1,
    "1e-3": 0.001,
    "2.5E-1": 0.25,
    "1e-400": 0.0,
    "0.9999999999999999": 0.9999999999999999,
    "  0.35\t": 0.35,
    "\r\n0.35\v\f": 0.35,
}
SCHEDULES = {
    **{text: (value,) for text, value in PROBABILITIES.items()},
    "0.10,0.35,0.55": (0.1, 0.35, 0.55),
    " 0.9 ,\t0.5,0.1\n": (0.9, 0.5, 0.1),
    "0,1,0,1,0,1,0,1": (0.0, 1.0) * 4,
}
MALFORMED = [
    *("", " ", "\t\n", "\u0660.\u0665", "\u00a00.5", "0.5\0", "0.5 0.5", "0.5;0.5", "0,5;1", "[0.5]", "None"),
    *("x", "0.5x", "p=0.5", "0x1", "0_1", "1_0", "--1", "+-1", "e1", "1e", "1e-", ".", "-", "true"),
    *("nan", "NaN", "inf", "-inf", "Infinity", "1e999", "-1e999", "-0.1", "-5e-324", "1.0000000000000002", "1.1", "2"),
]
MALFORMED_LISTS = [
    *(",", "0.5,", ",0.5", "0.5,,0.5", "0.5, ,0.5", "0.5,nan", "inf,0.5", "0.5,1.5", "-0.5,0.5", "0.5,x"),
    *("0.5 0.5,0.1", ",".join(["0.5"] * 9), ",".join(["0"] * 1000)),
]
MALFORMED_SCHEDULES = MALFORMED + MALFORMED_LISTS
MALFORMED_FLOORS = [*MALFORMED, "0.5,0.5", *MALFORMED_LISTS]


def reference(
    probs: NDArray[np.float64],
    lengths: NDArray[np.int64],
    min_p: NDArray[np.float64],
    schedules: list[tuple[float, ...] | None],
    min_cum_p: NDArray[np.float64],
) -> dict[str, NDArray[np.int64]]:
    """The retained lengths ``[N]`` on each path.

    probs: ``[N, K]``, whatever past each row's length. lengths, min_p, min_cum_p: ``[N]``; schedules: one per row.
    """
    steps = np.arange(probs.shape[1])
    floors = np.array(
        [
            np.full(steps.size, floor) if schedule is None else np.take(schedule, steps, mode="clip")
            for floor, schedule in zip(min_p, schedules, strict=True)
        ]
    ).reshape(probs.shape)
    new = np.array([schedule is not None for schedule in schedules], bool) | (min_cum_p != 0)
    with np.errstate(all="ignore"):
        high_enough = probs >= floors
        sound = np.isfinite(probs) & (probs >= 0) & (probs <= 1)
        likely = np.multiply.accumulate(probs, axis=1) >= min_cum_p[:, None]
    passes = (high_enough & (sound & likely | ~new[:, None])) & (steps < lengths[:, None])
    chained = np.where(passes.all(axis=1), steps.size, (~passes).argmax(axis=1))
    return {"chained": chained, "stepwise": np.where(new, chained, np.minimum(chained + 1, lengths))}


@dataclass(frozen=True)
class Batch:
    """Sequences of one kind, each with its policy."""

    kind: str
    probs: NDArray[np.float64]  # [N, K]
    lengths: NDArray[np.int64]  # [N]
    policies: list[RetentionPolicy]

    def expected(self) -> dict[str, NDArray[np.int64]]:
        min_p, min_cum_p = (np.array([getattr(p, name) for p in self.policies]) for name in ("min_p", "min_cum_p"))
        return reference(self.probs, self.lengths, min_p, [p.schedule for p in self.policies], min_cum_p)


def batches(sequences: int) -> Iterator[Batch]:
    """Every kind of decision; the first four share their random sequences."""
    rng = np.random.default_rng(SEED)
    probs, lengths = _sequences(rng, sequences, 8)
    for kind in ("plain", "schedule", "cumulative", "both"):
        yield Batch(kind, probs, lengths, _policies(rng, kind, sequences))
    few = sequences // 5
    for kind in ("plain", "schedule", "cumulative", "both"):
        broken = probs[:few].copy()
        broken[np.arange(few), rng.integers(0, 8, few)] = rng.choice(INVALID, few)
        yield Batch("invalid observations", broken, lengths[:few], _policies(rng, kind, few))
    yield from _boundaries(*_sequences(rng, few, 8))
    yield Batch("repeat-last", *_sequences(rng, sequences // 2, 16), _policies(rng, "schedule", sequences // 2))


def _sequences(rng: np.random.Generator, count: int, steps: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Probabilities ``[count, steps]``, half of the rows in tenths so that many are equal, and lengths ``[count]``."""
    probs = rng.random((count, steps)) ** rng.choice([0.2, 1.0], (count, 1))
    probs[::2] = np.round(probs[::2] * 10) / 10
    return probs, rng.integers(0, steps + 1, count)


def _policies(rng: np.random.Generator, kind: str, count: int) -> list[RetentionPolicy]:
    def policy() -> RetentionPolicy:
        floors = np.round(rng.random(9) ** 2, rng.choice([1, 1, 12]))
        schedule = tuple(floors[: rng.integers(1, 9)]) if kind in ("schedule", "both") else None
        return RetentionPolicy(floors[8], schedule, max(floors[0], 1e-3) if kind in ("cumulative", "both") else 0.0)

    return [policy() for _ in range(count)]


def _boundaries(probs: NDArray[np.float64], lengths: NDArray[np.int64]) -> Iterator[Batch]:
    """Floors that some candidate meets exactly, and the next double on either side of them."""
    last = np.maximum(lengths - 1, 0)
    rows = np.arange(len(probs))
    products = np.multiply.accumulate(probs, axis=1)[rows, last]
    for towards in (None, 0.0, 1.0):

        def near(values: NDArray[np.float64], towards: float | None = towards) -> NDArray[np.float64]:
            return values if towards is None else np.nextafter(values, towards)

        for policies in (
            [RetentionPolicy(floor) for floor in near(probs[rows, last])],
            [RetentionPolicy(schedule=tuple(floors)) for floors in near(probs)],
            [RetentionPolicy(min_cum_p=floor) for floor in near(products)],
            [RetentionPolicy(0, tuple(p), floor) for p, floor in zip(probs, near(products), strict=True)],
        ):
            yield Batch("equal boundaries", probs, lengths, policies)


def count_differences(batch: Batch) -> tuple[int, int]:
    """Decisions of a batch, and how many of them are not the reference's."""
    expected = {path: lengths.tolist() for path, lengths in batch.expected().items()}
    decisions = differences = 0
    for i, (row, length, policy) in enumerate(
        zip(batch.probs.tolist(), batch.lengths.tolist(), batch.policies, strict=True)
    ):
        for path in PATHS:
            for decide in (RetentionPolicy.retain, one_by_one):
                decisions += 1
                differences += decide(policy, row[:length], path) != expected[path][i]
    return decisions, differences


def one_by_one(policy: RetentionPolicy, probs: list[float], path: str) -> int:
    """As stepwise drafting asks: what is recorded must be what the gate counts, and nothing may follow a stop."""
    gate = policy.gate(path)
    recorded = [gate.offer(p) for p in probs]
    return sum(recorded) if recorded == [i < gate.kept for i in range(len(probs))] else -1


def check_parser() -> Counter[str]:
    """Settings accepted and rejected in the environment and as flags, and differences from what they should be."""
    counts: Counter[str] = Counter(accepted=0, rejected=0, differences=0)
    names = {SCHEDULE_VARIABLE: "--spec-min-p-schedule", CUMULATIVE_VARIABLE: "--spec-min-cum-p"}
    good: list[tuple[str, str, RetentionPolicy]] = [
        *((SCHEDULE_VARIABLE, text, RetentionPolicy(0.35, value)) for text, value in SCHEDULES.items()),
        *((CUMULATIVE_VARIABLE, text, RetentionPolicy(0.35, None, value)) for text, value in PROBABILITIES.items()),
    ]
    for variable, text, policy in good:
        for read, lines in (_from_env({variable: text}), _from_flags(names[variable], text)):
            counts["accepted"] += 1
            counts["differences"] += (read, lines) != (policy, 0)
    bad = [
        *((SCHEDULE_VARIABLE, text, (CUMULATIVE_VARIABLE, "0.25")) for text in MALFORMED_SCHEDULES),
        *((CUMULATIVE_VARIABLE, text, (SCHEDULE_VARIABLE, "0.1,0.35")) for text in MALFORMED_FLOORS),
    ]
    for variable, text, (other, fine) in bad:
        for environ in ({variable: text}, {variable: text, other: fine}, {variable: text, other: "x"}):
            counts["rejected"] += 1
            counts["differences"] += _from_env(environ) != (RetentionPolicy(0.35), 1)
        counts["rejected"] += 1
        counts["differences"] += _from_flags(names[variable], text) != (None, 0)
    return counts


def _from_env(environ: dict[str, str]) -> tuple[RetentionPolicy, int]:
    """The policy, and the lines of its diagnostics."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        policy = RetentionPolicy.from_env(0.35, environ)
    return policy, len(stderr.getvalue().splitlines())


def _from_flags(flag: str, text: str) -> tuple[RetentionPolicy | None, int]:
    """The policy, or None where the flag is an error."""
    flags = argparse.ArgumentParser()
    RetentionPolicy.add_arguments(flags)
    try:
        return RetentionPolicy.from_args(flags.parse_args(["--spec-min-p=0.35", f"{flag}={text}"]), {}), 0
    except InputError:
        return None, 0


def main(argv: list[str] | None = None) -> int:
    """Prints the counts; the exit code is 1 where anything differs."""
    arguments = parser(__doc__)
    arguments.add_argument("--sequences", type=int, default=SEQUENCES, help=f"random sequences (default {SEQUENCES:,})")
    args = arguments.parse_args(argv)
    start = time.perf_counter()
    kinds: dict[str, Counter[str]] = {}
    for batch in batches(args.sequences):
        decisions, differences = count_differences(batch)
        kinds.setdefault(batch.kind, Counter()).update(decisions=decisions, differences=differences)
    parsed = check_parser()
    total: Counter[str] = sum(kinds.values(), Counter(decisions=0))
    different = total["differences"] + parsed["differences"]
    report = {
        "decisions": total["decisions"],
        "differences": different,
        "kinds": {kind: dict(counts) for kind, counts in kinds.items()},
        "parser": dict(parsed),
        "optimized": sys.flags.optimize,
        "seconds": round(time.perf_counter() - start, 1),
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(table(({"kind": kind, **counts} for kind, counts in kinds.items()), ["kind", "decisions", "differences"]))
        print(f"{total['decisions']:,} decisions; parser: {parsed['accepted']} accepted, {parsed['rejected']} rejected")
        print(f"{different} differences in {report['seconds']} s, python -O: {sys.flags.optimize > 0}")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
