"""Decode held-out prompts plainly, with drafts and by mlx_lm, in one run: what speculation costs and gives here.

    python benchmarks/speculation_speed.py [--json]

Every prompt is decoded in every way in turn, each time in another order, and a way's speed is compared with plain
decoding of the same prompt, so that neither a slow spell of the machine nor what the first way warms up favours one.
The weights are the embedded model's, in float32 on the CPU and as they are elsewhere; mlx_lm gets the same files, on a
CPU with scales in float32, which it multiplies faster. Fixed depths keep every draft; the gates work on chains of
--max-steps.

What a draft costs beside a step depends on how many layers the trunk has. The column for 48 layers is arithmetic: the
measured rounds, with steps and windows longer in proportion and drafts as they are. Where no gate waits for the drafts,
most of their time is their window's, and that column says too little.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import generate_step as mlx_lm_step
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from benchmarks.models import for_mlx_lm
from strata_mlx import RetentionPolicy, SpeculativeDecoder, load
from strata_mlx.engine import generate_step
from strata_mlx.models.trunk import Trunk
from strata_mlx.speculation.decoder import default_steps
from strata_mlx.speculation.record import Round
from strata_mlx.texts import PACKAGES

PROMPT_TOKENS = 32
DEPTHS = (1, 2, 3, 4, 8)
LAYERS = 48  # of the models that people have whose heads are one layer
POLICIES = {
    "flat 0.35": RetentionPolicy(0.35),
    "schedule 0.10,0.35,0.55": RetentionPolicy(schedule=(0.10, 0.35, 0.55)),
    "cumulative 0.25": RetentionPolicy(min_cum_p=0.25),
    "schedule and cumulative 0.20": RetentionPolicy(schedule=(0.10, 0.35, 0.55), min_cum_p=0.20),
}
Decode = Callable[[list[int]], Iterator[Any]]


def ways(model: nn.Module, theirs: nn.Module, tokens: int, max_steps: int) -> dict[str, Decode]:
    """By name, how to decode a prompt. theirs: mlx_lm's model."""

    def speculative(**options: Any) -> Decode:
        return lambda prompt: SpeculativeDecoder(model, prompt=prompt, max_tokens=tokens, **options)

    return {
        "plain": lambda prompt: generate_step(mx.array(prompt), model, max_tokens=tokens),
        "mlx_lm": lambda prompt: mlx_lm_step(mx.array(prompt), theirs, max_tokens=tokens),
        "auto": speculative(auto=True),
        **{f"depth {depth}": speculative(max_steps=depth) for depth in DEPTHS},
        **{name: speculative(max_steps=max_steps, retention=policy) for name, policy in POLICIES.items()},
        "stepwise flat 0.35": speculative(max_steps=max_steps, retention=RetentionPolicy(0.35), drafting="stepwise"),
    }


def decode(way: Decode, prompt: list[int]) -> tuple[float, Sequence[Round]]:
    """Tokens per second after the first one, and the rounds, where there are any."""
    decoder = way(prompt)
    next(decoder)
    start = time.perf_counter()
    count = sum(1 for _ in decoder)
    return count / (time.perf_counter() - start), getattr(decoder, "rounds", ())


def acceptance(rounds: Sequence[Round]) -> list[float]:
    """Of the drafts that were verified in each position, once those before were accepted: the share that was."""
    shares = []
    for position in range(max((each.retained for each in rounds), default=0)):
        tried = [each for each in rounds if each.retained > position and each.accepted >= position]
        shares.append(sum(each.accepted > position for each in tried) / max(len(tried), 1))
    return shares


def with_layers(times: float, rounds: Sequence[Round], plain: float) -> float | None:
    """The speed in plain decoding's where a step takes ``times`` as long; ``plain`` is one in seconds."""
    drafts = sum(each.draft_seconds for each in rounds)
    windows = sum(each.verify_seconds + each.commit_seconds for each in rounds)
    tokens = sum(each.committed for each in rounds)
    return times * plain * tokens / (times * windows + drafts) if rounds else None


def row(name: str, all_speeds: dict[str, list[float]], rounds: list[Round], layers: int) -> dict[str, Any]:
    drafting = [each for each in rounds if each.drafted]
    speeds, plain = all_speeds[name], all_speeds["plain"]
    ratios = [speed / other for speed, other in zip(speeds, plain, strict=True)]
    theirs = [speed / other for speed, other in zip(speeds, all_speeds["mlx_lm"], strict=True)]
    sets = {package: ratios[i :: len(PACKAGES)] for i, package in enumerate(PACKAGES)}
    return {
        "way": name,
        "tokens_per_s": statistics.median(speeds),
        "speedup": statistics.median(ratios),
        "over_mlx_lm": statistics.median(theirs),
        f"speedup_of_{LAYERS}_layers": with_layers(LAYERS / layers, drafting, 1 / statistics.median(plain)),
        "speedup_by_set": {package: statistics.median(values) for package, values in sets.items() if values},
        "drafting_rounds": len(drafting),
        "tokens_per_round": sum(each.committed for each in drafting) / max(len(drafting), 1),
        "retained_per_round": sum(each.retained for each in drafting) / max(len(drafting), 1),
        "acceptance": acceptance(drafting),
        "draft_ms": 1e3 * statistics.fmean([each.draft_seconds for each in drafting] or [0]),
        "verify_ms": 1e3 * statistics.fmean([each.verify_seconds for each in drafting] or [0]),
        "commit_ms": 1e3 * statistics.fmean([each.commit_seconds for each in drafting] or [0]),
    }


def run(work: Path, args: Any) -> dict[str, Any]:
    model, tokenizer = load(args.model, mtp=True)
    files = for_mlx_lm(args.model, work / "float32")
    prompts = heldout.windows(tokenizer, args.prompts, PROMPT_TOKENS)
    every = ways(model, mlx_lm.load(str(files))[0], args.tokens, args.max_steps)
    for way in every.values():  # the first run of each compiles
        decode(way, prompts[0])
    speeds: dict[str, list[float]] = {name: [] for name in every}
    rounds: dict[str, list[Round]] = {name: [] for name in every}
    order, shuffle = list(every), random.Random(0).shuffle
    for prompt in tqdm(prompts, desc="Speed", unit="prompt"):
        shuffle(order)
        for name in order:
            speed, made = decode(every[name], prompt)
            speeds[name].append(speed)
            rounds[name] += made
    return {
        "rows": [row(name, speeds, rounds[name], len(Trunk(model).layers)) for name in every],
        "prompts": args.prompts,
        "tokens": args.tokens,
        "max_steps": args.max_steps,
        "device": mx.default_device().type.name,
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", help="a folder or a repository with an MTP head; by default the embedded model")
    parser.add_argument("--prompts", type=int, default=30, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=256, help="tokens for each of them")
    parser.add_argument("--max-steps", type=int, default=default_steps(), help="drafts in a round, where gates choose")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), args)
    if report.publish(result, args):
        return
    rows = [{**each, "acceptance": " ".join(f"{share:.2f}" for share in each["acceptance"])} for each in result["rows"]]
    columns = ["way", "tokens_per_s", "speedup", "over_mlx_lm", f"speedup_of_{LAYERS}_layers", "tokens_per_round"]
    columns += ["retained_per_round", "acceptance"]
    print(report.table(rows, columns))


if __name__ == "__main__":
    main()
