"""Which way to decode is fastest: every kind of policy on a recording, chosen on one half, judged on the other.

The halves are of documents. Fixed policies of each kind come from a grid; the economic one is made of the fit half.
The oracle knows the text: no policy can do better than it, at the costs that a round has on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..errors import InputError
from ..experts.eviction import DEFAULT_EVICTION
from ..intervals import interval, resampled
from ..speculation.calibration import Calibration
from ..speculation.decoder import default_steps
from ..speculation.economic import EconomicPolicy
from ..speculation.fitting import Floats, Trials, brier, calibration_error, reliability
from ..speculation.pacing import Pacer
from ..speculation.record import Round
from ..speculation.retention import PATHS, FloorGate, Retention, RetentionPolicy
from .costs import Clock, CostModel, Storage
from .recording import Document, Recording
from .replayer import Counts, Replayed, replay
from .tuning import PLAIN, calibrate, trials_of, tune

SCHEDULES = ((0.10, 0.35, 0.55), (0.30, 0.55, 0.70), (0.50, 0.70, 0.85))
KINDS = ("plain", "flat", "schedule", "cumulative", "composed", "economic")  # of which one is chosen
_PREFERENCE = 0.99  # of the best rate that the economic policy must reach to be chosen, since it follows each text


@dataclass(frozen=True)
class Way:
    """A policy, the most drafts of a round, and how they are made."""

    kind: str
    retention: Retention
    steps: int
    drafting: str = "chained"

    def __str__(self) -> str:
        if self.kind in ("plain", "oracle", "default"):
            return str(self.retention)
        drafts = "1 draft" if self.steps == 1 else f"up to {self.steps} drafts"
        return f"{'economic' if self.kind == 'economic' else self.retention}, {drafts}, {self.drafting}"


@dataclass(frozen=True)
class Machine:
    """What is replayed on. slots: as of replay(); None is everything in memory. storage: None is as measured."""

    costs: CostModel
    slots: int | Sequence[int] | None = None
    eviction: str = DEFAULT_EVICTION
    storage: Storage | None = None

    @property
    def options(self) -> dict[str, Any]:
        """For replay()."""
        return {"slots": self.slots, "eviction": self.eviction, "storage": self.storage}


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a way came to. reading: of the seconds after each document's first round, those of waiting for experts."""

    way: Way
    replayed: Replayed
    reading: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.replayed.tokens_per_second


@dataclass(frozen=True, eq=False)
class Swept:
    """calibration: of the fit half. chosen: the way that was fastest there. rows: by kind, what was fastest there came
    to on the held-out half, ready for JSON. pays: whether the chosen way beats plain decoding on the held-out half,
    interval and all. reliability: of the calibration, on the held-out half, by chain position and "all".
    """

    calibration: Calibration
    chosen: Way
    rows: list[dict[str, Any]]
    pays: bool
    reliability: list[dict[str, Any]]

    def row(self, kind: str) -> dict[str, Any]:
        return next(row for row in self.rows if row["kind"] == kind)


def ways(most: int) -> list[Way]:
    """Plain decoding, and the grids of fixed policies."""
    flat, cumulative = (0.0, 0.35, 0.5, 0.65, 0.8), (0.1, 0.2, 0.3, 0.45, 0.6, 0.75)
    grid: list[tuple[str, RetentionPolicy, Sequence[int]]] = [
        *(("flat", RetentionPolicy(p), (1, 2, 3, most)) for p in flat),
        *(("schedule", RetentionPolicy(schedule=floors), (3, most)) for floors in SCHEDULES),
        *(("cumulative", RetentionPolicy(min_cum_p=p), (2, 3, most)) for p in cumulative),
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
        for steps in sorted({min(depth, most) for depth in depths})
        for drafting in (PATHS if steps > 1 and policy != RetentionPolicy() else PATHS[:1])
    ]


def replays(most: int) -> int:
    """How many ways sweep() replays, each of which it reports."""
    return len(ways(most)) + len(PATHS) + len(KINDS) + 2


def halves(recording: Recording) -> tuple[Recording, Recording]:
    """Every other document. Raises InputError where there is but one."""
    count = len(recording.documents)
    if count < 2:
        raise InputError(f"a recording of {count} document has no half to judge by; record at least two")
    return recording.of(range(0, count, 2)), recording.of(range(1, count, 2))


def sweep(recording: Recording, machine: Machine, report: Callable[[], object] = lambda: None) -> Swept:
    """Choose on one half, judge on the other. report: called after each of ``replays()``.

    Raises InputError where there are too few documents, or scikit-learn is not installed.
    """
    fit, held = halves(recording)
    calibration, most = calibrate(fit), recording.header.steps
    best: dict[str, tuple[float, Way]] = {}
    for way in [*ways(most), *economic(fit, machine, calibration)]:
        rate = run(fit, way, machine).rate
        report()
        if way.kind not in best or rate > best[way.kind][0]:
            best[way.kind] = rate, way
    chosen = choose(best)
    policy = best["economic"][1].retention
    assert isinstance(policy, EconomicPolicy)
    judged = [way for _, way in best.values()]
    judged += [Way("default", AsItPays(), default_steps()), Way("oracle", Oracle(held, policy), most)]
    outcomes = []
    for way in judged:
        outcomes.append(run(held, way, machine))
        report()
    plain = next(each for each in outcomes if each.way.kind == "plain")
    rows = [_row(each, plain) for each in outcomes]
    pays = chosen.kind != "plain" and next(r for r in rows if r["kind"] == chosen.kind)["speedup_interval"][0] > 1
    return Swept(calibration, chosen, rows, pays, judge(held, calibration))


def choose(best: dict[str, tuple[float, Way]]) -> Way:
    """The fastest; the economic one where it is as good as that."""
    fastest = max(rate for rate, _ in best.values())
    rate, way = best["economic"]
    if rate >= _PREFERENCE * fastest:
        return way
    return next(way for rate, way in best.values() if rate == fastest)


def economic(fit: Recording, machine: Machine, calibration: Calibration) -> Iterator[Way]:
    """The economic policy, by either path of drafting."""
    policy = tune(fit, machine.costs, calibration, **machine.options)
    return (Way("economic", policy, policy.steps, path) for path in PATHS)


def run(recording: Recording, way: Way, machine: Machine) -> Outcome:
    """Replay one way."""
    noting = _NotingCosts.of(machine.costs)
    replayed = replay(recording, way.retention, noting, steps=way.steps, drafting=way.drafting, **machine.options)
    later = np.diff(replayed.document, prepend=-1) == 0
    return Outcome(way, replayed, float(np.array(noting.clocks[0].reading)[later].sum()))


def judge(held: Recording, calibration: Calibration) -> list[dict[str, Any]]:
    """How reliable raw confidence and ``calibration`` are, by chain position and for all."""
    data = trials_of(held)
    predicted = data.predicted(calibration)
    rows = []
    for position in range(held.header.steps):
        mask = data.position == position
        if mask.any():
            rows.append(_reliability(position, data.where(mask), predicted[mask]))
    return [*rows, _reliability("all", data, predicted)]


def _reliability(position: int | str, data: Trials, predicted: Floats) -> dict[str, Any]:
    raw, fitted = reliability(data.p, data.accepted), reliability(predicted, data.accepted)
    return {
        "position": position,
        "trials": len(data.p),
        "accepted": float(data.accepted.mean()),
        "confidence": float(data.p.mean()),
        "calibrated": float(predicted.mean()),
        "ece_raw": calibration_error(raw),
        "ece_fitted": calibration_error(fitted),
        "brier_raw": brier(data.p, data.accepted),
        "brier_fitted": brier(predicted, data.accepted),
        "bins_raw": [each._asdict() for each in raw],
        "bins_fitted": [each._asdict() for each in fitted],
    }


def _row(outcome: Outcome, plain: Outcome) -> dict[str, Any]:
    """With intervals over documents; those of the speedup compare the same documents."""
    totals, way = outcome.replayed.to_dict(), outcome.way
    made, others = (resampled(each.replayed.by_document()) for each in (outcome, plain))
    rates, plain_rates = made[:, 0] / made[:, 1], others[:, 0] / others[:, 1]
    tokens, rounds = max(totals["tokens"], 1), max(len(outcome.replayed.later), 1)
    drafting = totals["draft_seconds"] + totals["commit_seconds"]
    return {
        "kind": way.kind,
        "policy": str(way),
        "steps": way.steps,
        "drafting": way.drafting,
        "tokens_per_s": outcome.rate,
        "tokens_per_s_interval": list(interval(rates)),
        "speedup": outcome.rate / plain.rate,
        "speedup_interval": list(interval(rates / plain_rates)),
        "tokens_per_round": tokens / rounds,
        "drafted_per_token": totals["drafted"] / tokens,
        "retained_per_token": totals["retained"] / tokens,
        "accepted_share": totals["accepted"] / totals["retained"] if totals["retained"] else None,
        "misses_per_token": totals["misses"] / tokens,
        "ms_per_token": {
            "draft": 1e3 * drafting / tokens,
            "verify": 1e3 * totals["verify_seconds"] / tokens,
            "reading": 1e3 * outcome.reading / tokens,
        },
    }


class AsItPays(RetentionPolicy):
    """All drafts as long as they pay by the clock, as generate does by default."""

    def start(self) -> Any:
        return _PacedController()

    def __str__(self) -> str:
        return "drafts as long as they pay (--mtp auto)"


class _PacedController:
    keeps_all = True

    def __init__(self) -> None:
        self._pacer, self._drafted = Pacer(), False

    def depth(self, most: int) -> int:
        return most if self._pacer.drafting else 0

    def gate(self, path: str = "chained") -> FloorGate:
        return RetentionPolicy().gate(path)

    def learn(self, latest: Round) -> None:
        if latest.drafted:
            self._pacer.round(latest.seconds, latest.committed)
        elif self._drafted:
            self._pacer.change(latest.seconds)
        else:
            self._pacer.step(latest.seconds)
        self._drafted = bool(latest.drafted)


class Oracle(RetentionPolicy):
    """Makes so many drafts as pay, of those that will be accepted. For documents in the order of the recording."""

    def __init__(self, recording: Recording, policy: EconomicPolicy):
        super().__init__()
        cost = np.array([policy.plain_seconds, *np.add(policy.draft_seconds, policy.verify_seconds[1:])])
        rate, better, plans = 0.0, True, list[list[int]]()
        while better:  # as economics.best_rate()
            plans = [_plan(document, cost, rate) for document in recording.documents]
            drafts = np.concatenate([np.array(plan, np.intp) for plan in plans])
            new = float((1 + drafts).sum() / cost[drafts].sum())
            rate, better = max(rate, new), new > rate * (1 + 1e-9)
        object.__setattr__(self, "_plans", iter(plans))

    def start(self) -> Any:
        return _OracleController(next(self._plans))  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return "knows the text"


def _plan(document: Document, cost: Floats, rate: float) -> list[int]:
    """How many drafts each round makes."""
    right = np.cumprod(document.agree, axis=1).sum(axis=1)
    worth = np.arange(1, len(cost) + 1) - rate * cost
    plan, position = list[int](), 0
    while position < document.positions:
        most = min(int(right[position]), document.positions - position - 1)
        plan.append(int(np.argmax(worth[: most + 1])))
        position += 1 + plan[-1]
    return plan


class _OracleController:
    keeps_all = True

    def __init__(self, plan: list[int]):
        self._plan, self._known = plan, 0

    def depth(self, most: int) -> int:
        return min(self._plan[self._known], most) if self._known < len(self._plan) else 0

    def gate(self, path: str = "chained") -> FloorGate:
        return RetentionPolicy().gate(path)

    def learn(self, latest: Round) -> None:  # noqa: ARG002
        self._known += 1


class _NotingCosts(CostModel):
    """Costs whose clocks are kept."""

    clocks: list[_NotingClock]

    @classmethod
    def of(cls, costs: CostModel) -> _NotingCosts:
        result = cls(**{field.name: getattr(costs, field.name) for field in fields(CostModel)})
        object.__setattr__(result, "clocks", [])
        return result

    def clock(self, streamed: bool, storage: Storage | None = None) -> Clock:
        self.clocks.append(_NotingClock(super().clock(streamed, storage)))
        return self.clocks[-1]


class _NotingClock(Clock):
    """Notes for how long each round waits for experts."""

    def __init__(self, clock: Clock):
        self._clock, self._drafting, self.reading = clock, 0.0, list[float]()

    def verify(self, rows: int, counts: Counts, *, ahead: bool, replayed: bool) -> float:
        seconds = self._clock.verify(rows, counts, ahead=ahead, replayed=replayed)
        alone = self._clock.verify(rows, np.zeros_like(counts), ahead=ahead, replayed=replayed)
        self.reading.append(self._drafting + seconds - alone)
        self._drafting = 0.0
        return seconds

    def draft(self, drafts: int, committed: int, counts: Counts) -> float:
        seconds = self._clock.draft(drafts, committed, counts)
        self._drafting = seconds - self._clock.draft(drafts, committed, np.zeros_like(counts))
        return seconds


def curves(costs: CostModel, streamed: bool) -> dict[str, Any]:
    """What rounds cost, in milliseconds, ready for JSON."""
    found = costs.streamed if streamed else costs.resident
    assert found is not None
    error = (costs.error or {}).get("streamed" if streamed else "resident")
    return {
        "plain": 1e3 * found.plain,
        "verify": [1e3 * seconds for seconds in found.verify],
        "draft": [1e3 * seconds for seconds in found.draft],
        "miss": 1e3 * found.miss,
        "error": None if error is None or np.isnan(error) else error,
    }
