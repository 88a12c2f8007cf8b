"""What each rank of a test does: decode with the checkpoint in argv[1] in every way, and write what comes out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from strata_mlx import Ranks, RoutingPolicy, expert_parallel, load, stream_generate
from strata_mlx.models.moe import make_routing, set_routing
from strata_mlx.policy import Policy
from strata_mlx.server.engine import Engine
from strata_mlx.server.jobs import Job, Piece
from strata_mlx.speculation.sampling import Sampling

PROMPT = [(i * i * 31 + 7 * i) % 256 for i in range(40)]  # more rows than are gathered
TOKENS = 24
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"mtp": False},
    "drafting": {"mtp": True},
    "by the clock": {"mtp": "auto"},
    "sampled": {"mtp": True, "sampler": Sampling(0.8)},
}


def decode(model: Any, tokenizer: Any, **options: Any) -> list[int]:
    mx.random.seed(7)
    return [each.token for each in stream_generate(model, tokenizer, PROMPT, TOKENS, **options)]


def serve(model: Any, tokenizer: Any, ranks: Ranks | None) -> list[str]:
    """The texts of requests that are decoded together, after one that nobody reads to its end."""
    engine = Engine(model, tokenizer, policy=Policy(mtp="auto"))
    if ranks and not ranks.leads:
        engine.follow()
        return []
    engine.start()
    left = engine.submit(Job(tuple(PROMPT), 400))
    next(iter(left))
    left.cancel()
    streams = [engine.submit(Job(tuple(PROMPT[start:]), 12, logit_bias={3: 2.0})) for start in range(3)]
    texts = ["".join(item.text for item in stream if isinstance(item, Piece)) for stream in streams]
    engine.close()
    return texts


def run(folder: Path, slots: int | None, ranks: Ranks | None) -> dict[str, Any]:
    model, tokenizer = load(folder, mtp=True, slots=slots, ranks=ranks)
    found: dict[str, Any] = {way: decode(model, tokenizer, **options) for way, options in WAYS.items()}
    found["served"] = serve(model, tokenizer, ranks)
    found["misses"] = model.streaming.traffic().misses if model.streaming else 0
    set_routing(model, make_routing(model, RoutingPolicy(moce_bonus=0.5), None))
    found["biased"] = decode(model, tokenizer, mtp=False)
    return found


def main() -> None:
    with expert_parallel(timeout=60) as ranks:
        print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), ranks)))


if __name__ == "__main__":
    main()
