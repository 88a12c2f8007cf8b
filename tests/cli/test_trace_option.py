"""--trace writes what every round did, or says at once that it cannot."""

import json
import sys
from pathlib import Path

import pytest

from strata_mlx.trace import read_trace
from tests.cli.conftest import Run


@pytest.mark.parametrize("mtp", ["on", "off", "auto"])
def test_a_trace_goes_with_the_text(run: Run, tiny: Path, tmp_path: Path, mtp: str) -> None:
    options = ("generate", "--model", tiny, "--prompt", "a", "--max-tokens", "9", "--mtp", mtp, "--json")
    plain = json.loads(run(*options).out)
    result = run(*options, "--trace", tmp_path / "trace")
    assert result.code == 0
    assert not result.err
    found = json.loads(result.out)
    assert found["text"] == plain["text"]
    trace = read_trace(tmp_path / "trace")
    assert trace.finish == found["finish_reason"]
    assert sum(each.committed for each in trace.rounds) == found["generation_tokens"]
    assert trace.header["options"]["mtp"] == mtp
    assert trace.header["options"]["routing"]["mode"] == "exact"


def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_looked_for(run: Run, tmp_path: Path) -> None:
    result = run("generate", "--model", tmp_path / "nowhere", "--trace", tmp_path / "missing" / "trace")
    assert result.code == 2
    assert "--trace" in result.error
    assert "No such file" in result.error


def test_a_model_that_cannot_be_loaded_leaves_an_older_trace(run: Run, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("older")
    assert run("generate", "--model", tmp_path / "nowhere", "--trace", tmp_path / "trace").code == 2
    assert (tmp_path / "trace").read_text() == "older"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason=f"{sys.platform} has no /dev/full")
def test_a_full_disk_is_one_warning(run: Run, tiny: Path) -> None:
    options = ("generate", "--model", tiny, "--prompt", "a", "--max-tokens", "9", "--verbose", "False")
    result = run(*options, "--trace", "/dev/full")
    assert result.code == 0
    assert result.out == run(*options).out
    assert result.err == "warning: /dev/full: the trace ends here: No space left on device\n"
