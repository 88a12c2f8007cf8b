"""Choose the precision of the embedded model: perplexity and draft agreement on held-out text by bits and group size.

    python benchmarks/demo_model_precision.py --original FOLDER          # measure every candidate
    python benchmarks/demo_model_precision.py --original FOLDER --make   # and make strata_mlx/embedded anew
    python benchmarks/demo_model_precision.py                            # measure the embedded files, show the kept
    table

FOLDER is the bfloat16 original in the Hugging Face layout; it does not fit into the repository.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from strata_mlx.checkpoint import Checkpoint
from strata_mlx.checkpoint.convert import Conversion, convert
from strata_mlx.checkpoint.precision import Precision, PrecisionPlan
from strata_mlx.device import arrange
from strata_mlx.hub import EMBEDDED
from strata_mlx.loading import load_model, load_tokenizer
from strata_mlx.models.plan import ModelPlan, plan_model

NAME = "demo_model_precision"
DOCUMENTS, LENGTH, BATCH = 16, 385, 8
LIMIT_PERCENT, LIMIT_MB = 1.0, 30.0
REST = ("embedding", "lm_head", "attention", "linear_attention", "shared_expert", "router")
SMALL = Precision(4, 32)
# What the embedded model is made with: the smallest candidate whose every part costs nothing measurable.
CHOICE = PrecisionPlan(Precision(8, 64), {"experts": SMALL})


def candidates() -> Iterator[tuple[str, PrecisionPlan | None]]:
    """Each part alone at falling precision, then whole models."""
    yield "bfloat16 (original)", None
    for bits in (4, 5, 6, 8):
        yield f"experts {bits}/32", PrecisionPlan(None, {"experts": Precision(bits, 32)})
    for part in REST:
        for bits in (4, 8):
            yield f"{part} {bits}/64", PrecisionPlan(None, {part: Precision(bits, 64)})
    yield "all 4/32", PrecisionPlan(SMALL)
    yield "all 4/32, router 8/64", PrecisionPlan(SMALL, {"router": Precision(8, 64)})
    yield (
        "experts 4/32, rest 6/64, router 8/64",
        PrecisionPlan(Precision(6, 64), {"experts": SMALL, "router": Precision(8, 64)}),
    )
    yield "experts 4/32, rest 8/64", CHOICE
    yield "experts 5/32, rest 8/64", PrecisionPlan(Precision(8, 64), {"experts": Precision(5, 32)})


class Quality(NamedTuple):
    perplexity: float
    draft_agreement: float  # how often the MTP head's first draft is the trunk's own greedy token


def measure(model: nn.Module, text: mx.array) -> Quality:
    """Teacher-forced over ``text`` ``[N, T]``."""
    loss, tokens, agreed, drafted = 0.0, 0, 0, 0
    for start in range(0, text.shape[0], BATCH):
        x = text[start : start + BATCH]
        hidden = model.model(x[:, :-1])
        logits = model.lm_head(hidden)
        drafts = model.lm_head(model.mtp(model.model.embed_tokens(x[:, 1:-1]), hidden[:, :-1])).argmax(-1)
        agree = drafts == logits[:, 1:].argmax(-1)
        loss += float(nn.losses.cross_entropy(logits, x[:, 1:], reduction="sum").item())
        agreed += int(agree.sum().item())
        tokens, drafted = tokens + logits.shape[0] * logits.shape[1], drafted + agree.size
    return Quality(math.exp(loss / tokens), agreed / drafted)


class Rounder:
    """Puts the original's weights, rounded as a precision plan would store them, into a float32 model."""

    def __init__(self, plan: ModelPlan):
        self.plan, self.model = plan, load_model(plan, "float32")
        read = plan.checkpoint.reader()
        modules = dict(plan.model.named_modules())
        self.weights = {
            path: (modules[path], plan.recipes[f"{path}.weight"].build(read))
            for path in modules
            if hasattr(modules[path], "to_quantized")
        }

    def apply(self, precision: PrecisionPlan | None) -> None:
        for path, (module, weight) in self.weights.items():
            chosen = precision.of(path, weight.shape[-1]) if precision else None
            if chosen:
                codes, scales, biases = mx.quantize(weight, chosen.group_size, chosen.bits)
                scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)  # bfloat16 would round again
                weight = mx.dequantize(codes, scales, biases, chosen.group_size, chosen.bits)
            module.weight = arrange(module, weight.astype(mx.float32))
        mx.eval(self.model.parameters())


def measure_candidates(original: Path) -> list[dict[str, Any]]:
    checkpoint = Checkpoint.open(original)
    plan = plan_model(checkpoint)
    rounder, text = Rounder(plan), _text(checkpoint)
    rows: list[dict[str, Any]] = []
    for name, precision in tqdm(list(candidates()), desc="Precisions"):
        rounder.apply(precision)
        quality = measure(rounder.model, text)
        conversion = Conversion(plan, precision)
        size = sum(map(conversion.nbytes, conversion.files().values())) / 1e6
        base = rows[0]["perplexity"] if rows else quality.perplexity
        rows.append(
            {
                "precision": name,
                "megabytes": size,
                "perplexity": quality.perplexity,
                "percent": 100 * (quality.perplexity / base - 1),
                "draft_agreement": quality.draft_agreement,
                "chosen": precision is CHOICE,
            }
        )
    return rows


def make(original: Path) -> None:
    """Convert the original into strata_mlx/embedded."""
    for file in EMBEDDED.glob("*"):
        file.unlink()
    if EMBEDDED.exists():
        EMBEDDED.rmdir()
    convert(Conversion(plan_model(Checkpoint.open(original)), CHOICE), EMBEDDED)


def measure_embedded() -> dict[str, Any]:
    """The files in the package as they are, computed from their quantised weights."""
    checkpoint = Checkpoint.open(EMBEDDED)
    quality = measure(load_model(plan_model(checkpoint)), _text(checkpoint))
    files = {file.name: file.stat().st_size for file in sorted(EMBEDDED.iterdir())}
    return {**quality._asdict(), "megabytes": sum(files.values()) / 1e6, "files": files}


def _text(checkpoint: Checkpoint) -> mx.array:
    return mx.array(heldout.windows(load_tokenizer(checkpoint), DOCUMENTS, LENGTH))


def main() -> None:
    parser = report.parser(__doc__)
    default = report.ORIGINAL if report.ORIGINAL.exists() else None
    parser.add_argument("--original", type=Path, default=default, help=f"bfloat16 checkpoint (default: {default})")
    parser.add_argument("--make", action="store_true", help="write strata_mlx/embedded")
    args = parser.parse_args()
    if args.make and not args.original:
        parser.error("--make needs --original")
    if args.make:
        make(args.original)
    kept = json.loads((report.RESULTS / f"{NAME}.json").read_text())["rows"] if not args.original else None
    rows = kept or measure_candidates(args.original)
    choice = next(row for row in rows if row["chosen"])
    embedded = measure_embedded()
    embedded["percent"] = 100 * (embedded["perplexity"] / rows[0]["perplexity"] - 1)
    result = {
        "rows_measured_now": kept is None,
        "rows": rows,
        "choice": choice["precision"],
        "command": "strata_mlx convert --model ORIGINAL --mlx-path strata_mlx/embedded -q --q-bits 8 --q-part "
        "experts=4:32",
        "embedded": embedded,
        "within_limits": embedded["percent"] <= LIMIT_PERCENT and embedded["megabytes"] <= LIMIT_MB,
        "positions": DOCUMENTS * (LENGTH - 1),
    }
    if report.publish(result, args):
        return
    print(report.table(rows, ("precision", "megabytes", "perplexity", "percent", "draft_agreement", "chosen")))
    print(
        f"\nembedded: {embedded['megabytes']:.2f} MB, perplexity {embedded['perplexity']:.4f} "
        f"({embedded['percent']:+.3f} %), ",
        end="",
    )
    print(f"made with\n  {result['command']}")


if __name__ == "__main__":
    main()
