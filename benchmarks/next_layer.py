"""Whether it would pay to read the experts of the next layer while this one is computed.

    python benchmarks/next_layer.py [--documents 24] [--tokens 512] [--slots 32 64] [--json] [--keep NAME]

The next layer's router, given what this layer's router sees, guesses which experts the next layer will need: there is
nothing between the two but this layer's experts and the next one's attention. Held-out documents go through the
embedded model, and what each layer selects, and what was guessed, through slot tables and eviction as streaming has
them, one row after another. For a number of guesses per row, those that are not in memory are read ahead, and what is
missing then is read on demand.

    precision     share of the guesses that the layer selects
    misses        picks that have to be read on demand, of all; 0 guesses is what streaming does
    ahead         experts read ahead, per pick, and the share of these that the layer selects (useful)
    reads         of both kinds, per pick
    gain 0.1 ..   speed with reading ahead over speed without, at most, with so many guesses in every row: for an
                  expert that takes 0.1 .. times as long to read as a layer takes to compute, one at a time, where
                  guessing costs nothing, nor does anything else, and a layer is computed while is read ahead

The first layer, which nobody guesses, takes no part.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from strata_mlx import load
from strata_mlx.experts.eviction import DEFAULT_EVICTION, make_eviction
from strata_mlx.experts.table import SlotTable
from strata_mlx.models.moe import blocks

GUESSES = (0, 2, 4, 6, 8, 10, 12, 16, 24, 32)
READ_TIMES = (0.03, 0.1, 0.3, 1.0, 3.0)  # of an expert, over the time that a layer takes to compute
Ranked = NDArray[np.intp]  # [T, E]: experts, the likeliest first


class Seen(nn.Module):
    """A router's gate, and what it was given last."""

    def __init__(self, gate: nn.Module):
        super().__init__()
        self.gate = gate
        self.x = mx.zeros(0)

    def __call__(self, x: mx.array) -> mx.array:
        self.x = x
        return self.gate(x)


def rankings(model: nn.Module, tokens: Sequence[int]) -> list[tuple[Ranked, Ranked]]:
    """For each layer but the first, what its router ranks and what was guessed of that a layer before."""
    layers = blocks(model)
    gates = [Seen(block.gate) for block in layers]
    for block, gate in zip(layers, gates, strict=True):
        block.gate = gate
    try:
        mx.eval(model(mx.array([tokens])))
    finally:
        for block, gate in zip(layers, gates, strict=True):
            block.gate = gate.gate
    return [(_ranked(gate.gate(gate.x)), _ranked(gate.gate(before.x))) for before, gate in pairwise(gates)]


def _ranked(logits: mx.array) -> Ranked:
    return np.array(mx.argsort(-logits[0], axis=-1)).astype(np.intp)


def replay(chosen: Ranked, guessed: Ranked, table: SlotTable) -> dict[str, int]:
    """Let the rows ``chosen [T, K]`` go through ``table``, and read ``guessed [T, M]``, the likeliest first, ahead."""
    misses = ahead = useful = right = 0
    for row, guess in zip(chosen.tolist(), guessed.tolist(), strict=True):
        right += len(set(row).intersection(guess))
        absent = _absent(table, guess)[: table.room(guess)]
        table.commit(table.reserve(absent, guess))
        ahead, useful = ahead + len(absent), useful + len(set(row).intersection(absent))
        missing = _absent(table, row)
        table.commit(table.reserve(missing, row))
        table.used([row])
        misses += len(missing)
    counts = {"picks": chosen.size, "guesses": guessed.size, "right": right}
    return {**counts, "misses": misses, "ahead": ahead, "useful": useful}


def _absent(table: SlotTable, experts: Sequence[int]) -> list[int]:
    return [expert for expert, slot in zip(experts, table.slots_of(experts), strict=True) if slot < 0]


def rows(documents: Sequence[Sequence[tuple[Ranked, Ranked]]], top_k: int, slots: int) -> Iterator[dict[str, Any]]:
    """A row for each number of guesses; slots stay filled from one document to the next."""
    before: float | None = None
    for count in GUESSES:
        total: Counter[str] = Counter()
        for layer in zip(*documents, strict=True):
            experts = layer[0][0].shape[-1]
            table = SlotTable(experts, slots, make_eviction(DEFAULT_EVICTION, experts))
            for actual, guess in layer:
                total.update(replay(actual[:, :top_k], guess[:, :count], table))
        misses, ahead = total["misses"] / total["picks"], total["ahead"] / total["picks"]
        before = misses if before is None else before
        yield {
            "slots": slots,
            "guesses": count,
            "precision": total["right"] / total["guesses"] if count else None,
            "misses": misses,
            "ahead": ahead,
            "useful": total["useful"] / total["ahead"] if count else None,
            "reads": misses + ahead,
            **{f"gain {time}": gain(before * top_k, misses * top_k, ahead * top_k, time) for time in READ_TIMES},
        }


def gain(before: float, misses: float, ahead: float, read_time: float) -> float:
    """Speed over that without guesses, where a layer takes a time of 1 to compute, misses ``before`` experts without
    guesses and ``misses`` with them, and so many are read ``ahead``.
    """
    return (1 + before * read_time) / (max(1.0, ahead * read_time) + misses * read_time)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512, help="of each document")
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 64], help="of 128 experts per layer")
    args = parser.parse_args()
    model, tokenizer = load()
    windows = tqdm(heldout.windows(tokenizer, args.documents, args.tokens), desc="Documents", disable=None)
    documents = [rankings(model, tokens) for tokens in windows]
    top_k = blocks(model)[0].router.top_k
    found = [row for slots in args.slots for row in rows(documents, top_k, slots)]
    result = {"documents": args.documents, "tokens": args.tokens, "eviction": DEFAULT_EVICTION, "rows": found}
    if not report.publish(result, args):
        print(report.table(found, tuple(found[0])))


if __name__ == "__main__":
    main()
