"""What server_load.py concludes from what its clients saw."""

import asyncio
import json
import random
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import ClassVar

import httpx
import pytest

from benchmarks.server_load import verdicts
from benchmarks.serving import soak as soaking
from benchmarks.serving.client import Answer, Prompt, client
from benchmarks.serving.soak import Findings, summary
from benchmarks.serving.throughput import MOST_DROPPED, Turn, rows
from benchmarks.serving.throughput import turn as one_turn

PATIENCE = 60


def turn(server: str, tokens: int, seconds: float, text: str = "a") -> Turn:
    return Turn(server, 1, [Answer(text, "length", tokens, 0.5)], seconds, seconds / 2)


def test_a_ratio_is_the_median_over_pairs_of_a_round() -> None:
    pairs = [
        [turn("ours", 20, 1), turn("mlx_lm.server", 10, 1, "b")],
        [turn("ours", 20, 10), turn("mlx_lm.server", 10, 10)],  # a slow spell of the machine
        [turn("ours", 30, 1), turn("mlx_lm.server", 10, 1)],
    ]
    ours, other = rows(pairs)
    assert (ours["of_mlx_lm"], other["of_mlx_lm"]) == (2, 1)
    assert (ours["tokens_per_s"], ours["same_text"]) == (20, pytest.approx(2 / 3))
    assert ours["cpu_ms_per_token"] == 25
    found = {verdict["goal"]: verdict["met"] for verdict in verdicts([ours, other], None)}
    assert found == {"1 streams, at least": True, "1 streams, goal": True}


def test_growth_of_memory_is_the_last_minutes_over_the_seconds() -> None:
    minutes = [50.0, 100.0, 101.0, 103.0]
    memory = [(60.0 * minute + second, int(size)) for minute, size in enumerate(minutes) for second in range(60)]
    result = summary(Findings(memory=memory, first=[0.1, 0.2], gaps=[0.01] * 99 + [1.0], seconds=240))
    assert result["memory_by_minute"] == minutes
    assert result["memory_growth"] == pytest.approx(0.03)
    assert result["first_token_ms"]["p50"] == pytest.approx(150)
    judged = {verdict["goal"]: verdict["met"] for verdict in verdicts([], result)}
    assert judged == {"wrong answers": True, "failed requests": True, "growth of memory": False}


class Says(BaseHTTPRequestHandler):
    """A server that gives everybody the same answer."""

    status: ClassVar[int] = 200
    said: ClassVar[dict[str, object]] = {}
    drops: ClassVar[int] = 0  # connections that it closes without an answer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if type(self).drops:
            type(self).drops -= 1
            return
        body = json.dumps(self.said).encode()
        self.send_response(self.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Says) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(PATIENCE)


def visit(url: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> Findings:
    monkeypatch.setattr(soaking, "CHANCES", {kind: 1})
    findings = Findings()

    async def main() -> None:
        async with client() as http:
            right = Answer("right", "length", 2)
            await soaking._visit(http, url, [Prompt("x", 2)], [right], random.Random(0), findings)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    return findings


@pytest.mark.parametrize(("text", "wrong"), [("right", 0), ("wrong", 1), ("righ", 1)])
def test_an_answer_that_differs_is_wrong(url: str, text: str, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"choices": [{"text": text, "finish_reason": "length"}], "usage": {"completion_tokens": 2}}
    monkeypatch.setattr(Says, "said", said)
    findings = visit(url, "whole", monkeypatch)
    assert (len(findings.wrong), findings.failed) == (wrong, [])


@pytest.mark.parametrize("kind", ["malformed", "invalid", "huge"])
def test_a_server_that_takes_what_it_must_refuse_has_failed(
    url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Says, "said", {"error": {"message": "no"}})
    assert len(visit(url, kind, monkeypatch).failed) == 1
    monkeypatch.setattr(Says, "status", 413 if kind == "huge" else 400)
    assert visit(url, kind, monkeypatch).failed == []
    monkeypatch.setattr(Says, "said", {"detail": "no"})
    assert "another shape" in visit(url, kind, monkeypatch).failed[0]


def test_a_request_that_behaves_and_is_refused_has_failed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Says, "status", 500)
    assert len(visit(url, "streamed", monkeypatch).failed) == 1


def test_a_connection_that_is_dropped_is_made_again_and_counted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(name="mlx_lm.server", url=url, running=True, cpu_seconds=lambda: None)
    monkeypatch.setattr(Says, "drops", 2)
    answered = asyncio.run(asyncio.wait_for(one_turn(server, 1, [Prompt("x", 2)]), PATIENCE))  # type: ignore[arg-type]
    assert (len(answered.answers), answered.dropped) == (1, 2)
    monkeypatch.setattr(Says, "drops", MOST_DROPPED + 1)
    with pytest.raises(httpx.RemoteProtocolError):
        asyncio.run(asyncio.wait_for(one_turn(server, 1, [Prompt("x", 2)]), PATIENCE))  # type: ignore[arg-type]
