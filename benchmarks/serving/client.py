"""A client of /v1/completions that notes when each part of an answer came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from .processes import MODEL

TIMEOUT = 300.0  # seconds without any answer, after which a request has failed


@dataclass(frozen=True)
class Prompt:
    """text: to go on from. tokens: of the answer, at most."""

    text: str
    tokens: int


@dataclass
class Answer:
    """text, finish: what was said. tokens: as the server counts them. first: seconds to the first text. gaps: seconds
    between later parts. connected: whether it came to its end.
    """

    text: str = ""
    finish: str | None = None
    tokens: int = 0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)


class Refused(Exception):
    """A status other than 200. status, body: as they came. retry_after: seconds, if the server says so."""

    def __init__(self, status: int, body: str, retry_after: str | None):
        super().__init__(f"{status}: {body[:200]}")
        self.status, self.body, self.retry_after = status, body, retry_after


def client() -> httpx.AsyncClient:
    """For many requests at a time."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(timeout=httpx.Timeout(TIMEOUT), limits=limits)


def body(prompt: Prompt, stream: bool = True) -> dict[str, Any]:
    request = {"model": MODEL, "prompt": prompt.text, "max_tokens": prompt.tokens, "temperature": 0, "stream": stream}
    return {**request, "stream_options": {"include_usage": True}} if stream else request


async def ask(http: httpx.AsyncClient, url: str, prompt: Prompt, leave_after: int | None = None) -> Answer:
    """The streamed answer. leave_after: hang up after so many parts. Raises Refused."""
    answer, start, parts = Answer(), time.perf_counter(), 0
    before = start
    async with http.stream("POST", f"{url}/v1/completions", json=body(prompt)) as response:
        await _check(response)
        async for event in _events(response):
            if "error" in event:
                raise Refused(response.status_code, json.dumps(event["error"]), None)
            answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
            for choice in event["choices"]:
                answer.finish = choice.get("finish_reason") or answer.finish
                if not choice["text"]:
                    continue
                answer.text += choice["text"]
                now = time.perf_counter()
                if answer.first is None:
                    answer.first = now - start
                else:
                    answer.gaps.append(now - before)
                before, parts = now, parts + 1
                if parts == leave_after:
                    return answer
    return answer


async def ask_whole(http: httpx.AsyncClient, url: str, prompt: Prompt) -> Answer:
    """The answer in one piece. Raises Refused."""
    response = await http.post(f"{url}/v1/completions", json=body(prompt, stream=False))
    await _check(response)
    result = response.json()
    choice = result["choices"][0]
    return Answer(choice["text"], choice["finish_reason"], result["usage"]["completion_tokens"])


async def _check(response: httpx.Response) -> None:
    if response.status_code != 200:
        text = (await response.aread()).decode(errors="replace")
        raise Refused(response.status_code, text, response.headers.get("retry-after"))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
