"""The benchmarks of replay and trace hold on a small scale, and say so in JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import replay_validation, trace_overhead
from benchmarks.replay_validation import BUDGETS, WAYS
from strata_mlx.replay.recording import Recording


def report(benchmark: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    monkeypatch.setattr(sys, "argv", [benchmark.__file__, "--json", *options])
    benchmark.main()
    return json.loads(capsys.readouterr().out)


def test_a_replay_is_what_the_decoder_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "recording.npz"
    scale = "--documents 1 --tokens 10 --passes 1 --probes 1 --probe-tokens 24"
    result = report(replay_validation, capsys, monkeypatch, *scale.split(), "--recording", str(file))
    assert result["rounds_that_differ"] == result["misses_that_differ"] == 0
    assert len(result["rows"]) == len(WAYS) * len(BUDGETS) == 12
    assert all(row["misses"] > 0 and row["tokens_per_s"] > 0 for row in result["rows"])
    assert Recording.load(file).positions == 9


def test_what_a_trace_takes_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = report(trace_overhead, capsys, monkeypatch, "--prompts", "2", "--tokens", "8", "--passes", "1")
    assert {row["decoding"] for row in result["rows"]} == {"plain", "mtp"}
    assert all(row["record_us"] > 0 and row["rounds"] > 0 for row in result["rows"])
