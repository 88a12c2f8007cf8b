"""Minutes of clients that behave and of clients that do not, and whether everybody who behaved got the right answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from .client import Answer, Prompt, Refused, ask, ask_whole, body, client
from .processes import MODEL, Server

HUGE = 9_000_000  # bytes of a body that is larger than --max-body allows
# What a client does, and how often of a hundred times.
CHANCES = {"streamed": 55, "whole": 15, "leaves": 15, "malformed": 5, "invalid": 4, "huge": 3, "half": 3}
MALFORMED = (b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"prompt": "x", "max_tokens":', b"null", b"{}" * 50)
INVALID: tuple[dict[str, Any], ...] = (
    {"max_tokens": 0},
    {"max_tokens": "many"},
    {"temperature": -1},
    {"prompt": None},
    {"prompt": []},
    {"stop": 7},
    {"n": 10**6},
    {"logit_bias": {"abc": 1}},
    {"prompt": "word " * 400_000},
)


@dataclass
class Findings:
    """done: requests by kind. wrong: answers that are not what a request alone got. failed: requests that behaved and
    got no answer, or that did not and were not told so. memory: bytes of the server's process, by second.
    """

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    busy: int = 0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0


async def soak(
    server: Server,
    prompts: Sequence[Prompt],
    streams: int,
    seconds: float,
    seed: int = 0,
    report: Callable[[float], object] = lambda _: None,
) -> Findings:
    """Let ``streams`` clients at a time do what CHANCES says. report: told the seconds that have passed."""
    findings = Findings()
    async with client() as http:
        expected = [await ask(http, server.url, prompt) for prompt in prompts]
        start = time.perf_counter()

        async def visitor(number: int) -> None:
            chance = random.Random(seed * 1000 + number)
            while (now := time.perf_counter() - start) < seconds and server.running:
                report(now)
                await _visit(http, server.url, prompts, expected, chance, findings)

        async def watch() -> None:
            while (now := time.perf_counter() - start) < seconds and server.running:
                findings.memory.append((now, server.resident_bytes()))
                await asyncio.sleep(1)

        await asyncio.gather(watch(), *(visitor(number) for number in range(streams)))
        findings.seconds = time.perf_counter() - start
    if not server.running:
        findings.failed.append(f"the server has ended: {server.log()[-500:]}")
    return findings


async def _visit(
    http: httpx.AsyncClient,
    url: str,
    prompts: Sequence[Prompt],
    expected: Sequence[Answer],
    chance: random.Random,
    findings: Findings,
) -> None:
    kind = chance.choices(list(CHANCES), list(CHANCES.values()))[0]
    place = chance.randrange(len(prompts))
    prompt, right = prompts[place], expected[place]
    findings.done[kind] += 1
    try:
        if kind == "leaves":
            await ask(http, url, prompt, leave_after=chance.randint(1, 12))
        elif kind in ("streamed", "whole"):
            answer = await (ask if kind == "streamed" else ask_whole)(http, url, prompt)
            _compare(kind, place, answer, right, findings)
        else:
            await _misbehave(http, url, kind, chance, findings)
    except Refused as refused:
        if refused.status == 429:
            findings.busy += 1
            await asyncio.sleep(float(refused.retry_after or 1))
        else:
            findings.failed.append(f"{kind}: {refused}")
    except httpx.HTTPError as error:
        findings.failed.append(f"{kind}: {type(error).__name__}: {error}")


def _compare(kind: str, place: int, answer: Answer, right: Answer, findings: Findings) -> None:
    findings.tokens += answer.tokens
    findings.gaps += answer.gaps
    if answer.first is not None:
        findings.first.append(answer.first)
    if (answer.text, answer.finish, answer.tokens) != (right.text, right.finish, right.tokens):
        differs = next((i for i, (a, b) in enumerate(zip(answer.text, right.text, strict=False)) if a != b), -1)
        findings.wrong.append(f"{kind}, prompt {place}: {answer.finish}, differs from character {differs}")


async def _misbehave(http: httpx.AsyncClient, url: str, kind: str, chance: random.Random, findings: Findings) -> None:
    """Send what the server must refuse, and look whether it says so as OpenAI does."""
    address, allowed = f"{url}/v1/completions", {400, 422}
    if kind == "malformed":
        response = await http.post(
            address, content=chance.choice(MALFORMED), headers={"content-type": "application/json"}
        )
    elif kind == "invalid":
        wrong = {**body(Prompt("x", 4), stream=chance.random() < 0.5), **chance.choice(INVALID)}
        response = await http.post(address, json=wrong)
    elif kind == "huge":
        allowed = {413}
        try:
            response = await http.post(address, content=b" " * HUGE, headers={"content-type": "application/json"})
        except httpx.WriteError:  # it hung up before it had read all, which is its right
            return
    else:
        await _half(url)
        return
    if response.status_code not in allowed:
        findings.failed.append(f"{kind}: status {response.status_code}: {response.text[:200]}")
    elif "message" not in response.json().get("error", {}):
        findings.failed.append(f"{kind}: an error of another shape: {response.text[:200]}")


async def _half(url: str) -> None:
    """Hang up in the middle of a body."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    request = json.dumps({"model": MODEL, "prompt": "x" * 1000})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(request)}\r\n\r\n{request[:500]}".encode())
    await writer.drain()
    writer.close()
    await writer.wait_closed()


def summary(findings: Findings) -> dict[str, Any]:
    """Ready for JSON. memory_by_minute: mean bytes. memory_growth: the last minute's over the second's, less one; None
    where there were fewer than three.
    """
    by_minute = [
        float(np.mean([size for at, size in findings.memory if int(at // 60) == minute]))
        for minute in sorted({int(at // 60) for at, _ in findings.memory})
    ]
    return {
        "seconds": findings.seconds,
        "requests": dict(findings.done),
        "wrong": findings.wrong,
        "failed": findings.failed,
        "busy": findings.busy,
        "tokens_per_s": findings.tokens / findings.seconds,
        "first_token_ms": _percentiles(findings.first),
        "between_tokens_ms": _percentiles(findings.gaps),
        "memory_by_minute": by_minute,
        "memory_growth": by_minute[-1] / by_minute[1] - 1 if len(by_minute) > 2 else None,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{share}": 1e3 * float(np.percentile(seconds, share)) for share in (50, 99)}
