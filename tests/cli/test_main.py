"""The command line as a whole: commands, help, exit codes, errors, interruptions, broken outputs."""

import argparse
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import strata_mlx.cli as cli
from strata_mlx import Fault, __version__
from tests.cli.conftest import Run
from tests.tiny import FAMILIES

COMMANDS = ("generate", "convert", "inspect", "tune", "evaluate", "server", "cache_prompt", "warmup")
PYTHON = (sys.executable, "-m", "strata_mlx")


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"strata_mlx.cli.{command}").add_arguments(parser)
    return parser


def test_help_and_version_come_without_loading_mlx() -> None:
    script = f"""
import contextlib, io, sys
from strata_mlx.cli import main
for arguments in (["--help"], ["--version"], *([command, "--help"] for command in {COMMANDS})):
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code
heavy = {{name.split(".")[0] for name in sys.modules}} & {{"mlx", "mlx_lm", "transformers"}}
assert not heavy, heavy
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert __version__ in ended.stdout.splitlines()


def test_the_module_runs_as_a_program() -> None:
    ended = subprocess.run([*PYTHON, "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"{__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_mentions_every_option_and_its_default(command: str, run: Run) -> None:
    shown = run(command, "--help")
    assert shown.code == 0
    assert f"usage: strata_mlx {command}" in shown.out
    entries = [" ".join(entry.split()) for entry in re.split(r"\n  (?=-)", shown.out)[1:]]
    for action in parser_of(command)._actions:
        if action.help == argparse.SUPPRESS:
            continue
        entry = next(entry for entry in entries if entry.split(" ")[0].strip(",") == action.option_strings[0])
        assert all(option in entry for option in action.option_strings)
        assert action.help
        plain = isinstance(action.default, (int, float, str, Path)) and not isinstance(action.default, bool)
        if plain and action.default != argparse.SUPPRESS:
            assert f"(default: {action.default})" in entry


def test_main_help_mentions_every_command(run: Run) -> None:
    shown = run("--help")
    assert shown.code == 0
    assert all(f"\n    {command}" in shown.out for command in COMMANDS)


@pytest.mark.parametrize("arguments", [(), ("generat",), ("generate\n",), ("--debug",), ("--version=1",)])
def test_without_a_known_command_there_is_one_line_and_code_2(arguments: tuple[str, ...], run: Run) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.error


def test_a_command_takes_its_own_options_alone(run: Run) -> None:
    assert "--temp" in run("inspect", "--temp", "1").error
    assert "nonsense" in run("inspect", "nonsense").error


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_a_program_of_its_own(command: str) -> None:
    script = f"import sys; from strata_mlx.cli import run_{command} as run; sys.argv[1:] = ['--help']; run()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith(f"usage: strata_mlx.{command} ")


def test_the_installed_programs_are_these_commands() -> None:
    import tomllib

    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    expected = {"strata_mlx": "strata_mlx.cli:main"}
    expected |= {f"strata_mlx.{command}": f"strata_mlx.cli:run_{command}" for command in cli.COMMANDS}
    assert scripts == expected
    assert tuple(cli.COMMANDS) == COMMANDS


# Models that are not there or not whole


@pytest.mark.parametrize("command", [("generate",), ("inspect",), ("convert", "--mlx-path", "out")])
def test_a_model_that_cannot_be_used_is_one_line_and_code_2(
    command: tuple[str, ...], run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, config in {"broken": "{", "other": '{"model_type": "llama"}', "untyped": "{}", "list": "[]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "model.safetensors").write_bytes(next(tiny.glob("model*.safetensors")).read_bytes())
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_bytes((tiny / "config.json").read_bytes())
    cases = {"nowhere": "nowhere", "./nowhere/x": "nowhere", "": "''", "empty": "config.json", "file": "file"}
    cases |= {"broken": "config.json", "other": "llama", "untyped": "None", "list": "object", "weightless": "no model*"}
    for name, says in cases.items():
        ended = run(*command, "--model", name)
        assert (ended.code, ended.out) == (2, ""), name
        assert says in ended.error, name
    assert not (tmp_path / "out").exists()
    assert ", ".join(sorted(FAMILIES)) in run(*command, "--model", "other").error
    assert "revision" in run(*command, "--model", tiny, "--revision", "main").error


# Errors


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (Fault("the disk\nis gone"), 1, "error: the disk is gone"),
        (ZeroDivisionError("by zero"), 1, "internal error: ZeroDivisionError: by zero; run again with --debug"),
        (ImportError("no module x", name="x"), 1, "internal error: ImportError: no module x"),
        (ImportError("libmlx.so", name="mlx.core"), 1, "MLX has no backend here (libmlx.so); install strata-mlx[cpu]"),
        (OSError(28, "No space left on device"), 1, "cannot be written: No space left on device"),
        (MemoryError(), 1, "MemoryError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_failures_end_with_code_1_and_show_the_traceback_with_debug_alone(
    error: Exception, code: int, says: str, run: Run, monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    from strata_mlx.models import plan

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(plan, "plan_model", fail)
    ended = run("inspect", "--model", tiny)
    assert ended.code == code
    assert says in ended.error
    with pytest.raises(type(error)):
        cli.main(["inspect", "--model", str(tiny), "--debug"])


def test_ctrl_c_before_there_is_anything_to_show_ends_quietly_with_130(
    run: Run, monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    from strata_mlx.models import plan

    monkeypatch.setattr(plan, "plan_model", lambda *_: signal.raise_signal(signal.SIGINT))
    ended = run("inspect", "--model", tiny)
    assert (ended.code, ended.out, ended.err) == (130, "", "")


def test_text_comes_as_it_is_made_and_ctrl_c_shows_the_speeds(endless: Path) -> None:
    command = [*PYTHON, "generate", "--model", str(endless), "-p", "x", "--ignore-chat-template", "-m", "-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        for _ in range(3):  # model, routing, and a line
            process.stdout.readline()
        assert process.stdout.read(5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().decode(errors="replace")
        assert process.wait() == 130
        assert process.stderr.read() == b""
    lines = rest.splitlines()
    assert lines[-4] == "=" * 10
    assert [line.split(":")[0] for line in lines[-3:]] == ["Prompt", "Generation", "Peak memory"]


# Outputs that do not take everything


def test_a_reader_that_goes_away_ends_the_text_without_a_word(endless: Path) -> None:
    command = [*PYTHON, "generate", "--model", str(endless), "-p", "x", "--ignore-chat-template", "-m", "-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.read(5) == b"Model"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_that_lacks_a_character_gets_a_question_mark(
    encoding: str, run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "日本"
    model.symlink_to(tiny)
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    ended = run("generate", "--model", model, "-m", "2")
    assert (ended.code, ended.err) == (0, "")
    assert "/?? (qwen3_next)" in raw.getvalue().decode(encoding).splitlines()[0]


def test_the_plain_locale_prints_names_that_are_not_ascii(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "modèle"
    model.symlink_to(tiny)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "PYTHONIO"))}
    ended = subprocess.run(
        [*PYTHON, "inspect", "--model", model], env=environment | {"LANG": "C"}, capture_output=True, check=True
    )
    assert ended.stderr == b""
    assert ended.stdout.startswith(b"path ")


@pytest.mark.parametrize("command", [("inspect",), ("generate", "-m", "2", "--json")])
def test_a_full_disk_is_one_line_and_code_1(
    command: tuple[str, ...], run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, _: Any) -> int:
            raise OSError(28, "No space left on device")

    output = io.TextIOWrapper(io.BufferedWriter(Full()))
    monkeypatch.setattr(sys, "stdout", output)
    ended = run(*command, "--model", tiny)
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space"):
        output.close()
    assert ended.code == 1
    assert ended.error == "error: the output cannot be written: No space left on device"


def test_a_closed_output_is_no_error(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    ended = run("inspect", "--model", tiny, "--json")
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_json_is_one_line_of_ascii_without_a_word_around_it(run: Run, tiny: Path, tmp_path: Path) -> None:
    for command in (("generate", "-m", "2"), ("inspect",), ("convert", "-q", "--mlx-path", str(tmp_path / "out"))):
        ended = run(*command, "--model", tiny, "--json")
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.isascii()
        assert ended.out.count("\n") == 1
        assert isinstance(json.loads(ended.out), dict)
