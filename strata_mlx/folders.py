"""Where things are kept that can be made again."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache for this package."""
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default).expanduser() / "strata_mlx"


def write_whole(path: Path, content: bytes) -> None:
    """At once or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        unfinished = Path(file.name)
        try:
            file.write(content)
            file.flush()
            unfinished.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
