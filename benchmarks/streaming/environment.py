"""A virtual environment for the peers, so that none of them is a dependency of the project."""

from __future__ import annotations

import subprocess
import sys
import venv
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PEERS = {"amperor-strata": "0.1.0", "bigrig": "0.9.1", "boyle": "0.2.1"}
_SHARED = ("mlx", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "numpy")  # the same for everybody


def requirements() -> list[str]:
    """The peers, pinned, and what this environment has of the packages that decide the speed of everybody."""
    wanted = [f"{name}=={number}" for name, number in PEERS.items()]
    for name in _SHARED:
        with suppress(PackageNotFoundError):  # a backend of another device
            wanted.append(f"{name}=={version(name)}")
    return wanted


def make_environment(folder: Path) -> str:
    """Install the peers from PyPI into ``folder``, unless they are there, and return the path of its Python."""
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    complete = folder / "installed.txt"
    wanted = "\n".join(requirements())
    if not complete.exists() or complete.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements()]
        subprocess.run(command, check=True, stdout=sys.stderr)
        complete.write_text(wanted)
    return str(python)
