"""A trace holds what the rounds of a text did, as long as there is room for it, and a broken one is found out."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx import InputError, load
from strata_mlx.engine import stream_generate
from strata_mlx.speculation.record import Round
from strata_mlx.trace import Trace, TraceWriter, read_trace
from tests.errors import may_refuse, refuses
from tests.tiny import make_checkpoint

PROMPT = [72, 3, 200, 3, 15]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("trace") / "model", "qwen3_next", "stacked", mtp="stacked")


def traced(path: Path, model: nn.Module, tokenizer: Any, **options: Any) -> tuple[list[int], list[Round]]:
    """Write a trace of a text; its tokens, and the rounds that were told."""
    rounds: list[Round] = []
    writer = TraceWriter(path)
    writer.begin(model, {"max_tokens": 12})

    def on_round(latest: Round) -> None:
        rounds.append(latest)
        writer.round(latest)

    options = {"mtp": True, "max_steps": 3, **options}
    responses = stream_generate(model, tokenizer, PROMPT, 12, on_round=on_round, **options)
    tokens = [each.token for each in writer.follow(responses)]
    writer.close()
    return tokens, rounds


def close(a: Round, b: Round) -> bool:
    """Equal, but for seconds, of which a trace has seven digits."""
    same = (a.confidences, a.retained, a.accepted, a.committed) == (b.confidences, b.retained, b.accepted, b.committed)
    seconds = [(a.draft_seconds, b.draft_seconds), (a.verify_seconds, b.verify_seconds)]
    return same and all(abs(x - y) < 1e-6 for x, y in [*seconds, (a.commit_seconds, b.commit_seconds)])


@pytest.mark.parametrize("mtp", [True, False])
def test_a_trace_holds_every_round(folder: Path, tmp_path: Path, mtp: bool) -> None:
    model, tokenizer = load(folder, mtp=True)
    tokens, rounds = traced(tmp_path / "trace", model, tokenizer, mtp=mtp)
    trace = read_trace(tmp_path / "trace")
    assert len(trace.rounds) == len(rounds)
    assert all(close(a, b) for a, b in zip(trace.rounds, rounds, strict=True))
    assert sum(each.committed for each in trace.rounds) == len(tokens)
    assert trace.experts == (None,) * len(rounds)
    assert trace.finish == "length"
    assert trace.header["options"] == {"max_tokens": 12}
    assert (trace.header["model"], trace.header["streams"]) == ("qwen3_next", False)
    assert any(each.drafted for each in trace.rounds) is mtp


@pytest.mark.parametrize("mtp", [True, False])
def test_what_was_read_is_told_round_by_round(folder: Path, tmp_path: Path, mtp: bool) -> None:
    model, tokenizer = load(folder, mtp=True, slots=3)
    tokens, _ = traced(tmp_path / "trace", model, tokenizer, mtp=mtp)
    assert tokens == traced(tmp_path / "other", *load(folder, mtp=True))[0]
    trace = read_trace(tmp_path / "trace")
    experts = [each for each in trace.experts if each]
    assert len(experts) == len(trace.rounds)
    traffic = model.streaming.traffic()
    for name in ("hits", "misses", "bytes"):
        assert 0 < sum(getattr(each, name) for each in experts) <= getattr(traffic, name)
    assert sum(each.misses for each in experts) == traffic.misses
    assert trace.header["streams"] is True


def test_a_text_that_stops_early_says_so(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(folder, mtp=True)
    tokens, _ = traced(tmp_path / "trace", model, tokenizer)
    writer = TraceWriter(tmp_path / "trace")
    writer.begin(model, {})
    responses = stream_generate(model, tokenizer, PROMPT, 12, mtp=True, on_round=writer.round)
    next(iter(writer.follow(responses)))
    assert read_trace(tmp_path / "trace").finish is None  # while it goes on
    writer.close()
    assert read_trace(tmp_path / "trace").finish == "interrupted"
    tokenizer.eos_token_ids = {tokens[3]}
    traced(tmp_path / "stopped", model, tokenizer)
    assert read_trace(tmp_path / "stopped").finish == "stop"


def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "trace", tmp_path / "file" / "trace"):
        (tmp_path / "file").touch()
        with refuses(InputError, f"--trace {path}", "cannot be written"):
            TraceWriter(path)


def test_a_file_stays_as_it_was_until_the_text_begins(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("an older trace, which is longer than a line of another one\n" * 100)
    TraceWriter(path).close()
    assert "older" in path.read_text()


@pytest.mark.parametrize("room", [0, 10, 300, 700, 1000])
def test_a_full_disk_ends_the_trace_and_not_the_text(
    folder: Path, tmp_path: Path, room: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load(folder, mtp=True)
    expected, _ = traced(tmp_path / "whole", model, tokenizer)
    write, left = os.write, [room]

    def limited(file: int, data: Any) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        part = min(len(data), left[0])
        left[0] -= part
        return write(file, data[:part])

    with patch.object(os, "write", limited):
        tokens, _ = traced(tmp_path / "trace", model, tokenizer)
    assert tokens == expected
    error = capsys.readouterr().err
    assert error == f"warning: {tmp_path / 'trace'}: the trace ends here: No space left on device\n"
    content = (tmp_path / "trace").read_bytes()
    assert len(content) <= room
    assert not content or content.endswith(b"\n")
    if content:
        assert read_trace(tmp_path / "trace").finish is None


HEADER = {"schema": "strata-mlx trace", "version": 1, "streams": True}
ROUND = {
    "round": 0, "p": [0.5, None], "retained": 1, "accepted": 1, "committed": 2, "rows": 2,
    "seconds": {"draft": 0.1, "verify": 0.2, "commit": 0.3},
    "experts": {"hits": 1, "misses": 2, "bytes": 3, "stall_seconds": 0.5},
}  # fmt: skip
END = {"finish": "length", "rounds": 1, "tokens": 2}
BROKEN: dict[str, tuple[list[Any], int, str]] = {
    "no header": ([ROUND], 1, "not the header"),
    "another version": ([{**HEADER, "version": 2}], 1, "has version 2"),
    "a list": ([HEADER, []], 2, "expected an object"),
    "a header without streams": ([{**HEADER, "streams": 1}], 1, "streams"),
    "a round twice": ([HEADER, ROUND, ROUND], 3, "round is 0, expected 1"),
    "p is text": ([HEADER, {**ROUND, "p": ["x"]}], 2, "p must be"),
    "no seconds": ([HEADER, {**ROUND, "seconds": {"draft": 1}}], 2, "seconds must have"),
    "a negative count": ([HEADER, {**ROUND, "retained": -1}], 2, "retained is -1"),
    "a count that is true": ([HEADER, {**ROUND, "accepted": True}], 2, "accepted is True"),
    "more accepted than retained": ([HEADER, {**ROUND, "accepted": 2}], 2, "do not go together"),
    "nothing committed": ([HEADER, {**ROUND, "committed": 0}], 2, "do not go together"),
    "rows of another window": ([HEADER, {**ROUND, "rows": 3}], 2, "do not go together"),
    "no experts": ([HEADER, {**ROUND, "experts": None}], 2, "experts"),
    "experts without a model that streams": ([{**HEADER, "streams": False}, ROUND], 2, "experts"),
    "experts without bytes": ([HEADER, {**ROUND, "experts": {"stall_seconds": 1, "hits": 1, "misses": 1}}], 2, "bytes"),
    "a wrong end": ([HEADER, ROUND, {**END, "tokens": 3}], 3, "1 rounds and 2 tokens"),
    "an end of no kind": ([HEADER, ROUND, {**END, "finish": "x"}], 3, "does not end"),
    "more after the end": ([HEADER, ROUND, END, ROUND], 4, "follows the last line"),
}


def write(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, [HEADER, ROUND, END])
    trace = read_trace(path)
    assert isinstance(trace, Trace)
    assert trace.rounds[0].confidences[0] == 0.5
    assert trace.rounds[0].confidences[1] != trace.rounds[0].confidences[1]  # not a number
    assert trace.rounds[0].seconds == pytest.approx(0.6)
    assert trace.experts[0]
    assert trace.experts[0].bytes == 3
    assert trace.finish == "length"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trace_is_found_out_by_line(name: str, tmp_path: Path) -> None:
    records, line, message = BROKEN[name]
    write(tmp_path / "trace", records)
    with refuses(InputError, f"{tmp_path / 'trace'}, line {line}: ", message):
        read_trace(tmp_path / "trace")


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for content, message in ((b"", "is empty"), (b"{}", "line 1: is cut short"), (b"x\n", "line 1: not valid JSON")):
        path.write_bytes(content)
        with refuses(InputError, path, message):
            read_trace(path)
    with refuses(InputError, "missing", "cannot be read"):
        read_trace(tmp_path / "missing")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reader") / "trace"


@given(line=st.integers(0, 2), start=st.integers(0, 200), length=st.integers(0, 30), new=st.text(max_size=8))
def test_no_content_breaks_the_reader(scratch: Path, line: int, start: int, length: int, new: str) -> None:
    path = scratch
    lines = [json.dumps(record) for record in (HEADER, ROUND, END)]
    lines[line] = lines[line][:start] + new + lines[line][start + length :]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with may_refuse(path):
        read_trace(path)
