"""The two retention benchmarks hold on a small scale, and say so in JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import retention_decisions, retention_math


def test_the_published_illustration_is_reproduced(capsys: pytest.CaptureFixture[str]) -> None:
    assert retention_math.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["published"] for row in rows[:4]] == [True] * 4
    ceiling = rows[-1]["tokens_per_cost"]
    assert all(row["tokens_per_cost"] < ceiling for row in rows[:-1])


@pytest.mark.parametrize("options", [[], ["-O"]])
def test_decisions_agree_with_the_reference(options: list[str]) -> None:
    script = Path(retention_decisions.__file__)
    command = [sys.executable, *options, str(script), "--json", "--sequences", "500"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert report["differences"] == 0
    assert report["optimized"] == len(options)
    assert report["decisions"] == 500 * 30.8
    assert set(report["kinds"]) >= {"plain", "schedule", "cumulative", "both", "equal boundaries", "repeat-last"}
