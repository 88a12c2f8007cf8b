"""The command line: ``strata_mlx COMMAND``, ``python -m strata_mlx COMMAND`` and ``strata_mlx.COMMAND``.

Exit codes: 0 done, 1 something failed (disk, network, memory), 2 a mistake in the command, the prompt or a file, 130
Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .._version import __version__
from ..errors import StrataError

COMMANDS = {
    "generate": "write text from a prompt",
    "convert": "convert a Hugging Face checkpoint to the MLX layout, and quantise it",
    "inspect": "show what a checkpoint holds and what memory it needs",
    "tune": "measure what speculation pays on this machine, and write a policy and a report",
    "evaluate": "say what biased routing costs in quality and saves in reads",
    "server": "serve a model to clients of OpenAI's and Anthropic's protocols, with a live page",
    "cache_prompt": "save the state after a prompt, for generate --prompt-cache-file",
    "warmup": "compile what a GPU needs once, so that no prompt waits for it",
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run ``strata_mlx COMMAND ...`` and exit with its code."""
    parser = argparse.ArgumentParser(
        prog="strata_mlx",
        description="Run mixture-of-experts language models on MLX.",
        epilog="'strata_mlx COMMAND --help' explains a command. Without --model, commands use the small model that "
        "comes with "
        "the package.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name, help_text in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, add_help=False)
        command.set_defaults(rest=[])
    chosen, rest = parser.parse_known_args(arguments[:1])
    _run(chosen.command, [*rest, *arguments[1:]], f"strata_mlx {chosen.command}")


def run_generate() -> NoReturn:
    _run("generate", sys.argv[1:], "strata_mlx.generate")


def run_convert() -> NoReturn:
    _run("convert", sys.argv[1:], "strata_mlx.convert")


def run_inspect() -> NoReturn:
    _run("inspect", sys.argv[1:], "strata_mlx.inspect")


def run_tune() -> NoReturn:
    _run("tune", sys.argv[1:], "strata_mlx.tune")


def run_evaluate() -> NoReturn:
    _run("evaluate", sys.argv[1:], "strata_mlx.evaluate")


def run_server() -> NoReturn:
    _run("server", sys.argv[1:], "strata_mlx.server")


def run_cache_prompt() -> NoReturn:
    _run("cache_prompt", sys.argv[1:], "strata_mlx.cache_prompt")


def run_warmup() -> NoReturn:
    _run("warmup", sys.argv[1:], "strata_mlx.warmup")


def _run(name: str, argv: Sequence[str], prog: str) -> NoReturn:
    # Start-up makes objects that stay, and walking them again and again takes a tenth of its time.
    gc.disable()
    try:
        _run_command(name, argv, prog)
    finally:
        gc.enable()


def _run_command(name: str, argv: Sequence[str], prog: str) -> NoReturn:
    command = importlib.import_module(f".{name}", __name__)
    parser = argparse.ArgumentParser(prog=prog, description=command.__doc__, formatter_class=_HelpFormatter)
    command.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(argv)
    args.given = list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # an unknown character is no reason to stop
        sys.stdout.reconfigure(errors="replace")
    try:
        code = command.run(args)
        print(end="", flush=True)
    except StrataError as error:
        if args.debug:
            raise
        sys.exit(_fail(str(error), error.exit_code))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader has gone: nothing is left to say, at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if args.debug:
            raise
        sys.exit(_fail(_explain(error), 1))
    sys.exit(code)


def started() -> None:
    """Called by a command when its imports and its model are loaded: from now on garbage is collected."""
    gc.freeze()
    gc.enable()


def _explain(error: Exception) -> str:
    if isinstance(error, ImportError) and (error.name or "").startswith("mlx"):
        return f"MLX has no backend here ({error}); install strata-mlx[cpu], [cuda12] or [cuda13]"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return f"the output cannot be written: {error.strerror}"
    return f"internal error: {type(error).__name__}: {error}; run again with --debug for details"


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.splitlines())}", file=sys.stderr)
    return code


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, except where there is none to speak of, and keeps the description's lines."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or action.default in ((), [], argparse.SUPPRESS)
        return action.help if silent else super()._get_help_string(action)
