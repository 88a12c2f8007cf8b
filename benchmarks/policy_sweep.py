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
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from benchmarks.calibration import add_recording_options, halves, recorded
from strata_mlx import RetentionPolicy, load
from strata_mlx.models.family import text_args
from strata_mlx.replay.costs import STORAGES, Clock, CostModel, Probe, Storage, fit
from strata_mlx.replay.recording import Document, Recording
from strata_mlx.replay.replayer import replay
from strata_mlx.replay.tuning import PLAIN, calibrate, tune
from strata_mlx.speculation.economic import EconomicPolicy
from strata_mlx.speculation.record import Round
from strata_mlx.speculation.retention import PATHS, FloorGate, Retention

LIMIT = 0.98  # of the best fixed policy's speed, that the economic one must reach on every storage
SHARE = 0.25  # of the experts are in memory, where not all are
_RESAMPLES = 2000
Speeds = NDArray[np.float64]  # [D, 2], tokens and seconds of each document

SCHEDULES = ((0.10, 0.35, 0.55), (0.30, 0.55, 0.70), (0.50, 0.70, 0.85))


@dataclass(frozen=True)
class Way:
    """A policy, the most drafts of a round, and how they are made."""

    kind: str
    retention: Retention
    steps: int
    drafting: str = "chained"

    def __str__(self) -> str:
        return f"{self.retention}, {self.steps} at most, {self.drafting}"


def fixed_ways(most: int) -> list[Way]:
    """The grids."""
    grid: list[tuple[str, RetentionPolicy, Sequence[int]]] = [
        *(("flat", RetentionPolicy(p), (1, 2, 3, most)) for p in (0.0, 0.35, 0.5, 0.65, 0.8)),
        *(("schedule", RetentionPolicy(schedule=floors), (3, most)) for floors in SCHEDULES),
        *(("cumulative", RetentionPolicy(min_cum_p=p), (2, 3, most)) for p in (0.1, 0.2, 0.3, 0.45, 0.6, 0.75)),
        *(
            ("composed", RetentionPolicy(schedule=floors, min_cum_p=p), (3, most))
            for floors in SCHEDULES[:2]
            for p in (0.2, 0.4)
        ),
    ]
    # Where all drafts are kept, or there is but one, making them one by one saves nothing.
    return [Way("plain", PLAIN, most)] + [
        Way(kind, policy, steps, drafting)
        for kind, policy, depths in grid
        for steps in depths
        for drafting in (PATHS if steps > 1 and policy != RetentionPolicy() else PATHS[:1])
    ]


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


class Oracle(RetentionPolicy):
    """Makes so many drafts as pay, of those that will be accepted. For documents in the order of the recording."""

    def __init__(self, recording: Recording, policy: EconomicPolicy):
        super().__init__()
        cost = np.array([policy.plain_seconds, *np.add(policy.draft_seconds, policy.verify_seconds[1:])])
        rate, better = 0.0, True
        while better:  # as economics.best_rate()
            plans = [_plan(document, cost, rate) for document in recording.documents]
            ks = np.concatenate([np.array(plan, np.intp) for plan in plans])
            new = float((1 + ks).sum() / cost[ks].sum())
            rate, better = max(rate, new), new > rate * (1 + 1e-9)
        object.__setattr__(self, "_plans", iter(plans))

    def start(self) -> Any:
        return _OracleController(next(self._plans))  # type: ignore[attr-defined]


def _plan(document: Document, cost: NDArray[np.float64], rate: float) -> list[int]:
    """How many drafts each round makes."""
    right = np.cumprod(document.agree, axis=1).sum(axis=1)
    worth = np.arange(1, len(cost) + 1) - rate * cost
    plan, position = [], 0
    while position < document.positions:
        most = min(int(right[position]), document.positions - position - 1)
        plan.append(int(np.argmax(worth[: most + 1])))
        position += 1 + plan[-1]
    return plan


class _OracleController:
    def __init__(self, plan: list[int]):
        self._plan, self._known = plan, 0

    def depth(self, most: int) -> int:
        return min(self._plan[self._known], most) if self._known < len(self._plan) else 0

    def gate(self, path: str = "chained") -> FloorGate:
        return RetentionPolicy().gate(path)

    def learn(self, latest: Round) -> None:  # noqa: ARG002
        self._known += 1


def sweep(args: Any, recording: Recording, costs: CostModel) -> list[dict[str, Any]]:
    """For each storage: what every policy came to."""
    tuning, judging = halves(recording)
    calibration, most = calibrate(tuning), recording.header.steps
    ways = fixed_ways(most)
    slots = round(args.share * recording.header.experts)
    groups: list[tuple[int | None, tuple[Storage | None, ...]]] = [(None, (None,)), (slots, STORAGES)]
    result = []
    with tqdm(total=len(groups) * 2 * len(ways), desc="Sweep", unit="policy", disable=None) as bar:
        for memory, storages in groups:
            measured: list[list[list[Speeds]]] = []  # [half][way][storage]
            for half in (tuning, judging):
                measured.append([])
                for way in ways:
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
                entry = compare(ways, fixed[0], fixed[1], economic, oracle)
                name = storage.name if storage else "resident"
                result.append({"storage": name, "economic": {"drafting": path, **asdict(policy)}, **entry})
    return result


def compare(
    ways: Sequence[Way], tuned: list[Speeds], judged: list[Speeds], economic: Speeds, oracle: Speeds
) -> dict[str, Any]:
    """One storage. tuned, judged: of each way, on either half."""
    best = max(range(len(ways)), key=lambda i: rate(judged[i]))
    plain = judged[0]
    rows = []
    for kind in dict.fromkeys(way.kind for way in ways):
        chosen = max((i for i in range(len(ways)) if ways[i].kind == kind), key=lambda i: rate(tuned[i]))
        rows.append(row(kind, str(ways[chosen]), judged[chosen], plain))
    rows.append(row("best in hindsight", str(ways[best]), judged[best], plain))
    rows.append(row("economic", "", economic, plain))
    rows.append(row("oracle", "", oracle, plain))
    chosen = max(range(len(ways)), key=lambda i: rate(tuned[i]))
    return {
        "rows": rows,
        "economic_of_best": rate(economic) / rate(judged[best]),
        "economic_of_best_interval": interval(economic, judged[best]),
        "economic_of_tuned": rate(economic) / rate(judged[chosen]),
        "economic_of_tuned_interval": interval(economic, judged[chosen]),
        "oracle_gain_reached": share(rate(economic) - rate(plain), rate(oracle) - rate(plain)),
        "oracle_gain_of_best": share(rate(judged[best]) - rate(plain), rate(oracle) - rate(plain)),
    }


def row(kind: str, name: str, made: Speeds, plain: Speeds) -> dict[str, Any]:
    return {
        "kind": kind,
        "policy": name,
        "tokens_per_s": rate(made),
        "tokens_per_s_interval": interval(made),
        "speedup": rate(made) / rate(plain),
        "speedup_interval": interval(made, plain),
    }


def share(gain: float, of: float) -> float | None:
    """None where even the oracle gains nothing."""
    return gain / of if of > 1e-9 else None


def rate(made: Speeds) -> float:
    """Tokens per second."""
    tokens, seconds = made.sum(axis=0)
    return float(tokens / seconds)


def interval(made: Speeds, against: Speeds | None = None) -> list[float]:
    """Of the rate, or of its ratio to another one on the same documents."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(made), (_RESAMPLES, len(made)))
    rates = made[drawn].sum(axis=1)
    values = rates[:, 0] / rates[:, 1]
    if against is not None:
        others = against[drawn].sum(axis=1)
        values = values / (others[:, 0] / others[:, 1])
    return [float(value) for value in np.quantile(values, [0.025, 0.975])]


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
