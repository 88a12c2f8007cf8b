"""What rounds cost: fitted to rounds of the real decoder on this machine, kept with what it was measured on and how far
off it is.

A round's forward takes ``verify[rows - 1]``, and what comes before it ``draft[drafts - 1]``, once everything that they
need is in memory; every expert that is not adds ``miss``. A storage model puts latency and bandwidth in the place of
what reading took here.

What is measured waits for the drafts, as gates do. Without a gate nothing waits, which on a GPU takes less than is said
here.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, SupportsFloat

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from ..device import compute_dtype_of
from ..errors import Fault, InputError
from ..experts.stream import SPLIT_SECONDS, StreamedExperts
from ..experts.streaming import streaming_of
from ..models.moe import MoEBlock, blocks
from ..models.trunk import Trunk
from ..speculation.decoder import SpeculativeDecoder
from ..speculation.record import Round
from ..values import read_json
from .recording import STEPS, fingerprint

VERSION = 1
PLAIN_STEPS = 16  # of a document, where nothing is drafted

Floats = NDArray[np.float64]
Counts = NDArray[np.int32]


@dataclass(frozen=True)
class Storage:
    """Where experts are read from: what a layer waits for n of them is ``latency + n * bytes / bandwidth``.

    latency: seconds. bandwidth: bytes per second.
    """

    name: str
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise InputError(f"storage {self.name}: latency must not be negative, and bandwidth must be positive")


STORAGES = (  # a good NVMe drive, an older one, and a SATA or network drive
    Storage("7 GB/s", 80e-6, 7e9),
    Storage("2 GB/s", 100e-6, 2e9),
    Storage("0.5 GB/s", 200e-6, 0.5e9),
)


@dataclass(frozen=True)
class Costs:
    """Seconds, of a model whose experts are all in memory, or of one that streams and finds what it needs in its slots.

    plain: of a step that was begun before the one before it had landed. verify: of windows of 1, 2, ... rows. draft:
    of 1, 2, ... drafts, after one committed token. catch_up: of each further one, which the head reads first. rollback:
    more, of a window after one that was not kept whole. miss, head_miss: more, of each expert that trunk and head read.
    """

    plain: float
    verify: tuple[float, ...]
    draft: tuple[float, ...]
    catch_up: float = 0.0
    rollback: float = 0.0
    miss: float = 0.0
    head_miss: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """resident: everything is in memory. streamed: experts go through slots. None where that was not measured.

    read: of ``miss``, the seconds for which a miss made the device wait. expert_bytes: read for each. pair: seconds to
    compute one expert for one token, which reads overlap. error: by kind, how far the seconds of documents that the fit
    has not seen are off, the median of their absolute relative errors. measured_on: machine, model and versions.
    """

    measured_on: dict[str, Any]
    resident: Costs | None
    streamed: Costs | None
    read: float = 0.0
    expert_bytes: float = 0.0
    pair: float = 0.0
    error: dict[str, float] | None = None

    def clock(self, streamed: bool, storage: Storage | None = None) -> Clock:
        """What tells the time of rounds. storage: None is what was measured. Raises InputError for what was not."""
        costs = self.streamed if streamed else self.resident
        if costs is None:
            kind = "that streams its experts" if streamed else "whose experts are all in memory"
            raise InputError(f"the cost model was not measured with a model {kind}: measure it again with one")
        return Clock(costs, self, storage)

    def save(self, path: Path) -> None:
        """Write it as JSON. Raises Fault where that fails."""
        try:
            path.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise Fault(f"{path}: the cost model cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Read what save() wrote. Raises InputError, naming the file, for anything else."""
        value = read_json(path, str(path))
        found = value.pop("version", None) if isinstance(value, dict) else None
        if found != VERSION:
            raise InputError(f"{path}: not a cost model of version {VERSION}: measure it again")
        try:
            given = {field.name: value[field.name] for field in fields(cls)}
            return cls(**{**given, "resident": _costs(given["resident"]), "streamed": _costs(given["streamed"])})
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: the cost model is broken ({error!r}): measure it again") from error

    def check_model(self, model: nn.Module) -> None:
        """Raise InputError unless it was measured here, with ``model``."""
        here = measured_on(model)
        for name in here:
            if here[name] != self.measured_on.get(name):
                raise InputError(
                    f"the cost model was measured with {name} {self.measured_on.get(name)}, and this is {here[name]}: "
                    "measure it again"
                )

    def __str__(self) -> str:
        lines = []
        for kind, costs in (("resident", self.resident), ("streamed", self.streamed)):
            if costs:
                verify = " ".join(f"{1e3 * seconds:.1f}" for seconds in costs.verify)
                draft = " ".join(f"{1e3 * seconds:.1f}" for seconds in costs.draft)
                off = (self.error or {}).get(kind)
                lines.append(
                    f"{kind}: plain step {1e3 * costs.plain:.1f} ms, windows of 1, 2, ... rows {verify} ms, 1, 2, ... "
                    f"drafts {draft} ms, {1e6 * costs.miss:.0f} us a miss{'' if off is None else f', off by {off:.1%}'}"
                )
        return "\n".join(lines)


class Clock:
    """Virtual seconds of the parts of rounds. Counts are of experts by layer: needed, and of those, read."""

    commit = 0.0  # what follows a window is measured as part of what comes before the next one

    def __init__(self, costs: Costs, model: CostModel, storage: Storage | None):
        self._costs, self._model, self._storage = costs, model, storage

    def verify(self, rows: int, counts: Counts, *, ahead: bool, replayed: bool) -> float:
        """Of a window. ahead: it was begun before the one before it had landed. replayed: that one was cut short."""
        costs = self._costs
        if rows > len(costs.verify):
            raise InputError(f"the cost model knows windows of up to {len(costs.verify)} rows, not of {rows}")
        seconds = costs.plain if ahead else costs.verify[rows - 1] + costs.rollback * replayed
        return seconds + self._misses(counts, costs.miss, rows)

    def draft(self, drafts: int, committed: int, counts: Counts) -> float:
        """Of making ``drafts`` after ``committed`` tokens."""
        if not drafts:
            return 0.0
        costs = self._costs
        if drafts > len(costs.draft):
            raise InputError(f"the cost model knows up to {len(costs.draft)} drafts, not {drafts}")
        seconds = costs.draft[drafts - 1] + costs.catch_up * (committed - 1)
        return seconds + self._misses(counts, costs.head_miss, 1)

    def _misses(self, counts: Counts, seconds: float, rows: int) -> float:
        needed, missed = counts
        total = int(missed.sum())
        if not total or self._storage is None:
            return total * seconds
        model, storage = self._model, self._storage
        wait = np.where(missed > 0, storage.latency + missed * (model.expert_bytes / storage.bandwidth), 0.0)
        # Reads that take long overlap what is computed with the experts in memory.
        hidden = np.where(wait > SPLIT_SECONDS, (needed - missed) * model.pair * max(1.0, rows / 2), 0.0)
        return total * max(0.0, seconds - model.read) + float(np.maximum(wait - hidden, 0.0).sum())


def measured_on(model: nn.Module) -> dict[str, Any]:
    """What a cost model is good for."""
    return {
        "machine": f"{platform.node()} {platform.machine()} {os.cpu_count()} cores",
        "device": mx.default_device().type.name,
        "dtype": compute_dtype_of(model),
        "model": fingerprint(model),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }


@dataclass(frozen=True)
class Sample:
    """One round of the real decoder, after the first of its document.

    plain: it was begun ahead, and so was the next. before: what lies between the windows. misses, head_misses: of its
    window, and of what was drafted for it. replayed, committed: whether the round before was cut short, and its tokens.
    """

    document: int
    plain: bool
    rows: int
    drafts: int
    committed: int
    replayed: bool
    misses: int
    head_misses: int
    verify_seconds: float
    before_seconds: float


class Probe:
    """Runs the real decoder with gates that let any number of drafts pass, and notes what its rounds take."""

    def __init__(self, model: nn.Module, steps: int = STEPS, seed: int = 0):
        self.model, self.steps, self.samples = model, steps, list[Sample]()
        self._random, self._depths, self._documents = Random(seed), cycle([0, *range(steps, 0, -1)]), 0
        streaming = streaming_of(model)
        trunk = len(Trunk(model).layers)
        self._streaming = streaming
        tables = streaming.tables if streaming else {}
        self._tables = [table for layer, table in tables.items() if layer < trunk]
        self._head_tables = [table for layer, table in tables.items() if layer >= trunk]
        self._traffic = [0.0, 0.0, 0.0]  # misses, bytes, seconds stalled

    def run(self, prompt: Sequence[int], tokens: int, depth: int | None = None) -> None:
        """Decode once, with another number of drafts each time. depth: that number, 0 for plain steps."""
        depth = next(self._depths) if depth is None else depth
        decoder = SpeculativeDecoder(
            self.model,
            prompt=prompt,
            max_tokens=tokens if depth else min(tokens, PLAIN_STEPS),
            max_steps=max(depth, 1),
            retention=_AnyGate(self._random, plain=not depth),
        )
        filled = [self._filled()]
        before = self._streaming.traffic() if self._streaming else None
        seen = 0
        for _ in decoder:
            if len(decoder.rounds) > seen:
                seen = len(decoder.rounds)
                filled.append(self._filled())
        if self._streaming and before:
            traffic = self._streaming.traffic() - before
            for i, value in enumerate((traffic.misses, traffic.bytes, traffic.stall_seconds)):
                self._traffic[i] += value
        self._note(decoder.rounds, np.diff(filled, axis=0), plain=not depth)
        self._documents += 1

    def _filled(self) -> tuple[int, int]:
        """Experts read until now, by trunk and head."""
        return sum(table.filled for table in self._tables), sum(table.filled for table in self._head_tables)

    def _note(self, rounds: Sequence[Round], misses: Any, plain: bool) -> None:
        """misses: ``[R, 2]``, while each round went on; those of the head are for the drafts of the one after."""
        for i in range(2, len(rounds) - plain):  # the first steps warm up, and the last plain one was not begun ahead
            now, last = rounds[i], rounds[i - 1]
            self.samples.append(
                Sample(
                    self._documents,
                    plain,
                    now.rows,
                    now.drafted,
                    last.committed,
                    last.committed < last.rows,
                    int(misses[i, 0]),
                    int(misses[i - 1, 1]),
                    now.verify_seconds,
                    last.commit_seconds + now.draft_seconds,
                )
            )

    def stalls(self) -> tuple[float, float]:
        """By miss: the seconds that the device waited, and the bytes."""
        misses, nbytes, seconds = self._traffic
        return seconds / max(misses, 1), nbytes / max(misses, 1)


class _AnyGate:
    """A retention policy that keeps any number of drafts, all equally often. It is its own controller and gate. plain:
    has none made.
    """

    keeps_all = False

    def __init__(self, random: Random, plain: bool):
        self._random, self._plain = random, plain
        self.kept, self.open, self._most, self._drafts = 0, True, 0, 0

    def start(self) -> _AnyGate:
        return self

    def depth(self, most: int) -> int:
        self._drafts = 0 if self._plain else most
        return self._drafts

    def learn(self, latest: Round) -> None:
        """Nothing."""

    def gate(self, path: str = "chained") -> _AnyGate:  # noqa: ARG002
        self.kept, self._most = 0, self._random.randint(0, self._drafts)
        return self

    def offer(self, p: SupportsFloat) -> bool:  # noqa: ARG002
        keep = self.kept < self._most
        self.kept += keep
        return keep


def fit(resident: Probe | None, streamed: Probe | None) -> CostModel:
    """The cost model of what the probes have noted, and its error on the documents that half of them does not show.

    Raises InputError where there are too few rounds.
    """
    probe = streamed or resident
    if probe is None:
        raise InputError("costs: there is nothing to fit; run a probe first")
    found: dict[str, Costs | None] = {}
    error: dict[str, float] = {}
    for kind, each in (("resident", resident), ("streamed", streamed)):
        found[kind] = None
        if each:
            read = each.stalls()[0]
            found[kind] = fit_costs(each.samples, each.steps, read)
            error[kind] = held_out_error(each.samples, each.steps, read)
    read, nbytes = streamed.stalls() if streamed else (0.0, 0.0)
    return CostModel(
        measured_on(probe.model),
        found["resident"],
        found["streamed"],
        read,
        nbytes,
        _pair_seconds(resident.model) if resident else 0.0,
        error,
    )


def predict(costs: Costs, sample: Sample) -> float:
    """The seconds of a round that was measured."""
    misses = costs.miss * sample.misses + costs.head_miss * sample.head_misses
    if sample.plain:
        return costs.plain + misses
    draft = costs.draft[sample.drafts - 1] + costs.catch_up * (sample.committed - 1) if sample.drafts else 0.0
    return costs.verify[sample.rows - 1] + draft + costs.rollback * sample.replayed + misses


def fit_costs(samples: Sequence[Sample], steps: int, read: float = 0.0) -> Costs:
    """Costs of up to ``steps`` drafts.

    read: seconds for which a miss made the device wait: about what it costs, where rounds do not tell since all of them
    miss the same. Raises InputError where a number of rows or drafts does not occur.
    """
    plain = [each for each in samples if each.plain]
    rounds = [each for each in samples if not each.plain]
    drafted = [each for each in rounds if each.drafts]
    for what, known in (("rows", {each.rows - 1 for each in rounds}), ("drafts", {each.drafts for each in rounds})):
        if lacking := set(range(what == "drafts", steps + 1)) - known:
            raise InputError(f"costs: no round of {min(lacking)} more {what} was measured; give more or longer prompts")
    if not plain:
        raise InputError("costs: no plain step was measured; give more prompts")
    verify = _regress(
        [[*_one_hot(each.rows - 1, steps + 1), each.replayed, each.misses] for each in rounds],
        [each.verify_seconds for each in rounds],
        steps + 1,
        read,
    )
    draft = _regress(
        [[*_one_hot(each.drafts - 1, steps), each.committed - 1, each.head_misses] for each in drafted],
        [each.before_seconds for each in drafted],
        steps,
        read,
    )
    miss = verify[steps + 2]
    step = statistics.median(each.verify_seconds + each.before_seconds - miss * each.misses for each in plain)
    return Costs(
        max(step, 0.0),
        tuple(verify[: steps + 1]),
        tuple(draft[:steps]),
        catch_up=draft[steps],
        rollback=verify[steps + 1],
        miss=miss,
        head_miss=draft[steps + 1],
    )


def _regress(features: Sequence[Sequence[float]], seconds: Sequence[float], levels: int, last: float) -> list[float]:
    """Least absolute deviations, by iteratively reweighted least squares. The first ``levels`` features are one of
    several; the others cost something, or nothing. last: a guess of what the last one costs, which counts as one
    round.
    """
    x, y = np.array(features, np.float64), np.array(seconds, np.float64)
    if last and x[:, -1].any():
        guess = np.zeros((1, x.shape[1]))
        guess[0, -1] = x[:, -1].mean()
        x, y = np.concatenate([x, guess]), np.append(y, last * guess[0, -1])
    active: NDArray[np.bool_] = np.asarray(x.any(axis=0))
    while True:
        expected = np.maximum(y, 1e-9)
        residual = expected
        for _ in range(50):
            # What takes longer varies more. Weights by what was measured itself would favour what was quick by chance.
            root = np.sqrt(1 / (expected * np.maximum(residual, 1e-3 * expected)))[:, None]
            solution = np.zeros(x.shape[1])
            solution[active] = np.linalg.lstsq(x[:, active] * root, y * root[:, 0], rcond=None)[0]
            expected = np.maximum(x @ solution, 1e-2 * np.median(y))
            residual = np.abs(y - x @ solution)
        negative = active & (solution < 0) & (np.arange(len(solution)) >= levels)
        if not negative.any():
            return np.maximum(solution, 0.0).tolist()
        active[np.argmin(np.where(negative, solution * x.mean(axis=0), np.inf))] = False


def _one_hot(place: int, size: int) -> list[float]:
    return [float(i == place) for i in range(size)]


def held_out_error(samples: Sequence[Sample], steps: int, read: float = 0.0) -> float:
    """Fit on half of the documents, predict the seconds of each of the others, and the other way round: the median of
    the absolute relative errors. NaN where half of them are too few.
    """
    errors = []
    documents = sorted({each.document for each in samples})
    turn = {document: i // (steps + 1) % 2 for i, document in enumerate(documents)}  # all depths take their turns first
    for part in (0, 1):
        try:
            costs = fit_costs([each for each in samples if turn[each.document] == part], steps, read)
        except InputError:
            continue
        for document in documents:
            if turn[document] != part:
                rounds = [each for each in samples if each.document == document]
                seconds = sum(each.verify_seconds + each.before_seconds for each in rounds)
                if seconds:
                    errors.append(abs(sum(predict(costs, each) for each in rounds) / seconds - 1))
    return statistics.median(errors) if errors else float("nan")


def _pair_seconds(model: nn.Module, repeats: int = 20) -> float:
    """To compute one expert for one token, in a layer whose experts are in memory."""
    block: MoEBlock = blocks(model)[-1]
    if isinstance(block.switch_mlp, StreamedExperts):
        return 0.0
    weight = Trunk(model).norm.weight
    x = mx.ones((1, 1, weight.size), weight.dtype)
    ids = mx.arange(block.router.top_k, dtype=mx.uint32).reshape(1, 1, -1)
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        mx.eval(block.switch_mlp(x, ids))
        seconds.append(perf_counter() - start)
    return statistics.median(seconds) / block.router.top_k


def _costs(value: Any) -> Costs | None:
    if value is None:
        return None
    costs = Costs(**value)
    numbers = [costs.plain, *costs.verify, *costs.draft, costs.catch_up, costs.rollback, costs.miss, costs.head_miss]
    if not all(type(number) in (int, float) and 0 <= number < float("inf") for number in numbers):
        raise ValueError("seconds must be finite and not negative")
    return replace(costs, verify=tuple(costs.verify), draft=tuple(costs.draft))
