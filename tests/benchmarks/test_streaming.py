"""The streaming benchmarks hold on a small scale, and say so in JSON."""

import json
import sys

import pytest

from benchmarks import streaming_exactness
from benchmarks.streaming_exactness import DECODING, EVICTIONS, LAYOUTS, SLOTS, THREADS, cases


def test_streaming_changes_no_bit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--json --prompts 1 --tokens 5 --slots 10 48 128"
    monkeypatch.setattr(sys, "argv", ["streaming_exactness", *options.split()])
    streaming_exactness.main()
    result = json.loads(capsys.readouterr().out)
    assert result["differences"] == 0
    assert result["rows_compared"] == sum(case["rows"] for case in result["cases"])
    assert all(case["rows"] >= 5 for case in result["cases"])
    assert all(case["misses"] > 0 for case in result["cases"] if case["slots"] < 128)
    assert result["changed_expert"]["differences"] > 0


def test_every_value_meets_every_slot_count() -> None:
    chosen = cases(SLOTS, full=False)
    for count in SLOTS:
        of_count = [case for case in chosen if case.slots == count]
        assert {case.layout for case in of_count} == set(LAYOUTS)
        assert {case.eviction for case in of_count} == set(EVICTIONS)
        assert {case.threads for case in of_count} == set(THREADS)
        assert {case.decoding for case in of_count} == set(DECODING)
    assert len(cases(SLOTS, full=True)) == 144
