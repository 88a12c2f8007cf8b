"""Options that several commands share, and the checks of their values."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..routing import RoutingPolicy


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
        if value not in also and (not -math.inf < value < math.inf or below or above):
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


def utf8(text: str) -> str:
    """An argparse type: text. Bytes of the command line that are not UTF-8 are not text."""
    try:
        text.encode()
    except UnicodeError:
        raise argparse.ArgumentTypeError("expected text in UTF-8") from None
    return text


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input for ``-``. Raises InputError if that is not UTF-8."""
    if prompt != "-":
        return prompt
    if sys.stdin is None:
        raise InputError("standard input is closed, so '-' has no prompt to read")
    try:
        return utf8(sys.stdin.read())
    except (UnicodeError, argparse.ArgumentTypeError) as error:
        raise InputError("standard input is not text in UTF-8") from error


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="a folder or a Hugging Face repository (owner/name); without it, the model that comes with the package",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the repository")


def add_prefill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill-step-size",
        type=number(int, 1),
        default=2048,
        help="tokens of the prompt to process at a time",
    )


def add_kv_cache(parser: argparse.ArgumentParser) -> None:
    # A cache of limited size cannot be quantised.
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--max-kv-size",
        type=number(int, 5, 2**31 - 1),
        help="keep at most this many tokens in attention caches: the first 4 and the latest",
    )
    kind.add_argument(
        "--kv-bits", type=number(int), choices=(2, 3, 4, 5, 6, 8), help="quantise the KV cache to this many bits"
    )
    parser.add_argument(
        "--kv-group-size",
        type=number(int),
        choices=(32, 64, 128),
        default=64,
        help="group size of the quantised KV cache",
    )
    parser.add_argument(
        "--quantized-kv-start",
        type=number(int, 0),
        default=5000,
        help="with --kv-bits, quantise from this many tokens on",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temp",
        type=number(float, 1e-6, 10**6, also=(0,)),
        default=0.0,
        help="temperature; 0 always takes the likeliest token",
    )
    parser.add_argument(
        "--top-p",
        type=number(float, 0, 1),
        default=1.0,
        help="sample from the likeliest tokens of this total mass",
    )
    parser.add_argument(
        "--min-p",
        type=number(float, 0, 1),
        default=0.0,
        help="drop tokens below this share of the likeliest one",
    )
    parser.add_argument(
        "--top-k", type=number(int, 0), default=0, help="sample from this many likeliest tokens; 0: from all"
    )


def add_routing(parser: argparse.ArgumentParser) -> None:
    RoutingPolicy.add_arguments(parser)
    parser.add_argument(
        "--residency",
        type=Path,
        metavar="FILE",
        help='which experts count as in memory, as JSON: {"0": [3, 17], ...} by layer; without it, routing is exact',
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type to compute in; auto takes what was measured to be fastest: float32 on the CPU, the model's own on "
        "a GPU",
    )


def json_options(option: str, text: str | None) -> dict[str, Any]:
    """The JSON object that an option was given, none by default. Raises InputError that begins with ``option``."""
    try:
        value = json.loads("{}" if text is None else text)
    except ValueError as error:
        raise InputError(f"{option} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{option} must be a JSON object, such as '{{\"enable_thinking\": false}}', not {text}")
    return value


class NotHere(argparse.Action):
    """An option of mlx_lm that this project leaves out, with the reason as its error."""

    def __init__(self, option_strings: list[str], dest: str, reason: str, **_: Any):
        super().__init__(option_strings, dest, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.reason = reason

    def __call__(self, parser: argparse.ArgumentParser, _n: Any, _v: Any, option: str | None = None) -> None:
        parser.error(f"{option} is not available: {self.reason}")
