"""Generate within memory budgets, each in a process of its own: peak memory against the budget, and the text.

    python benchmarks/memory_budget.py [--model FOLDER] [--json]

The budgets go from the smallest that works to the one in which everything is in memory. The text must be the one that
is generated without a budget, and a budget below the smallest must be refused. The prompt is held-out text; it has more
tokens than a chunk of the smallest budget.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from strata_mlx.experts.sizes import parse_size

# A command in a process of its own, which says in the last line how much memory it has had at most.
RUN = """
import json, sys
import mlx.core as mx
from strata_mlx.cli import main
from strata_mlx.experts import system
try:
    main(sys.argv[1:])
except SystemExit as end:
    gpu = system.on_gpu_of_its_own()
    print(json.dumps({"code": end.code, "peak": mx.get_peak_memory() if gpu else system.peak()}))
"""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the way from the smallest budget to the one in which everything fits
TOLERANCE = 1.05


def strata(*arguments: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Run ``strata_mlx ARGUMENTS --json``: what it printed, how it ended, and what it wrote to standard error."""
    command = [sys.executable, "-c", RUN, *arguments, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=report.ROOT, check=True)
    *printed, last = ended.stdout.splitlines()
    return json.loads(printed[0]) if printed else {}, json.loads(last), ended.stderr.strip()


def row(arguments: Sequence[str], budget: int, text: str) -> dict[str, Any]:
    record, end, said = strata(*arguments, "--memory", str(budget))
    if end["code"] != 0:
        return {"budget": budget, "refused": True, "message": said}
    return {
        "budget": budget,
        "refused": False,
        "peak": end["peak"],
        "peak_over_budget": end["peak"] / budget,
        "same_text": record["text"] == text,
        "slots": record["memory"]["slots"],
        "streams": record["memory"]["streams"],
        "prefill_step_size": record["memory"]["prefill_step_size"],
        "miss_rate": record["experts"] and record["experts"]["miss_rate"],
        "tokens_per_s": record["generation_tps"],
        "parts": record["memory"]["bytes"],
        "said": said,
    }


def named(refusal: str) -> str:
    """The smallest budget that a refusal names."""
    return refusal.partition("the smallest that works is ")[2].partition(" (")[0]


def run(args: Any) -> dict[str, Any]:
    model = ["--model", args.model] if args.model else []
    prompt = next(heldout.documents())[: args.characters]
    arguments = ["generate", *model, "--prompt", prompt, "--ignore-chat-template", "--max-tokens", str(args.tokens)]
    arguments += ["--mtp", args.mtp]
    plain, end, _ = strata(*arguments)
    context = plain["prompt_tokens"] + args.tokens
    _, _, refusal = strata(*arguments, "--memory", "1MB")
    inspected, _, _ = strata("inspect", *model, "--memory", "1TB", "--context", str(context))
    smallest, everything = inspected["budget"]["smallest"], inspected["budget"]["everything"]
    budgets = [round(smallest + share * (everything - smallest)) for share in SHARES]
    # The last bytes of a process differ from run to run: what a refusal names has room for that.
    budgets[0], budgets[-1] = parse_size(named(refusal)), budgets[-1] + 4_000_000
    rows = [row(arguments, budget, plain["text"]) for budget in tqdm(budgets, desc="Budgets", unit="budget")]
    below = row(arguments, round(0.97 * smallest), plain["text"])
    return {
        "rows": rows,
        "below": below,
        "without_budget": {"peak": end["peak"], "tokens_per_s": plain["generation_tps"]},
        "prompt_tokens": plain["prompt_tokens"],
        "tokens": args.tokens,
        "mtp": args.mtp,
        "worst_peak_over_budget": max(each.get("peak_over_budget", 9) for each in rows),
        "holds": all(
            not each["refused"] and each["peak_over_budget"] <= TOLERANCE and each["same_text"] for each in rows
        )
        and below["refused"],
        "scope": inspected["budget"]["scope"],
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", help="a folder or a repository; by default the embedded model")
    parser.add_argument("--characters", type=int, default=1500, help="of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="to generate")
    parser.add_argument("--mtp", choices=("on", "off"), default="off", help="draft with the model's MTP head")
    args = parser.parse_args()
    result = run(args)
    if not report.publish(result, args):
        columns = (
            "budget",
            "refused",
            "peak_over_budget",
            "same_text",
            "slots",
            "streams",
            "prefill_step_size",
            "miss_rate",
        )
        print(report.table([*result["rows"], result["below"]], columns))
    sys.exit(0 if result["holds"] else 1)


if __name__ == "__main__":
    main()
