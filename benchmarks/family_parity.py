"""Does every family compute what others compute from the same files?

    python benchmarks/family_parity.py [--torch-python PYTHON] [--json]

Tiny checkpoints with random weights in the published layout (benchmarks/families/checkpoints.py), in float32:

- logits, of a whole text and token by token, against mlx_lm's; and against transformers', by the interpreter PYTHON of
  an environment with torch and transformers. Without it that column is not run.
- the output of each MTP layer against a float64 reference (benchmarks/families/reference.py), and that against
  transformers' own, for the families whose MTP layers it has.
- greedy speculation, drafted by the MTP head, and by one that knows the text and errs now and then, against plain text.
- logits of plain and speculative decoding with as few slots as a token needs experts, bit for bit.

Exits with 1 where something differs by more than it may.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import load_model as mlx_lm_load
from numpy.typing import NDArray
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from benchmarks.families.checkpoints import CASES, Case, write
from benchmarks.families.reference import Reference
from benchmarks.speculation_exactness import GAP
from benchmarks.streaming_exactness import decode, differences
from strata_mlx import RetentionPolicy, SpeculativeDecoder, load
from strata_mlx.engine import generate_step
from strata_mlx.experts.streaming import streaming_of
from strata_mlx.models import supported
from strata_mlx.models.trunk import Hidden, Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.speculation.draft import Step

TOLERANCE = {"mlx_lm": 1e-4, "transformers": 1e-3, "mtp": 1e-4, "reference_to_transformers": 1e-4}
TORCH_LOGITS = report.ROOT / "benchmarks" / "families" / "torch_logits.py"
SEQUENCES, LENGTH, PREFILL = 2, 48, 24
PROMPTS, TOKENS, DRAFTS = 3, 48, 3
Floats = NDArray[Any]


class Rehearsed:
    """A drafter that knows ``text``, and errs at every fifth token: rounds of all lengths are accepted."""

    def __init__(self, text: Sequence[int]):
        self._text, self._seen = text, 1

    def observe(self, tokens: mx.array, hidden: Hidden) -> None:  # noqa: ARG002
        self._seen += tokens.size

    def catch_up(self) -> list[mx.array]:
        return []

    def steps(self) -> Iterator[Step]:
        for position in range(self._seen, len(self._text)):
            token = self._text[position] ^ (position % 5 == 0)
            yield Step(mx.array([token], mx.uint32), mx.array(1.0))


def make_inputs(case: Case, folder: Path) -> dict[str, Floats]:
    """A text, what comes after each of its tokens, and hidden states, also as a file in the checkpoint's folder."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, 256, (SEQUENCES, LENGTH + 1))
    hidden = rng.standard_normal((SEQUENCES, LENGTH, case.config["hidden_size"]), np.float32)
    inputs: dict[str, Floats] = {"tokens": text[:, :-1], "next": text[:, 1:], "hidden": hidden}
    np.savez(folder / "inputs.npz", allow_pickle=False, **inputs)
    return inputs


def ask_transformers(python: str, work: Path) -> dict[str, Any]:
    """Have transformers compute all checkpoints in ``work``; its versions, and families that it does not have."""
    done = subprocess.run([python, str(TORCH_LOGITS), str(work)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{python}: exit code {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads((work / "torch.json").read_text())
    return result


def from_transformers(folder: Path) -> dict[str, Floats]:
    file = folder / "torch.npz"
    return dict(np.load(file)) if file.exists() else {}


def mlx_lm_model(case: Case, folder: Path) -> nn.Module:
    # Not strict: mlx_lm leaves MTP tensors over, of DeepSeek and of GLM's second layer. Were one of the trunk missing,
    # then transformers, which is loaded strictly, would compute something else.
    return mlx_lm_load(folder, strict=case.family not in ("deepseek_v3", "glm4_moe"))[0]


def both_ways(model: nn.Module, tokens: Floats) -> list[Floats]:
    """Logits ``[B, T, V]`` of the whole text, and of a prompt and single tokens after it."""
    cache = make_cache(model)
    stepwise = [np.array(model(mx.array(piece), cache=cache)) for piece in pieces(tokens)]
    return [np.array(model(mx.array(tokens))), np.concatenate(stepwise, axis=1)]


def pieces(array: Floats) -> list[Floats]:
    return np.split(array, range(PREFILL, array.shape[1]), axis=1)


def compare_head(case: Case, model: nn.Module, folder: Path, inputs: dict[str, Floats]) -> dict[str, Any]:
    """Each MTP layer's output and its logits, at once and in pieces. The first is given random hidden states, another
    the output of the layer before it.
    """
    reference, theirs, trunk, head = Reference.open(folder), from_transformers(folder), Trunk(model), model.mtp
    expected = reference_heads(reference, case, inputs)
    outside = [largest(theirs[f"mtp.{i}"], wanted) for i, wanted in enumerate(expected) if f"mtp.{i}" in theirs]
    hidden, worst = inputs["hidden"], 0.0
    for number, wanted in enumerate(expected):
        embedding, cache = np.array(head.embed(trunk, mx.array(inputs["next"]), number)), head.make_cache()
        both = zip(pieces(embedding), pieces(hidden), strict=True)
        stepwise = [head(mx.array(e), mx.array(h), cache, number) for e, h in both]
        output = head(mx.array(embedding), mx.array(hidden), head=number)
        for found in (output, mx.concatenate(stepwise, axis=1)):
            logits = np.array(head.logits(trunk, found, number))
            worst = max(worst, largest(np.array(found), wanted), largest(logits, reference.logits(number, wanted)))
        hidden = np.array(output)
    return {"mtp": worst, "reference_to_transformers": max(outside) if outside else None}


def reference_heads(reference: Reference, case: Case, inputs: dict[str, Floats]) -> list[Floats]:
    output, result = inputs["hidden"].astype(np.float64), []
    for number in range(case.heads):
        output = reference.head(number, reference.embed(inputs["next"]), output)
        result.append(output)
    return result


def speculate(case: Case, model: nn.Module, prompts: list[list[int]]) -> dict[str, int]:
    """Greedy text by the head's drafts and by rehearsed ones, up to where it parts from plain text."""
    result = {"tokens": 0, "mismatches": 0, "within_gap": 0, "drafted": 0, "accepted": 0}
    for prompt in prompts:
        plain = list(generate_step(mx.array(prompt), model, max_tokens=TOKENS))
        rehearsed = Rehearsed([*prompt, *(token for token, _ in plain)])
        for drafter in (rehearsed, None)[: 2 if case.heads else 1]:
            decoder = SpeculativeDecoder(
                model,
                prompt=prompt,
                max_tokens=TOKENS,
                max_steps=DRAFTS,
                retention=RetentionPolicy(0.0),
                drafter=drafter,
            )
            for found, (expected, logprobs) in zip(decoder, plain, strict=True):
                result["tokens"] += 1
                if found.token != expected:
                    second, best = np.sort(np.array(logprobs))[-2:].tolist()
                    result["mismatches" if best - second > GAP else "within_gap"] += 1
                    break
            decoder.close()
            result["drafted"] += decoder.summary.drafted
            result["accepted"] += decoder.summary.accepted
    return result


def stream(case: Case, folder: Path, model: nn.Module, prompts: list[list[int]]) -> dict[str, int]:
    """Rows of logits that are not those of the model in memory, with a slot for each expert of a single token."""
    slots = case.config["num_experts_per_tok"]
    streamed, _ = load(folder, mtp=bool(case.heads), slots=slots)
    streaming = streaming_of(streamed)
    assert streaming is not None
    rows = count = 0
    for way in ("plain", "mtp")[: 2 if case.heads else 1]:
        for prompt in prompts:
            expected, found = (decode(which, prompt, TOKENS // 2, way) for which in (model, streamed))
            rows += sum(map(len, expected))
            count += differences(found, expected)
    return {"slots": slots, "rows": rows, "differences": count, "misses": streaming.traffic().misses}


def largest(found: Floats, expected: Floats) -> float:
    """Difference; infinite where something is not a number."""
    difference = float(np.abs(found - expected).max())
    return difference if np.isfinite(difference) else float("inf")


def check(case: Case, folder: Path, inputs: dict[str, Floats], otherwise: str) -> dict[str, Any]:
    """Everything about one checkpoint. otherwise: what is said where transformers has computed nothing."""
    model, _ = load(folder, mtp=bool(case.heads))
    prompts = [inputs["tokens"][0, start : start + 8 + 7 * start].tolist() for start in range(PROMPTS)]
    ours, mlx_lm = (both_ways(which, inputs["tokens"]) for which in (model, mlx_lm_model(case, folder)))
    torch = from_transformers(folder).get("logits")
    return {
        "checkpoint": case.name,
        "family": case.family,
        "mtp_layers": case.heads,
        "mlx_lm": max(map(largest, ours, mlx_lm)),
        "transformers": otherwise if torch is None else max(largest(logits, torch) for logits in ours),
        "mlx_lm_to_transformers": None if torch is None else max(largest(logits, torch) for logits in mlx_lm),
        **(compare_head(case, model, folder, inputs) if case.heads else {}),
        "speculation": speculate(case, model, prompts),
        "streaming": stream(case, folder, model, prompts),
    }


def holds(row: dict[str, Any]) -> bool:
    """Whether nothing in a row differs by more than it may; what was not run does not."""
    near = all(row[name] <= most for name, most in TOLERANCE.items() if isinstance(row.get(name), float))
    return near and row["speculation"]["mismatches"] == row["streaming"]["differences"] == 0


def run(work: Path, cases: Sequence[Case], torch_python: str | None) -> dict[str, Any]:
    folders = [write(case, work / str(number)) for number, case in enumerate(cases)]
    inputs = [make_inputs(case, folder) for case, folder in zip(cases, folders, strict=True)]
    torch = ask_transformers(torch_python, work) if torch_python else None
    rows = []
    progress = tqdm(zip(cases, folders, inputs, strict=True), "Families", len(cases), unit="checkpoint", disable=None)
    for case, folder, of_case in progress:
        absent = torch is not None and case.family in torch["missing"]
        rows.append(check(case, folder, of_case, "not in this version" if absent else "not run"))
    missing = sorted(set(supported()) - {case.family for case in cases})
    return {
        "passed": not missing and all(holds(row) for row in rows),
        "tolerance": TOLERANCE,
        "versions": {**{name: version(name) for name in ("mlx", "mlx-lm")}, **(torch["versions"] if torch else {})},
        "families_without_a_checkpoint": missing,
        "rows": rows,
    }


def show(result: dict[str, Any]) -> None:
    lines = []
    for row in result["rows"]:
        largest_of = {name: f"{row[name]:.1e}" for name in TOLERANCE if isinstance(row.get(name), float)}
        exact = {"speculation": row["speculation"]["mismatches"], "streaming": row["streaming"]["differences"]}
        lines.append({**row, **largest_of, **exact})
    print(report.table(lines, ("checkpoint", *TOLERANCE, "speculation", "streaming")))
    print("versions:", ", ".join(f"{name} {number}" for name, number in result["versions"].items()))
    if result["families_without_a_checkpoint"]:
        print("families without a checkpoint:", ", ".join(result["families_without_a_checkpoint"]))
    print("passed" if result["passed"] else "failed")


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--torch-python", metavar="PYTHON", help="interpreter of an environment with transformers")
    args = parser.parse_args()
    if args.keep and not args.torch_python:
        parser.error("--keep: only a complete result is kept; give --torch-python too")
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), CASES, args.torch_python)
    if not report.publish(result, args):
        show(result)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
