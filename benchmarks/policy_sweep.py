"""Which drafts should be verified? Every kind of policy on held-out recordings, in virtual time, on four storages.

    python benchmarks/policy_sweep.py [--json] [--recording FILE] [--costs FILE]

One half of the documents tunes: it fits the calibration, tells what rounds cost and picks the best policy of each kind.
The other half judges. Among the fixed policies is also the best in hindsight, which only the judging half could have
told. Unless all experts are in memory, a quarter of them are. The oracle knows the text: it makes and verifies just
drafts that will be accepted, as many as pay. Intervals are the middle 95 % over documents drawn with replacement.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from benchmarks.calibration import add_recording_options, recorded
from strata_mlx import load
from strata_mlx.intervals import interval, resampled
from strata_mlx.models.family import text_args
from strata_mlx.replay.costs import STORAGES, Clock, CostModel, Probe, Storage, fit
from strata_mlx.replay.recording import Recording
from strata_mlx.replay.replayer import replay
from strata_mlx.replay.sweep import Oracle, Way, halves, ways
from strata_mlx.replay.tuning import calibrate, tune
from strata_mlx.speculation.retention import PATHS

LIMIT = 0.98  # of the best fixed policy's speed, that the economic one must reach on every storage
SHARE = 0.25  # of the experts are in memory, where not all are
Speeds = NDArray[np.float64]  # [D, 2], tokens and seconds of each document


class Ledger(CostModel):
    """Keeps the time by several storages at once, since a fixed policy does the same on all of them."""

    def __init__(self, costs: CostModel, storages: Sequence[Storage | None]):
        super().__init__(**{field.name: getattr(costs, field.name) for field in fields(CostModel)})
        object.__setattr__(self, "storages", storages)
        object.__setattr__(self, "rounds", [])

    storages: Sequence[Storage | None]
    rounds: list[Any]  # for each, [storages] seconds

    def clock(self, streamed: bool, storage: Storage | None = None) -> Clock:  # noqa: ARG002
        clocks = [CostModel.clock(self, streamed, storage) for storage in self.storages]
        return _Clocks(clocks, self.rounds)


class _Clocks(Clock):
    """Notes what each clock says, and shows the first."""

    def __init__(self, clocks: Sequence[Clock], rounds: list[Any]):
        self._clocks, self._rounds = clocks, rounds
        self._drafting: Any = 0.0

    def verify(self, rows: int, counts: Any, *, ahead: bool, replayed: bool) -> float:
        seconds = np.array([each.verify(rows, counts, ahead=ahead, replayed=replayed) for each in self._clocks])
        self._rounds.append(seconds + self._drafting)
        self._drafting = 0.0
        return float(seconds[0])

    def draft(self, drafts: int, committed: int, counts: Any) -> float:
        self._drafting = np.array([each.draft(drafts, committed, counts) for each in self._clocks])
        return float(self._drafting[0])


def speeds(recording: Recording, way: Way, costs: CostModel, slots: int | None, storages: Any) -> list[Speeds]:
    """Of a fixed policy, by storage."""
    ledger = Ledger(costs, storages)
    replayed = replay(recording, way.retention, ledger, steps=way.steps, drafting=way.drafting, slots=slots)
    later = np.diff(replayed.document, prepend=-1) == 0
    result = []
    for number in range(len(storages)):
        each = np.zeros((len(recording.documents), 2))
        committed = [r.committed for r in replayed.rounds]
        seconds = [seconds[number] for seconds in ledger.rounds]
        np.add.at(each, replayed.document[later], np.stack([committed, seconds], axis=1)[later])
        result.append(each)
    return result


def sweep(args: Any, recording: Recording, costs: CostModel) -> list[dict[str, Any]]:
    """For each storage: what every policy came to."""
    tuning, judging = halves(recording)
    calibration, most = calibrate(tuning), recording.header.steps
    fixed_ways = ways(most)
    slots = round(args.share * recording.header.experts)
    groups: list[tuple[int | None, tuple[Storage | None, ...]]] = [(None, (None,)), (slots, STORAGES)]
    result = []
    with tqdm(total=len(groups) * 2 * len(fixed_ways), desc="Sweep", unit="policy", disable=None) as bar:
        for memory, storages in groups:
            measured: list[list[list[Speeds]]] = []  # [half][way][storage]
            for half in (tuning, judging):
                measured.append([])
                for way in fixed_ways:
                    measured[-1].append(speeds(half, way, costs, memory, storages))
                    bar.update()
            for number, storage in enumerate(storages):
                options: dict[str, Any] = {"slots": memory, "storage": storage}
                policy = tune(tuning, costs, calibration, **options)
                paths = {
                    path: replay(tuning, policy, costs, drafting=path, **options).tokens_per_second for path in PATHS
                }
                path = max(paths, key=lambda path: paths[path])
                economic = replay(judging, policy, costs, drafting=path, **options).by_document()
                oracle = replay(judging, Oracle(judging, policy), costs, **options).by_document()
                fixed = [[each[number] for each in half] for half in measured]
                entry = compare(fixed_ways, fixed[0], fixed[1], economic, oracle)
                name = storage.name if storage else "resident"
                result.append({"storage": name, "economic": {"drafting": path, **asdict(policy)}, **entry})
    return result


def compare(
    fixed: Sequence[Way], tuned: list[Speeds], judged: list[Speeds], economic: Speeds, oracle: Speeds
) -> dict[str, Any]:
    """One storage. tuned, judged: of each way, on either half."""
    best = max(range(len(fixed)), key=lambda i: rate(judged[i]))
    plain = judged[0]
    rows = []
    for kind in dict.fromkeys(way.kind for way in fixed):
        chosen = max((i for i in range(len(fixed)) if fixed[i].kind == kind), key=lambda i: rate(tuned[i]))
        rows.append(row(kind, str(fixed[chosen]), judged[chosen], plain))
    rows.append(row("best in hindsight", str(fixed[best]), judged[best], plain))
    rows.append(row("economic", "", economic, plain))
    rows.append(row("oracle", "", oracle, plain))
    chosen = max(range(len(fixed)), key=lambda i: rate(tuned[i]))
    return {
        "rows": rows,
        "economic_of_best": rate(economic) / rate(judged[best]),
        "economic_of_best_interval": interval_of(economic, judged[best]),
        "economic_of_tuned": rate(economic) / rate(judged[chosen]),
        "economic_of_tuned_interval": interval_of(economic, judged[chosen]),
        "oracle_gain_reached": share(rate(economic) - rate(plain), rate(oracle) - rate(plain)),
        "oracle_gain_of_best": share(rate(judged[best]) - rate(plain), rate(oracle) - rate(plain)),
    }


def row(kind: str, name: str, made: Speeds, plain: Speeds) -> dict[str, Any]:
    return {
        "kind": kind,
        "policy": name,
        "tokens_per_s": rate(made),
        "tokens_per_s_interval": interval_of(made),
        "speedup": rate(made) / rate(plain),
        "speedup_interval": interval_of(made, plain),
    }


def share(gain: float, of: float) -> float | None:
    """None where even the oracle gains nothing."""
    return gain / of if of > 1e-9 else None


def rate(made: Speeds) -> float:
    """Tokens per second."""
    tokens, seconds = made.sum(axis=0)
    return float(tokens / seconds)


def interval_of(made: Speeds, against: Speeds | None = None) -> list[float]:
    """Of the rate, or of its ratio to another one on the same documents."""
    drawn = resampled(made)
    rates = drawn[:, 0] / drawn[:, 1]
    if against is not None:
        others = resampled(against)
        rates = rates / (others[:, 0] / others[:, 1])
    return list(interval(rates))


def measured(args: Any) -> CostModel:
    """What rounds cost here: from ``--costs``, or measured."""
    if args.costs and args.costs.exists():
        return CostModel.load(args.costs)
    probes = []
    for slots in (False, True):
        model, tokenizer = load(args.model, mtp=True)
        if slots:
            model, tokenizer = load(args.model, mtp=True, slots=round(args.share * text_args(model).num_experts))
        probe = Probe(model)
        prompts = heldout.windows(tokenizer, 9, 32)
        probe.run(prompts[0], args.probe_tokens, 1)  # warms up
        probe.samples.clear()
        for number in tqdm(range(args.probes), desc="Costs", unit="run", disable=None):
            probe.run(prompts[number % 9], args.probe_tokens)
        probes.append(probe)
    costs = fit(*probes)
    if args.costs:
        costs.save(args.costs)
    return costs


def run(args: Any) -> dict[str, Any]:
    recording = recorded(args)
    costs = measured(args)
    storages = sweep(args, recording, costs)
    return {
        "smallest_of_best": min(each["economic_of_best"] for each in storages),
        "limit": LIMIT,
        "storages": storages,
        "documents": len(recording.documents),
        "positions": recording.positions,
        "in_memory": args.share,
        "costs": asdict(costs),
        "device": mx.default_device().type.name,
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "scikit-learn")},
    }


def main() -> int:
    """Prints tables; the exit code is 1 where the economic policy misses the limit."""
    parser = report.parser(__doc__)
    add_recording_options(parser)
    parser.add_argument("--costs", type=Path, help="where to keep what rounds cost, or to find it again")
    parser.add_argument("--probes", type=int, default=32, help="runs that measure costs")
    parser.add_argument("--probe-tokens", type=int, default=48, help="tokens of each of them")
    parser.add_argument("--share", type=float, default=SHARE, help="of the experts that are in memory, when streaming")
    args = parser.parse_args()
    result = run(args)
    if not report.publish(result, args):
        for each in result["storages"]:
            low, high = each["economic_of_best_interval"]
            print(f"\n{each['storage']}: economic at {each['economic_of_best']:.3f} ({low:.3f}-{high:.3f}) of the best")
            reached = each["oracle_gain_reached"]
            print("not even the oracle gains" if reached is None else f"{reached:.0%} of what the oracle gains")
            print(report.table(each["rows"], ("kind", "tokens_per_s", "speedup", "policy")))
    return 0 if result["smallest_of_best"] >= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
