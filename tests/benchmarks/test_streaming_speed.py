"""The race of streaming_speed.py: what it concludes from turns, and how it gets on with a contestant's process."""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from benchmarks import streaming_speed
from benchmarks.models import embedded_with_float32_scales
from benchmarks.streaming import contestant, process, verdict
from benchmarks.streaming.environment import PEERS, requirements
from benchmarks.streaming.process import Entry, Failed, Process, Turn
from benchmarks.streaming.verdict import Goal
from strata_mlx import loading
from strata_mlx.models import dequantised
from strata_mlx.models.moe import blocks


def turn(speed: float, tokens: list[int] | None = None, **traffic: float) -> Turn:
    """Of five tokens, at an even ``speed`` after the first."""
    return Turn(tokens or [1, 2, 3, 4, 5], [7 + i / speed for i in range(5)], 0.02, traffic)


def test_speed_is_that_of_the_tokens_after_the_first() -> None:
    assert Turn([4, 5, 6], [10.0, 10.5, 12.0], 1.0, {}).tokens_per_s == 1
    assert verdict.speed([turn(10), turn(1000), turn(20)]) == pytest.approx(20)


def test_a_slow_spell_of_the_machine_cancels_out_of_a_ratio() -> None:
    ours, theirs = [turn(30), turn(3), turn(30)], [turn(20), turn(2), turn(20)]
    assert verdict.ratio(ours, theirs) == pytest.approx(1.5)
    slow = [turn(speed) for speed in (30, 3, 3)]
    assert verdict.ratio(slow, [turn(speed) for speed in (20, 2, 2)]) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("tokens", "equal"), [([1, 2, 3, 4, 5], 1), ([1, 2, 9, 4, 5], 0.4), ([9, 2, 3, 4, 5], 0), ([1, 2, 3, 4, 9], 0.8)]
)
def test_tokens_after_a_difference_do_not_count(tokens: list[int], equal: float) -> None:
    assert verdict.agreement([turn(1, tokens)], [turn(1)]) == pytest.approx(equal)
    assert verdict.agreement([turn(1, tokens), turn(1)], [turn(1), turn(1)]) == pytest.approx((1 + equal) / 2)


def test_counters_are_per_token_after_the_first() -> None:
    assert verdict.per_token([turn(1, misses=8), turn(1, misses=16)], "misses") == 3
    assert verdict.per_token([turn(1), turn(1, misses=16)], "misses") is None


def test_work_of_all_cores_is_per_token_after_the_first() -> None:
    assert verdict.cpu_ms([turn(1)]) == pytest.approx(5)


def test_shares_of_time_fill_it() -> None:
    own = [turn(2, compute_seconds=0.5, stall_seconds=0.25, host_seconds=0.75, read_seconds=1)]
    assert verdict.shares(own) == {"compute": 0.25, "stall": 0.125, "host": 0.375, "read": 0.5, "rest": 0.25}


def test_overlap_is_the_part_of_reading_that_the_device_computes_through() -> None:
    assert verdict.overlap([turn(1, read_seconds=4, stall_seconds=1), turn(1, read_seconds=4)]) == 0.875
    assert verdict.overlap([turn(1, read_seconds=1, stall_seconds=2)]) == 0
    assert verdict.overlap([turn(1)]) is None


def test_a_goal_is_met_from_its_number_on() -> None:
    turns = {"ours": [turn(30)], "theirs": [turn(20)]}
    assert verdict.judge(Goal("", "ours", "theirs", 1.4), turns)["met"]
    assert not verdict.judge(Goal("", "ours", "theirs", 1.6), turns)["met"]


def test_the_best_peer_is_the_one_to_beat() -> None:
    speeds = {"ours": 99, "ours 25%": 70, "ours 50%": 80, "bigrig 25%": 30, "boyle 25%": 40, "bigrig 50%": 90}
    found = streaming_speed.goals({name: [turn(speed)] for name, speed in speeds.items()}, tuple(PEERS))
    assert [(goal.of, goal.against) for goal in found] == [
        ("ours 25%", "boyle 25%"),
        ("ours 25%", "ours"),
        ("ours 50%", "ours"),
    ]


def test_every_peer_is_pinned_and_shares_mlx() -> None:
    names = [name for name, _, number in (each.partition("==") for each in requirements()) if number]
    assert {*PEERS, "mlx", "mlx-lm"} <= set(names)
    assert {entry.system for entry in streaming_speed.entries(128, tuple(PEERS))} == {"mlx_lm", "ours", *PEERS}


ECHO = """
import json, sys
setup = json.loads(sys.argv[1])
if setup["system"] == "missing":
    print(json.dumps({"error": "RuntimeError: no such layer"}), flush=True)
    sys.exit(1)
print(json.dumps({"notes": ["stubbed"]}), flush=True)
for line in sys.stdin:
    wanted = json.loads(line)
    if setup["system"] == "crashes":
        sys.exit("out of slots")
    tokens = wanted["prompt"][: wanted["tokens"]]
    seconds = list(range(len(tokens)))
    traffic = {"misses": 2, "read_seconds": 0.5, "stall_seconds": 0.1, "bytes": 8} if setup["slots"] else {}
    print(json.dumps({"tokens": tokens, "seconds": seconds, "cpu_seconds": 0.5, "traffic": traffic}), flush=True)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    script = tmp_path / "contestant.py"
    script.write_text(ECHO)
    monkeypatch.setattr(process, "SCRIPT", script)
    return lambda system: Process(Entry(system, system), tmp_path, tmp_path)


def test_a_process_answers_prompt_by_prompt(start: Any) -> None:
    echo = start("echoes")
    assert echo.notes == ["stubbed"]
    assert echo.turn([5, 6, 7], 2) == Turn([5, 6], [0, 1], 0.5, {})
    assert echo.turn([8, 9], 2).tokens == [8, 9]
    echo.close()


def test_what_stops_a_contestant_is_its_result(start: Any) -> None:
    with pytest.raises(Failed, match="no such layer"):
        start("missing")
    crashing = start("crashes")
    with pytest.raises(Failed, match="status 1: out of slots"):
        crashing.turn([1, 2], 2)
    crashing.close()
    short = start("echoes")
    with pytest.raises(Failed, match="2 of 3 tokens"):
        short.turn([1, 2], 3)
    short.close()


def test_a_contestant_that_fails_is_out_and_the_others_go_on(start: Any) -> None:
    processes = {name: start(name) for name in ("echoes", "crashes")}
    turns, failures = streaming_speed.race(processes, [[1, 2], [3, 4]], 2, 3)
    assert [each.tokens for each in turns["echoes"]] == [[1, 2], [3, 4]] * 3
    assert list(failures) == ["crashes"]
    assert list(turns) == ["echoes"]
    for each in processes.values():
        each.close()


@pytest.mark.usefixtures("start")
def test_everybody_is_in_the_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_speed, "make_environment", lambda _: sys.executable)
    monkeypatch.setitem(streaming_speed.OPTIONS, "boyle", {})
    entries = streaming_speed.entries
    broken = Entry("bigrig 25%", "missing", 32)
    monkeypatch.setattr(
        streaming_speed,
        "entries",
        lambda *given: [broken if entry.name == broken.name else entry for entry in entries(*given)],
    )
    options = "--json --peers --prompts 2 --tokens 9 --repeats 2"
    monkeypatch.setattr(sys, "argv", [streaming_speed.__file__, *options.split()])
    streaming_speed.main()
    result = json.loads(capsys.readouterr().out)
    assert {row["equal_tokens"] for row in result["rows"]} == {1}
    names = [row["contestant"] for row in result["rows"]] + list(result["failures"])
    assert sorted(names) == sorted(entry.name for entry in entries(128, tuple(PEERS)))
    assert result["failures"] == {"bigrig 25%": "RuntimeError: no such layer"}
    assert {goal["reached"] for goal in result["goals"]} == {1}
    assert result["parts"][0]["overlap"] == pytest.approx(0.8)


def test_streaming_gives_the_tokens_of_mlx_lm(tmp_path: Path) -> None:
    model = embedded_with_float32_scales(tmp_path / "model")
    found = {}
    for name, system, slots in (("mlx_lm", "mlx_lm", None), ("all", "ours", None), ("some", "ours", 16)):
        for quantised in (False, True):
            options = {"packed": True, "quantised": quantised}
            setup = contestant.Setup(system, str(model), slots, str(tmp_path), options)
            found[name, quantised] = contestant.turn(contestant.SYSTEMS[system](setup), list(range(500, 520)), 6)
    assert len({tuple(turn["tokens"]) for turn in found.values()}) == 1
    assert found["some", False]["traffic"]["misses"] > 0
    assert not found["all", False]["traffic"]


def test_quantised_experts_stay_so_where_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = embedded_with_float32_scales(tmp_path / "model"), []
    original = dequantised.dequantise

    def dequantise(loaded: nn.Module, *room: int) -> None:
        original(loaded, *room)
        kept.append([isinstance(block.switch_mlp.up_proj, QuantizedSwitchLinear) for block in blocks(loaded)])

    monkeypatch.setattr(loading, "dequantise", dequantise)
    for quantised in (True, False):
        contestant.load_ours(contestant.Setup("ours", str(model), None, str(tmp_path), {"quantised": quantised}))
    assert [set(each) for each in kept] == [{True}, {False}]
