"""Read a JSON file that a user names."""

import json
from pathlib import Path
from typing import Any

from .errors import InputError


def read_json(path: Path, what: str, advice: str = "") -> Any:
    """The value in the file at ``path``.

    Raises InputError that begins with ``what`` and ends with ``advice``, where it cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{what}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what}: not valid JSON ({error}){f'; {advice}' if advice else ''}") from error
