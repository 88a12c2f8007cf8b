"""Does a replay do what the decoder does? The same rounds, the same accepted drafts, the same misses, nearly the speed.

    python benchmarks/replay_validation.py [--json]

Held-out documents are recorded once. Every policy then decodes them with experts that stream from disk, several times
and in another order each time, and between these runs others measure what rounds cost. With costs that come from the
latter alone, the replay must predict the former. A policy's real speed is that of its rounds, each with its median time
over the passes. On a machine that is busy with other work, ``--clock cpu`` counts the seconds of the process's own work
in both, instead of those that pass.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from strata_mlx import RetentionPolicy, SpeculativeDecoder, load
from strata_mlx.experts.streaming import streaming_of
from strata_mlx.replay.costs import CostModel, Probe, fit
from strata_mlx.replay.recording import STEPS, Recording
from strata_mlx.replay.replayer import Replayed, replay
from strata_mlx.speculation import decoder
from strata_mlx.speculation.record import Round, Stopwatch

BUDGETS = (0.25, 0.5)  # of the experts, that are in memory
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_SCHEDULE = (0.10, 0.35, 0.55)


@dataclass(frozen=True)
class Way:
    """How to decode."""

    name: str
    retention: RetentionPolicy
    steps: int = STEPS
    drafting: str = "chained"


WAYS = (
    Way("depth 1", RetentionPolicy(), 1),
    Way("depth 3", RetentionPolicy(), 3),
    Way("flat 0.35", RetentionPolicy(0.35)),
    Way("schedule 0.10,0.35,0.55", RetentionPolicy(schedule=_SCHEDULE)),
    Way("cumulative 0.25", RetentionPolicy(min_cum_p=0.25)),
    Way("schedule and cumulative 0.20, stepwise", RetentionPolicy(schedule=_SCHEDULE, min_cum_p=0.20), 7, "stepwise"),
)


@dataclass
class Run:
    """All documents, decoded for real. misses: by layer, those of prompts included."""

    rounds: list[list[Round]]
    misses: list[int]


def decode(args: Any, recording: Recording, way: Way, slots: int) -> Run:
    """Decode with empty slots at first, as the replay does."""
    model, _ = load(args.model, mtp=True, slots=slots)
    streaming = streaming_of(model)
    assert streaming is not None
    rounds = []
    for document in recording.documents:
        prompt, count = document.tokens[: document.prompt].tolist(), document.positions + 1
        options: dict[str, Any] = {"retention": way.retention, "max_steps": way.steps, "drafting": way.drafting}
        made = SpeculativeDecoder(model, prompt=prompt, max_tokens=count, **options)
        text = [each.token for each in made]
        if text != document.tokens[document.prompt :].tolist():
            raise RuntimeError(f"{way.name}: the text of {document.name} is not the one that was recorded")
        rounds.append(made.rounds)
    tables = streaming.tables
    misses = [tables[layer].filled for layer in (*recording.header.layers, *recording.header.head_layers)]
    streaming.close()
    return Run(rounds, misses)


def alike(a: Round, b: Round) -> bool:
    """Whether a replay has made of a round what it was; the output head of drafts rounds otherwise where experts are
    streamed.
    """
    decided = all(getattr(a, name) == getattr(b, name) for name in ("retained", "accepted", "committed"))
    return decided and len(a.confidences) == len(b.confidences) and np.allclose(a.confidences, b.confidences, atol=1e-5)


def compare(way: Way, share: float, runs: list[Run], replayed: Replayed) -> dict[str, Any]:
    real = runs[0]
    made = [each for of_document in real.rounds for each in of_document]
    differ = abs(len(made) - len(replayed.rounds))
    differ += sum(not alike(a, b) for a, b in zip(made, replayed.rounds, strict=False))
    misses = replayed.misses.sum(axis=0) + replayed.prompt_misses.sum(axis=0)
    predicted = replayed.to_dict()
    tokens = sum(each.committed for of_document in real.rounds for each in of_document[1:])
    seconds = sum(
        statistics.median(each.seconds for each in same)
        for of_document in zip(*(run.rounds for run in runs), strict=True)
        for same in list(zip(*of_document, strict=True))[1:]
    )
    passes = [sum(each.seconds for of_document in run.rounds for each in of_document[1:]) for run in runs]
    return {
        "policy": way.name,
        "slots": share,
        "rounds": len(replayed.rounds),
        "rounds_that_differ": differ,
        "accepted": sum(each.accepted for each in replayed.rounds),
        "accepted_for_real": sum(each.accepted for each in made),
        "misses": int(misses.sum()),
        "misses_for_real": sum(real.misses),
        "misses_that_differ": int(np.abs(misses - real.misses).sum()),
        "tokens_per_s": predicted["tokens_per_second"],
        "tokens_per_s_for_real": tokens / seconds,
        "error": predicted["tokens_per_second"] / (tokens / seconds) - 1,
        "tokens_per_s_of_passes": [tokens / each for each in passes],
    }


def record(args: Any) -> Recording:
    if args.recording and args.recording.exists():
        return Recording.load(args.recording)
    model, tokenizer = load(args.model, mtp=True)
    recording = heldout.recording(model, tokenizer, args.documents, args.tokens)
    if args.recording:
        recording.save(args.recording)
    return recording


def measure(args: Any, recording: Recording) -> tuple[dict[tuple[int, float], list[Run]], CostModel]:
    """Runs for real, and between them what rounds cost."""
    experts = recording.header.experts
    model, tokenizer = load(args.model, mtp=True, slots=round(BUDGETS[0] * experts))
    probe = Probe(model)
    prompts = heldout.windows(tokenizer, 2 * args.documents, 32)[args.documents :]  # others than were recorded
    combinations = [(number, share) for number in range(len(WAYS)) for share in BUDGETS]
    runs: dict[tuple[int, float], list[Run]] = {each: [] for each in combinations}
    probe.run(prompts[0], args.probe_tokens, 1)  # warms up
    probe.samples.clear()
    shuffled, count = random.Random(0), 0
    with tqdm(total=args.passes * len(combinations), desc="Validation", unit="run") as bar:
        for _ in range(args.passes):
            shuffled.shuffle(combinations)
            for number, share in combinations:
                runs[number, share].append(decode(args, recording, WAYS[number], round(share * experts)))
                for _ in range(args.probes):
                    probe.run(prompts[count % len(prompts)], args.probe_tokens)
                    count += 1
                bar.update()
    return runs, fit(None, probe)


def speed(recording: Recording, costs: CostModel) -> dict[str, float]:
    """Policies per minute: with slots, and without, where costs are those of the same model."""
    resident = CostModel(costs.measured_on, costs.streamed, None)
    result = {}
    for name, model, slots in (("resident", resident, None), ("slots", costs, recording.header.experts // 4)):
        start = time.perf_counter()
        for way in WAYS:
            replay(recording, way.retention, model, steps=way.steps, drafting=way.drafting, slots=slots)
        result[name] = 60 * len(WAYS) / (time.perf_counter() - start)
    return result


def run(args: Any) -> dict[str, Any]:
    recording = record(args)
    runs, costs = measure(args, recording)
    rows = []
    for (number, share), made in runs.items():
        way, slots = WAYS[number], round(share * recording.header.experts)
        replayed = replay(recording, way.retention, costs, steps=way.steps, drafting=way.drafting, slots=slots)
        rows.append(compare(way, share, made, replayed))
    return {
        "rounds_that_differ": sum(row["rounds_that_differ"] for row in rows),
        "misses_that_differ": sum(row["misses_that_differ"] for row in rows),
        "largest_error": max(abs(row["error"]) for row in rows),
        "median_error": statistics.median(abs(row["error"]) for row in rows),
        "policies_per_minute": speed(recording, costs),
        "positions": recording.positions,
        "passes": args.passes,
        "clock": args.clock,
        "rows": rows,
        "costs": {**vars(costs), "resident": None, "streamed": vars(costs.streamed)},
        "device": mx.default_device().type.name,
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", help="a folder or a repository with an MTP head; by default the embedded model")
    parser.add_argument("--documents", type=int, default=6, help="held-out documents")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of each")
    parser.add_argument("--passes", type=int, default=3, help="how often each policy decodes them")
    parser.add_argument("--probes", type=int, default=2, help="runs that measure costs, after each of these")
    parser.add_argument("--probe-tokens", type=int, default=48, help="tokens of each of them")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what seconds are")
    parser.add_argument("--recording", type=Path, help="where to keep the recording, or to find it again")
    args = parser.parse_args()
    with patch.object(decoder, "Stopwatch", partial(Stopwatch, CLOCKS[args.clock])):
        result = run(args)
    if report.publish(result, args):
        return
    for name in ("rounds_that_differ", "misses_that_differ", "largest_error", "median_error", "policies_per_minute"):
        print(f"{name.replace('_', ' ')}: {result[name]}")
    columns = ("policy", "slots", "rounds", "accepted", "misses", "misses_that_differ", "tokens_per_s", "error")
    print(report.table(result["rows"], columns))


if __name__ == "__main__":
    main()
