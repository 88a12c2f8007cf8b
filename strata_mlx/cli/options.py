"""Options that several commands share, and the checks of their values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any


def number(
    kind: Callable[[str], Any],
    low: float | None = None,
    high: float | None = None,
    also: tuple[float, ...] = (),
) -> Callable[[str], Any]:
    """An argparse type: a finite number from ``low`` to ``high``, or one of ``also``."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {name}, not {text!r}") from None
        below, above = low is not None and value < low, high is not None and value > high
        if value not in also and (not math.isfinite(value) or below or above):
            bounds = (
                f"from {low} to {high}"
                if high is not None
                else f"of at least {low}"
                if low is not None
                else "that is finite"
            )
            more = f", or {also[0]}" if also else ""
            raise argparse.ArgumentTypeError(f"expected a number {bounds}{more}, not {text}")
        return value

    return parse


def boolean(text: str) -> bool:
    """As mlx_lm reads it, but only what means true or false."""
    value = text.lower()
    if value in ("true", "t", "false", "f"):
        return value.startswith("t")
    raise argparse.ArgumentTypeError(f"expected True or False, not {text!r}")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="a folder or a Hugging Face repository (owner/name); without it, the model that comes with the package",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the repository")


def add_kv_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-kv-size",
        type=number(int, 5),
        help="keep at most this many tokens in attention caches: the first 4 and the latest",
    )
    parser.add_argument("--kv-bits", type=number(int, 2, 8), help="quantise the KV cache to this many bits")
    parser.add_argument(
        "--kv-group-size", type=number(int, 32, 128), default=64, help="group size of the quantised KV cache"
    )
    parser.add_argument(
        "--quantized-kv-start",
        type=number(int, 0),
        default=5000,
        help="with --kv-bits, quantise from this many tokens on",
    )


class NotHere(argparse.Action):
    """An option of mlx_lm that this project leaves out, with the reason as its error."""

    def __init__(self, option_strings: list[str], dest: str, reason: str, **_: Any):
        super().__init__(option_strings, dest, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.reason = reason

    def __call__(self, parser: argparse.ArgumentParser, _n: Any, _v: Any, option: str | None = None) -> None:
        parser.error(f"{option} is not available: {self.reason}")
