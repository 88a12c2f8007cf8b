"""Where things are kept that can be made again, and how a file is written."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache for this package."""
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default).expanduser() / "strata_mlx"


def write_whole(path: Path, content: bytes) -> None:
    """The file appears complete or stays as it was. Raises OSError."""
    unfinished = path.with_name(f".unfinished-{os.getpid()}-{path.name}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
