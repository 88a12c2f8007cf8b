"""Values that a person or another program wrote, in JSON or as arguments: read and checked, with one clear error."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from numbers import Real
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


def json_object(what: str, text: str) -> dict[str, Any]:
    """The JSON object in ``text``. Raises InputError that begins with ``what``: no object, or a key given twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise InputError(f"{what}: a key is given twice in {[name for name, _ in pairs]}")
        return values

    try:
        values = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{what}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise InputError(f"{what}: expected a JSON object, found {type(values).__name__}")
    return values


def known(what: str, values: object, cls: type, required: Sequence[str] = ()) -> dict[str, Any]:
    """``values``, if they are an object with fields of ``cls`` alone and with the ``required`` ones. Raises InputError
    that begins with ``what``.
    """
    names = [field.name for field in dataclass_fields(cls)]
    if not isinstance(values, dict):
        raise InputError(f"{what}: expected an object with the fields {', '.join(names)}")
    if unknown := sorted(set(values) - set(names)):
        raise InputError(f"{what}: unknown {', '.join(unknown)}; the fields are {', '.join(names)}")
    if missing := [name for name in required if name not in values]:
        raise InputError(f"{what}: {', '.join(missing)} missing")
    return values


def items(what: str, values: object) -> list[Any]:
    """What is in the list, tuple or array ``values``. Raises InputError that begins with ``what``."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InputError(f"{what} is {reprlib.repr(values)}, expected a list")
    return list(values)


def numbers(what: str, values: object) -> tuple[float, ...]:
    """``values`` as finite floats. Raises InputError that begins with ``what``."""
    return tuple(number(f"{what}[{i}]", value) for i, value in enumerate(items(what, values)))


def number(what: str, value: object) -> float:
    """``value`` as a finite float. Raises InputError that begins with ``what``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{what} is {reprlib.repr(value)}, expected a number")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise InputError(f"{what} is {result}, expected a finite number")
    return result
