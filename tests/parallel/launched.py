"""The command line with ranks that it starts itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.report import environment
from tests.parallel.processes import PATIENCE


def hostfile(folder: Path, count: int) -> Path:
    """Of ranks on this machine."""
    file = folder / "hosts.json"
    file.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * count))
    return file


def generate(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "strata_mlx", "generate", *options]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
