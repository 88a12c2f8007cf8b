"""What every benchmark script does the same way: where results are kept and how they are shown."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# The unquantised original of the embedded model, where a developer has it beside the repository.
ORIGINAL = ROOT.parent / "shared" / "demo-model"


def environment() -> dict[str, str]:
    """Of a process of its own that finds the repository, and never asks a hub."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def ring_hosts(ranks: int, folder: Path) -> Path:
    """A file of hosts for so many ranks of MLX's ring on this machine, in ``folder``."""
    hosts = folder / "ring.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]))
    return hosts


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with ``--json`` and ``--keep``; tables are for people, JSON for programs."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    result.add_argument("--keep", metavar="NAME", help="write the result to benchmarks/results/NAME.json")
    return result


def publish(result: dict[str, Any], args: argparse.Namespace) -> bool:
    """Do what ``--keep`` and ``--json`` ask for; whether nothing is left to show."""
    if args.keep:
        keep(args.keep, result)
    if args.json:
        print(json.dumps(result))
    return bool(args.json)


def table(rows: Iterable[dict[str, Any]], columns: Sequence[str]) -> str:
    """Rows as aligned text under ``columns``; numbers get four significant digits after the point at most."""
    cells = [list(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)
    return "\n".join(lines)


def keep(name: str, report: dict[str, Any]) -> None:
    """Write a report to benchmarks/results, to be committed."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else "" if value is None else str(value)
