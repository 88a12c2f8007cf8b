"""Does streaming experts from disk change a single bit of the embedded model's logits?

Held-out prompts are continued greedily by models with few slots per layer, and every row of logits is compared with
that of the same files with all experts in memory: plain decoding and speculative decoding with the MTP head (the head's
own logits and those of rejected drafts included); least recently used and frequency eviction; 1 and 8 reading threads;
stacked experts, separate experts (Hugging Face's layout) and the packed layout.

Each value of each of these meets each slot count; --full crosses them all. With as many slots as a token needs experts,
every layer evicts all the time. At the end the weights of one expert are changed by 1 %, which must be noticed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from benchmarks.models import packed
from strata_mlx import SpeculativeDecoder, load
from strata_mlx.checkpoint import Checkpoint
from strata_mlx.experts.disk import DiskSettings
from strata_mlx.experts.streaming import streaming_of
from strata_mlx.fused.draft import FusedHead
from strata_mlx.hub import EMBEDDED
from strata_mlx.loading import load_tokenizer
from strata_mlx.models.mtp import MTPHead
from strata_mlx.models.trunk import Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.speculation import draft
from tests.tiny import hugging_face, read

SLOTS = (10, 12, 16, 32, 64, 128)
LAYOUTS, EVICTIONS, THREADS, DECODING = (
    ("stacked", "separate", "packed"),
    ("lru", "frequency"),
    (1, 8),
    ("plain", "mtp"),
)
PROMPT_TOKENS = 32
Rows = list[NDArray[np.float32]]  # [T, V] of each forward


@dataclass(frozen=True)
class Case:
    slots: int
    layout: str
    eviction: str
    threads: int
    decoding: str


def cases(slots: Sequence[int], full: bool) -> list[Case]:
    """All combinations, or three for each slot count in which each value occurs, in ever new company."""
    if full:
        return [Case(*values) for values in product(slots, LAYOUTS, EVICTIONS, THREADS, DECODING)]
    return [
        Case(
            count,
            LAYOUTS[place],
            EVICTIONS[(place + number) % 2],
            THREADS[((place + 1) // 2 + number // 2) % 2],
            DECODING[(place // 2 + number // 3) % 2],
        )
        for number, count in enumerate(slots)
        for place in range(3)
    ]


def layouts(work: Path) -> dict[str, Path]:
    """The embedded model as it is, and in the new folder ``work`` in the other layouts."""
    work.mkdir()
    return {
        "stacked": EMBEDDED,
        "separate": separate(work / "separate"),
        "packed": packed(EMBEDDED, work / "packed", mtp=True),
    }


def separate(folder: Path) -> Path:
    """The embedded model in Hugging Face's layout, in the new ``folder``."""
    shutil.copytree(EMBEDDED, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    experts = Checkpoint.open(EMBEDDED).config["num_experts"]
    for number, file in enumerate(sorted(EMBEDDED.glob("*.safetensors")), 1):
        # A norm less one has more digits than bfloat16.
        tensors = {name: a.astype(mx.float32) if "norm" in name else a for name, a in read(file).items()}
        stored = hugging_face(tensors, "separate", experts, shifted=True)
        mx.save_safetensors(str(folder / f"model-{number}.safetensors"), stored, {"format": "pt"})
    return folder


@contextmanager
def recorded() -> Iterator[Rows]:
    """All logits that are asked of a trunk, exact ones of windows and drafts too: a model without a budget would round
    those of its output head and its MTP head otherwise.
    """
    rows: list[mx.array] = []
    result: Rows = []
    original = Trunk.logits

    def logits(self: Trunk, hidden: mx.array) -> mx.array:
        rows.append(original(self, hidden))
        return rows[-1]

    with (
        patch.object(Trunk, "logits", logits),
        patch.object(Trunk, "rounded_logits", logits),
        patch.object(draft, "for_drafts", lambda head: head),
        # A graph asks for logits once, while it is made, and these are never computed.
        patch.object(FusedHead, "likeliest", MTPHead.likeliest),
    ):
        yield result
    result.extend(np.array(array.astype(mx.float32)).reshape(-1, array.shape[-1]) for array in rows)


def decode(model: nn.Module, prompt: list[int], tokens: int, decoding: str) -> Rows:
    """The logits of the prompt's last token and of all that follow."""
    with recorded() as rows:
        if decoding == "mtp":
            for _ in SpeculativeDecoder(model, prompt=prompt, max_tokens=tokens):
                pass
        else:
            trunk, cache, text = Trunk(model), make_cache(model), mx.array([prompt])
            for _ in range(tokens):
                logits = trunk.logits(trunk(text, cache).after[:, -1:])
                text = mx.argmax(logits, axis=-1)
                mx.eval(text)
    return rows


def differences(found: Rows, expected: Rows) -> int:
    """Rows that are not equal to the last bit; a forward that is missing or of another size counts in full."""
    count = 0
    for i in range(max(len(found), len(expected))):
        if i >= len(found) or i >= len(expected) or found[i].shape != expected[i].shape:
            count += max(len(rows[i]) for rows in (found, expected) if i < len(rows))
        else:
            count += int((found[i] != expected[i]).any(axis=-1).sum())
    return count


def compare(folder: Path, case: Case, prompts: list[list[int]], tokens: int, expected: dict[str, list[Rows]]) -> Any:
    model, _ = load(folder, mtp=True, slots=case.slots, eviction=case.eviction)
    streaming = streaming_of(model)
    if streaming:
        streaming.store.settings = DiskSettings(case.threads)
    found = [decode(model, prompt, tokens, case.decoding) for prompt in prompts]
    pairs = list(zip(found, expected[case.decoding], strict=True))
    traffic = streaming.traffic() if streaming else None
    return {
        "slots": case.slots,
        "layout": case.layout,
        "eviction": case.eviction,
        "threads": case.threads,
        "decoding": case.decoding,
        "rows": sum(len(rows) for _, of_prompt in pairs for rows in of_prompt),
        "differences": sum(differences(*pair) for pair in pairs),
        "hits": traffic.hits if traffic else None,
        "misses": traffic.misses if traffic else None,
    }


def changed_expert(folder: Path, prompts: list[list[int]], expected: list[Rows]) -> dict[str, Any]:
    """Change the weights of an expert that the first prompt needs by 1 %."""
    model, _ = load(slots=min(SLOTS))
    decode(model, prompts[0], 1, "plain")
    streaming = streaming_of(model)
    assert streaming is not None
    expert = int(streaming.tables[0].resident.nonzero()[0][0])
    shutil.copytree(EMBEDDED, folder)
    names = [f"model.layers.0.mlp.switch_mlp.down_proj.{kind}" for kind in ("scales", "biases")]
    for file in folder.glob("*.safetensors"):
        tensors = read(file)
        for name in set(names) & tensors.keys():
            factors = mx.ones((len(tensors[name]), 1, 1)).at[expert].add(0.01)
            tensors[name] = (tensors[name].astype(mx.float32) * factors).astype(tensors[name].dtype)
        mx.eval(tensors)
        mx.save_safetensors(str(file), tensors, {"format": "mlx"})
    model, _ = load(folder, slots=min(SLOTS), mtp=True)
    found = decode(model, prompts[0], len(expected[0]), "plain")
    return {"layer": 0, "expert": expert, "differences": differences(found, expected[0])}


def run(work: Path, args: Any) -> dict[str, Any]:
    folders = layouts(work / "layouts")
    prompts = heldout.windows(load_tokenizer(Checkpoint.open(EMBEDDED)), args.prompts, PROMPT_TOKENS)
    expected = {
        layout: {way: [decode(model, prompt, args.tokens, way) for prompt in prompts] for way in DECODING}
        for layout, model in ((layout, load(folder, mtp=True)[0]) for layout, folder in folders.items())
    }
    rows = [
        compare(folders[case.layout], case, prompts, args.tokens, expected[case.layout])
        for case in tqdm(cases(args.slots, args.full), desc="Exactness", unit="case")
    ]
    return {
        "differences": sum(row["differences"] for row in rows),
        "rows_compared": sum(row["rows"] for row in rows),
        "prompts": args.prompts,
        "tokens": args.tokens,
        "changed_expert": changed_expert(work / "changed", prompts, expected["stacked"]["plain"]),
        "cases": rows,
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=20, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens for each of them")
    parser.add_argument("--slots", type=int, nargs="+", default=list(SLOTS), help="slots per layer")
    parser.add_argument("--full", action="store_true", help="every combination, not three for each slot count")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), args)
    if report.publish(result, args):
        return
    print(f"rows of logits compared {result['rows_compared']}, differences {result['differences']}")
    print(f"with one expert changed by 1 %: {result['changed_expert']['differences']} differences\n")
    print(report.table(result["cases"], tuple(result["cases"][0])))


if __name__ == "__main__":
    main()
