"""Tiny checkpoints, and the command line run in this process."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from strata_mlx.cli import main
from tests.tiny import make_checkpoint


@dataclass(frozen=True)
class Result:
    """What a command left behind: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what was wrong, after the usage that argparse prints before it."""
        assert "Traceback" not in self.err
        lines = re.sub(r"\A(usage: .*\n(?: .*\n)*)", "", self.err).splitlines()
        assert len(lines) == 1, self.err
        assert "error: " in lines[0]
        return lines[0]


Run = Callable[..., Result]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run ``strata_mlx ARGUMENTS`` here and return what it left behind."""

    def run(*arguments: str | Path) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert isinstance(end.value.code, int)
        return Result(end.value.code, out, err)

    return run


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3_next with chat template and MTP head, in the MLX layout."""
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "tiny", "qwen3_next", "stacked", mtp="stacked")


@pytest.fixture(scope="package")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that cannot predict any special token, so that its text has no end."""
    path = tmp_path_factory.mktemp("cli") / "endless"
    return make_checkpoint(path, "qwen3_moe", "stacked", vocab_size=256, eos_token_id=None)
