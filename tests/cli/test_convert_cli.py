"""strata_mlx convert: what it prints, what it refuses, and that its result is used."""

import argparse
import importlib
import json
import re
from pathlib import Path

import mlx_lm
import pytest
from mlx_lm.convert import configure_parser

from strata_mlx.cli.options import NotHere
from tests.cli.conftest import Run
from tests.tiny import make_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("convert") / "hf", "qwen3_next", "separate", mtp="separate")


@pytest.mark.parametrize("options", [[], ["-q"], ["-q", "--q-bits", "8", "--q-group-size", "32"]], ids=" ".join)
def test_what_was_converted_is_what_generate_and_mlx_lm_read(
    options: list[str], run: Run, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = run("convert", "--model", source, "--mlx-path", out, "--json", *options)
    report = json.loads(ended.out)
    assert (ended.code, ended.err) == (0, "")
    assert {name: type(value) for name, value in report.items()} == {
        "path": str, "files": dict, "bytes": int, "peak_memory_gb": float, "dry_run": bool,
    }  # fmt: skip
    assert report["path"] == str(out)
    assert sorted(report["files"]) == sorted(file.name for file in out.glob("*.safetensors"))
    assert report["bytes"] == sum(report["files"].values())
    expected = mlx_lm.generate(*mlx_lm.load(str(out))[:2], "abc", max_tokens=8)
    shown = run("generate", "--model", out, "-p", "abc", "--ignore-chat-template", "-m", "8", "--json")
    assert json.loads(shown.out)["text"] == expected
    assert json.loads(run("inspect", "--model", out, "--json").out)["bytes"] == report["bytes"]


def test_people_read_what_was_written(run: Run, source: Path, tmp_path: Path) -> None:
    ended = run("convert", "--hf-path", source, "--mlx-path", tmp_path / "out", "-q")
    assert ended.code == 0
    written = re.escape(f"{tmp_path / 'out'}: 0.000 GB written, peak memory ")
    assert re.match(rf"{written}0\.\d{{3}} GB\n", ended.out)  # of the process, in which other tests have run
    assert "Converting" in ended.err
    assert "Traceback" not in ended.err


def test_a_dry_run_tells_the_sizes_and_writes_nothing(run: Run, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("convert", "--model", source, "--mlx-path", out, "-q")
    told = json.loads(run(*arguments, "--dry-run", "--json").out)
    shown = run(*arguments, "--dry-run")
    assert list(tmp_path.iterdir()) == []
    assert (shown.code, shown.err) == (0, "")
    assert "would be written" in shown.out
    assert all(name in shown.out for name in told["files"])
    written = json.loads(run(*arguments, "--json").out)
    assert told["dry_run"] is True
    assert written["dry_run"] is False
    assert (told["files"], told["bytes"], told["path"]) == (written["files"], written["bytes"], written["path"])


def test_a_folder_that_exists_is_left_alone(run: Run, source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")
    ended = run("convert", "--model", source, "--mlx-path", tmp_path, "--json")
    assert (ended.code, ended.out) == (2, "")
    assert str(tmp_path) in ended.error
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--q-bits", "4"], "-q"),
        (["--q-group-size", "32"], "-q"),
        (["--q-mode", "mxfp4"], "-q"),
        (["--q-part", "router=8"], "-q"),
        (["-q", "--q-bits", "7"], "7 bits"),
        (["-q", "--q-bits", "1"], "--q-bits"),
        (["-q", "--q-bits", "x"], "--q-bits"),
        (["-q", "--q-group-size", "48"], "48"),
        (["-q", "--q-group-size", "0"], "--q-group-size"),
        (["-q", "--q-group-size", "128"], "128"),
        (["-q", "--q-mode", "int4"], "--q-mode"),
        (["-q", "--q-mode", "mxfp4", "--q-bits", "8"], "mxfp4"),
        (["-q", "--q-part", "nonsense=4"], "nonsense=4"),
        (["-q", "--q-part", "experts"], "experts"),
        (["-q", "--q-part", "experts=99"], "99"),
        (["-q", "-d"], "not both"),
        (["-d"], "not quantised"),
        (["--dtype", "int8"], "--dtype"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_precision_that_cannot_be_is_refused(
    options: list[str], says: str, run: Run, source: Path, tmp_path: Path
) -> None:
    ended = run("convert", "--model", source, "--mlx-path", tmp_path / "out", *options)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.error
    assert list(tmp_path.iterdir()) == []


def test_every_option_of_mlx_lm_is_there_with_its_default_or_refused_with_a_reason(run: Run) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module("strata_mlx.cli.convert").add_arguments(parser)
    ours = parser._option_string_actions
    for theirs in configure_parser()._actions:
        for option in theirs.option_strings:
            if option in ("-h", "--help"):
                continue
            assert option in ours, f"mlx_lm.convert has {option}"
            if isinstance(ours[option], NotHere):
                assert f"{option} is not available: " in run("convert", option, "value").error
            elif theirs.default is not None and option != "--mlx-path":
                assert ours[option].default == theirs.default, option
    assert str(ours["--mlx-path"].default) == configure_parser().get_default("mlx_path")
