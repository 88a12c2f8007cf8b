"""What can be wrong before a rank is started, and what the command line says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_mlx.cli import parallel
from strata_mlx.errors import InputError
from strata_mlx.parallel import launch
from strata_mlx.parallel import ranks as parallel_ranks
from tests.cli.conftest import Run, run  # noqa: F401
from tests.parallel.launched import hostfile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "doesn't exist"),
        ("{", "Failed to parse"),
        ('{"hosts": 3}', "Failed to parse"),
        ("[]", "names no host"),
        ('[{"ssh": "a"}]', "needs an address"),
    ],
)
def test_a_hostfile_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "hosts.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        launch.launch(file, None, ["generate"])
    assert str(file) in str(error.value)


def test_mpi_needs_no_address(tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text('[{"ssh": "a"}]')
    launch.check_hostfile(tmp_path / "hosts.json", "mpi")


def test_a_command_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="shorter prompt"):
        launch.launch(hostfile(tmp_path, 1), None, ["generate", "--prompt", "x" * 200_000])


def test_options_for_ranks_need_ranks(run: Run) -> None:  # noqa: F811
    assert "give --hostfile or --expert-parallel" in run("generate", "--backend", "ring").error
    assert "give --hostfile or --expert-parallel" in run("generate", "--placement", "even").error
    result = run("generate", "--expert-parallel")
    assert (result.code, "this process is alone" in result.error) == (2, True)
    assert "standard input" in run("generate", "--expert-parallel", "-p", "-").error
    assert "expected a number" in run("generate", "--rank-timeout", "0").error


def test_the_command_line_knows_what_the_package_has() -> None:
    assert parallel._BACKENDS == launch.BACKENDS
    assert parallel._TIMEOUT == parallel_ranks.TIMEOUT
