"""Amounts of memory as people write them: ``12GB``, ``512 MiB``, plain bytes."""

from __future__ import annotations

import re
import reprlib
from fractions import Fraction

from ..errors import InputError

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_BY_NAME = {name.upper(): size for name, size in UNITS.items()} | {
    prefix: 1000**power for power, prefix in enumerate("KMGT", 1)
}
_AMOUNT = re.compile(r"(\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_MOST = 1 << 60


def parse_size(text: str, option: str | None = None) -> int:
    """Bytes, rounded down: ``12GB`` is 12e9, ``12GiB`` is 12 * 2**30, a number alone is bytes.

    option: that ``text`` was given for; without one it is memory, for which "auto" would have been an answer too.
    Raises InputError that names what is wrong with ``text``.
    """
    what = f"memory {reprlib.repr(text)}" if option is None else f"{option}: {reprlib.repr(text)}"
    count = ", a number of bytes or auto" if option is None else " or a number of bytes"
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{what} is not an amount; write it like 12GB, 900MB, 8GiB{count}")
    amount, unit = Fraction(match[1]), match[2].upper() or "B"
    if unit not in _BY_NAME:
        raise InputError(f"{what}: the unit {match[2]!r} is unknown; use one of {', '.join(UNITS)}")
    size = int(amount * _BY_NAME[unit])
    if not 0 < size <= _MOST:
        raise InputError(f"{what} must be more than nothing and at most {format_size(_MOST)}")
    return size


def format_size(size: int, *, up: bool = False) -> str:
    """``size`` bytes in decimal units with four significant digits, rounded to the nearest, or ``up``.

    parse_size() reads it back.
    """
    for name, unit in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= unit:
            digits = 4 - len(str(size // unit))
            if digits < 0:  # terabytes alone can have more
                digits = 0
            step = Fraction(unit, 10**digits)
            count = -(-size // step) if up else round(Fraction(size) / step)
            return f"{_decimal(Fraction(count, 10**digits))} {name}"
    return f"{size} B"


def _decimal(number: Fraction) -> str:
    """A number with few digits after the point, without trailing zeros."""
    text = f"{float(number):.4f}"
    return text.rstrip("0").rstrip(".")
