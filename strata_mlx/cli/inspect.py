"""Show what a checkpoint holds and what memory it needs. Reads headers only, unless --probe-mtp or --disk is given.

strata_mlx inspect
strata_mlx inspect --model FOLDER --json
strata_mlx inspect --model FOLDER --memory 12GB --context 8192
strata_mlx inspect --model FOLDER --disk
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from .experts import add_memory
from .options import add_model, number

if TYPE_CHECKING:
    from ..models.plan import ModelPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--context", type=number(int, 1), default=4096, help="tokens of context to reckon memory for")
    add_memory(parser)
    parser.add_argument(
        "--probe-mtp",
        action="store_true",
        help="run the model, and measure which hidden states its MTP head takes (mtp_hidden in config.json)",
    )
    parser.add_argument(
        "--disk",
        action="store_true",
        help="measure how fast the disk with the model is read, and remember it for streaming (some ten seconds)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from ..checkpoint import Checkpoint
    from ..hub import find_model
    from ..models.plan import plan_model
    from ..models.report import describe

    plan = plan_model(Checkpoint.open(find_model(args.model, revision=args.revision)))
    # Before anything is computed, as generate does.
    budget = {} if args.memory is None else {"budget": _budget(plan, args)}
    report = {**describe(plan, args.context), **budget}
    if args.probe_mtp:
        report["mtp_probe"] = _probe(args)
    if args.disk:
        from ..experts.disk import inspect_disk
        from ..experts.ranges import find_layers, workload

        report["disk"] = inspect_disk(workload(*find_layers(plan, None)), progress=not args.json)
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0


def _budget(plan: ModelPlan, args: argparse.Namespace) -> dict[str, Any]:
    """What generate would make of --memory."""
    from ..experts.budget import budget_bytes
    from ..experts.options import ExpertOptions
    from ..loading import load_tokenizer

    options = ExpertOptions(memory=args.memory, context=args.context)
    needs = options.needs(plan, "auto", load_tokenizer(plan.checkpoint))
    fit = needs.fit(budget_bytes(args.memory))
    return {**fit.to_dict(), "smallest": needs.smallest, "everything": needs.resident, "summary": str(fit)}


def _probe(args: argparse.Namespace) -> dict[str, Any]:
    from ..loading import load
    from ..speculation.probe import probe_hidden

    model, tokenizer = load(args.model, revision=args.revision, mtp=True)
    acceptance = probe_hidden(model, tokenizer)
    return {
        "configured": model.mtp.takes,
        "best": max(acceptance, key=acceptance.__getitem__),
        "acceptance": acceptance,
    }


def _print(report: dict[str, Any]) -> None:
    layers, memory = report["layers"], report["memory_bytes"]
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in layers["kinds"].items())
    shared = " and a shared expert" if report["shared_expert"] else ""
    mtp = f"{report['mtp_layers']} layer{'s' * (report['mtp_layers'] != 1)}" if report["mtp_layers"] else "none"
    rows = {
        "path": report["path"],
        "family": report["family"],
        "layout": report["layout"],
        "layers": f"{layers['count']} ({kinds})",
        "experts": f"{report['experts']}, top-{report['top_k']}{shared}, in {report['moe_layers']} layers",
        "MTP": mtp,
        "parameters": f"{report['parameters'] / 1e6:,.1f} M, {report['active_parameters'] / 1e6:,.1f} M used per token",
    }
    for name, value in rows.items():
        print(f"{name:12}{value}")
    print(f"\n{'part':30}{'MB':>12}{'share':>9}  precision")
    for part, row in report["parts"].items():
        share = row["bytes"] / report["bytes"]
        print(f"{part:30}{row['bytes'] / 1e6:12,.3f}{share:9.1%}  {', '.join(row['precision'])}")
    print(f"{'total':30}{report['bytes'] / 1e6:12,.3f}{1:9.1%}")
    total = sum(memory.values())
    print(
        f"\nMemory on this device with {report['context']} tokens of context: {total / 1e6:,.1f} MB ({_in_mb(memory)})"
    )
    if budget := report.get("budget"):
        smallest, everything = (budget[name] / 1e6 for name in ("smallest", "everything"))
        print(f"\n{budget['summary']} ({_in_mb(budget['bytes'])})")
        print(f"The smallest budget is {smallest:,.1f} MB; from {everything:,.1f} MB on all experts are in memory.")
    if probe := report.get("mtp_probe"):
        rates = ", ".join(f"{rate:.1%} {kind} the final norm" for kind, rate in probe["acceptance"].items())
        print(f"MTP drafts accepted with hidden states taken {rates}: mtp_hidden should be {probe['best']!r}, ", end="")
        print("as it is" if probe["best"] == probe["configured"] else f"not {probe['configured']!r}")
    if "disk" in report:
        _print_disk(report["disk"])


def _print_disk(disk: dict[str, Any]) -> None:
    threads = sorted({rate["threads"] for rate in disk["rates"]})
    print(f"\nGB/s from {disk['device']}\n{'read at a time, by threads':30}", *(f"{n:7}" for n in threads))
    rows: dict[tuple[str, int], dict[int, float]] = {}
    for rate in disk["rates"]:
        kind = "page cache" if rate["cached"] else "past the page cache" if rate["direct"] else "disk"
        rows.setdefault((kind, rate["block"]), {})[rate["threads"]] = rate["bytes_per_second"] / 1e9
    for (kind, block), row in rows.items():
        print(f"{kind:20}{block / 1024:6.0f} KiB", *(f"{row[n]:7.2f}" for n in threads))
    chosen = disk["chosen"]
    how = "past" if chosen["direct"] else "through"
    print(f"For reads of {disk['request'] / 1024:.0f} KiB: {chosen['threads']} thread", end="")
    print(f"{'s' * (chosen['threads'] > 1)}, {how} the page cache: {disk['reason']}")


def _in_mb(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size / 1e6:,.1f}" for name, size in sizes.items() if size)
