"""Decode with a part of the experts in memory, and race the peers that do the same, in one run.

    python benchmarks/streaming_speed.py --json --peers

Everybody has the same files (the embedded model, experts in 4 bits, with float32 scales for all, because MLX's CPU
backend is several times slower with bfloat16 ones), the same number of experts of each layer in memory, and a process
of its own that stays from the first prompt to the last, so that slots stay filled. They take turns: each held-out
prompt is decoded by one after the other, greedily, in an order that turns round every time; the first round warms up
and does not count. A speed is a median over turns; a ratio is the median over pairs of turns on the same prompt in the
same round. Tokens count as equal to those of mlx_lm, with everything in memory, up to the first difference.

--peers installs amperor-strata, bigrig and boyle from PyPI, in the versions that streaming/environment.py pins and with
the MLX in use here, into a virtual environment in --work, which is temporary unless it is given. Each has those of its
settings that were the fastest (OPTIONS); streaming/contestant.py says how each is called and what is stubbed where the
system is not macOS. A peer that cannot run the model is reported with its reason.

The peers keep a copy of the experts with one record each, and so does "ours" (`convert --pack`); "ours, not packed"
reads the files as they are. On a CPU, "ours" with all experts in memory has them as float32, which are faster there and
take eight times the memory; "ours, quantised" has them as slots have them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from benchmarks.models import embedded_with_float32_scales
from benchmarks.streaming import verdict
from benchmarks.streaming.environment import PEERS, make_environment
from benchmarks.streaming.process import Entry, Failed, Process, Turn
from benchmarks.streaming.verdict import Goal
from strata_mlx.checkpoint import Checkpoint
from strata_mlx.device import on_cpu
from strata_mlx.loading import load_tokenizer

PROMPT_TOKENS = 32
SHARES = (0.25, 0.50)
OVER_PEERS = {0.25: 1.5}  # goals: ours over the best streaming peer, by the share of experts in memory
OVER_RESIDENT = {0.25: 0.75, 0.50: 0.92}  # and over ours with all of them in memory
# What was the fastest of each peer's settings on a 2-core CPU at 25 %.
OPTIONS: dict[str, dict[str, Any]] = {
    "amperor-strata": {"prefetch": False, "loop": "mlx_lm"},
    "bigrig": {"packed": True, "views": False, "threads": 8},
    "boyle": {"packed": True, "workers": 8},
}


COLUMNS = (
    "contestant",
    "slots",
    "tokens_per_s",
    "of_ours_resident",
    "cpu_ms_per_token",
    "equal_tokens",
    "misses_per_token",
)


QUANTISED = "ours, quantised"


def named(system: str, share: float) -> str:
    return f"{system} {share:.0%}"


def entries(experts: int, peers: Sequence[str]) -> list[Entry]:
    """Everybody who takes part, those who are compared next to each other."""
    result = [Entry("mlx_lm", "mlx_lm"), Entry("ours", "ours")]
    if on_cpu():
        result.append(Entry(QUANTISED, "ours", None, {"quantised": True}))
    for share in SHARES:
        slots = round(experts * share)
        result.append(Entry(named("ours", share), "ours", slots, {"packed": True}))
        result.append(Entry(named("ours, not packed", share), "ours", slots))
        result += [Entry(named(peer, share), peer, slots, OPTIONS[peer]) for peer in peers]
    return result


def race(
    processes: dict[str, Process], prompts: list[list[int]], tokens: int, repeats: int
) -> tuple[dict[str, list[Turn]], dict[str, str]]:
    """The turns of everybody, and the reasons of those who failed; every prompt is decoded once more, to warm up."""
    turns: dict[str, list[Turn]] = {name: [] for name in processes}
    failures = {}
    for number in tqdm(range((repeats + 1) * len(prompts)), desc="Speed", unit="prompt"):
        done, prompt = divmod(number, len(prompts))
        for name in list(turns)[:: -1 if number % 2 else 1]:
            try:
                turn = processes[name].turn(prompts[prompt], tokens)
            except Failed as failed:
                failures[name] = str(failed)
                del turns[name]
                continue
            if done:
                turns[name].append(turn)
    return turns, failures


def row(entry: Entry, turns: dict[str, list[Turn]], notes: list[str]) -> dict[str, Any]:
    own = turns[entry.name]
    speeds = [turn.tokens_per_s for turn in own]
    return {
        "contestant": entry.name,
        "slots": entry.slots,
        "tokens_per_s": verdict.speed(own),
        "range": [min(speeds), max(speeds)],
        "of_ours_resident": verdict.ratio(own, turns["ours"]),
        "equal_tokens": verdict.agreement(own, turns["mlx_lm"]),
        "cpu_ms_per_token": verdict.cpu_ms(own),
        "misses_per_token": verdict.per_token(own, "misses"),
        "options": entry.options,
        "notes": notes,
    }


def parts(share: float, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Where the time of ours goes."""
    own = turns[named("ours", share)]
    return {
        "contestant": named("ours", share),
        **verdict.shares(own),
        "overlap": verdict.overlap(own),
        "bytes_per_token": verdict.per_token(own, "bytes"),
        "read_us_per_expert": 1e6 * verdict.total(own, "read_seconds") / verdict.total(own, "misses"),
    }


def goals(turns: dict[str, list[Turn]], peers: Sequence[str]) -> list[Goal]:
    found = []
    for share, least in OVER_PEERS.items():
        running = [named(peer, share) for peer in peers if named(peer, share) in turns]
        if running:
            best = max(running, key=lambda name: verdict.speed(turns[name]))
            found.append(Goal(f"over the best streaming peer at {share:.0%}", named("ours", share), best, least))
    for share, least in OVER_RESIDENT.items():
        found.append(Goal(f"over all experts in memory at {share:.0%}", named("ours", share), "ours", least))
        if QUANTISED in turns:
            found.append(Goal(f"over those, quantised, at {share:.0%}", named("ours", share), QUANTISED, least))
    return found


def run(args: Any) -> dict[str, Any]:
    with ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        model = args.model or work / "model"
        if not (args.model or model.exists()):
            embedded_with_float32_scales(model)
        checkpoint = Checkpoint.open(model)
        prompts = heldout.windows(load_tokenizer(checkpoint), args.prompts, PROMPT_TOKENS)
        peers = tuple(PEERS) if args.peers else ()
        python = make_environment(work / "peers") if peers else sys.executable
        entered, processes, failures = entries(checkpoint.config["num_experts"], peers), {}, {}
        for entry in tqdm(entered, desc="Loading", unit="contestant"):
            try:
                process = Process(entry, model, work, python if entry.system in PEERS else sys.executable)
            except Failed as failed:
                failures[entry.name] = str(failed)
                continue
            processes[entry.name] = process
            stack.callback(process.close)
        turns, failed_later = race(processes, prompts, args.tokens, args.repeats)
    running = [entry for entry in entered if entry.name in turns]
    return {
        "rows": [row(entry, turns, processes[entry.name].notes) for entry in running],
        "failures": failures | failed_later,
        "goals": [verdict.judge(goal, turns) for goal in goals(turns, peers)],
        "parts": [parts(share, turns) for share in SHARES],
        "model": args.model.name if args.model else "embedded",
        "prompts": args.prompts,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "device": mx.default_device().type.name,
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")} | {peer: PEERS[peer] for peer in peers},
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--peers", action="store_true", help="install the peers and race them too")
    parser.add_argument("--model", type=Path, help="a folder to race with, as it is, instead of the embedded model")
    parser.add_argument("--prompts", type=int, default=5, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=128, help="tokens for each of them")
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count, after one that warms up")
    parser.add_argument(
        "--work", type=Path, help="keep the model's copy and the peers in this folder, for the next run"
    )
    args = parser.parse_args()
    result = run(args)
    if report.publish(result, args):
        return
    print(report.table(result["rows"], COLUMNS))
    for name, reason in result["failures"].items():
        print(f"{name} cannot run the model: {reason}")
    for each in result["rows"]:
        print(*(f"{each['contestant']}: {note}\n" for note in each["notes"]), sep="", end="")
    print()
    print(report.table(result["parts"], list(result["parts"][0])))
    print()
    print(report.table(result["goals"], ("goal", "against", "least", "reached", "met")))


if __name__ == "__main__":
    main()
