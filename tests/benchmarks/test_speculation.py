"""The two speculation benchmarks hold on a small scale, and say so in JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import speculation_exactness, speculation_speed
from benchmarks.speculation_exactness import VOCABULARY, enumerate_law, laws
from strata_mlx.speculation.record import Round


def report(benchmark: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    monkeypatch.setattr(sys, "argv", [benchmark.__file__, "--json", *options])
    benchmark.main()
    return json.loads(capsys.readouterr().out)


def test_speculation_changes_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scale = "--prompts 2 --tokens 12 --configurations 2 --cache-prompts 1 --draws 20000 --seeds 1"
    result = report(speculation_exactness, capsys, monkeypatch, *scale.split())
    assert result["mismatches"] == 0
    assert result["tokens_compared"] == 2 * 2 * 12
    assert [row["accepted"] for row in result["caches"]] == list(range(8))
    assert result["largest_cache_difference"] <= 1e-5
    assert result["least_p"] > 1e-4


def test_the_enumerated_law_gives_the_trunks_own_first_token(tmp_path: Path) -> None:
    p, q = laws(tmp_path / "small")
    for trunk, head in zip(p, q, strict=True):
        first = np.zeros(VOCABULARY)
        for (_, token, *_), probability in enumerate_law(trunk, head).items():
            first[token] += probability
        np.testing.assert_allclose(first, trunk[VOCABULARY, VOCABULARY], atol=1e-12)


def test_every_way_of_decoding_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = report(speculation_speed, capsys, monkeypatch, "--prompts", "3", "--tokens", "16")["rows"]
    by_name = {row["way"]: row for row in rows}
    assert {"plain", "auto", "depth 1", "depth 2", "depth 3", "depth 4", "cumulative 0.25"} <= set(by_name)
    assert by_name["plain"]["speedup"] == 1
    assert len(by_name["depth 4"]["acceptance"]) == 4
    assert by_name["depth 1"]["acceptance"][0] > 0.5
    assert by_name["mlx_lm"]["over_mlx_lm"] == 1
    assert by_name["depth 1"]["speedup_of_48_layers"] > 0
    assert set(by_name["auto"]["speedup_by_set"]) == {"mlx", "mlx_lm", "huggingface_hub"}


def test_a_trunk_of_more_layers_makes_drafts_cheaper() -> None:
    rounds = [Round((0.9,), 1, 1, 2, draft_seconds=1.0, verify_seconds=3.0, commit_seconds=1.0)]
    assert speculation_speed.with_layers(1, rounds, 2.0) == 2.0 * 2 / (1 + 4)
    assert speculation_speed.with_layers(6, rounds, 2.0) == 12.0 * 2 / (1 + 24)
    assert speculation_speed.with_layers(6, [], 2.0) is None
