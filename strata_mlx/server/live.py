"""What the server shows of itself: whether it is well, metrics, the live state of its engine, and the page."""

from __future__ import annotations

import asyncio
import hashlib
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import PurePath
from typing import Any, Protocol

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder
from sse_starlette import EventSourceResponse

from .._version import __version__
from .metrics import registry
from .state import State

EVERY = 0.2  # seconds between two looks at the engine, for those who follow it
AT_LEAST = 1.0  # seconds after which they are sent its state, even if nothing has changed
# The page runs nothing and loads nothing that is not its own, and no other page may show it in a frame.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # ask whether it has changed
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Watched(Protocol):
    """What is asked of an Engine here."""

    @property
    def alive(self) -> bool:
        """Whether the generation thread lives and makes progress."""

    def state(self) -> State:
        """A snapshot, from any thread."""


def router(engine: Watched) -> APIRouter:
    """``/health``, ``/metrics`` and ``/v1/engine`` of an engine."""
    result = APIRouter()
    metrics = registry(engine.state)

    @result.get("/health")
    async def health() -> JSONResponse:
        """200 while texts can be generated, else 503 with the reason."""
        if engine.alive:
            return JSONResponse({"status": "ok"})
        reason = engine.state().trouble or "the generation thread makes no progress"
        return JSONResponse({"status": "failed", "reason": reason}, 503)

    @result.get("/metrics")
    def scrape(request: Request) -> Response:
        """In Prometheus' text format, or OpenMetrics where that is asked for."""
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics), headers={"Content-Type": media_type})

    @result.get("/v1/engine", response_model=None)
    async def live(request: Request) -> Response:
        """The state as JSON; to who accepts text/event-stream, each new one as a server-sent event."""
        if "text/event-stream" in request.headers.get("accept", ""):
            return EventSourceResponse(_changes(engine))
        return JSONResponse(as_json(engine.state()), headers={"Cache-Control": "no-store"})

    return result


async def _changes(engine: Watched) -> AsyncIterator[dict[str, str]]:
    sent: State | None = None
    while True:
        state = engine.state()
        if sent is None or state.at - sent.at >= AT_LEAST or replace(state, at=sent.at) != sent:
            yield {"data": json.dumps(as_json(state), separators=(",", ":"))}
            sent = state
        await asyncio.sleep(EVERY)


def as_json(state: State) -> dict[str, Any]:
    """The fields of a State, and the program's version.

    ``resident`` of a layer is a bit for each expert, the first one the lowest bit of the first byte, in Base64: half of
    512 experts in 48 layers are 4 KB, not 50.
    """
    experts = state.experts
    result = asdict(replace(state, experts=replace(experts, streamed=())))
    result["experts"]["streamed"] = [
        {"layer": layer.layer, "slots": layer.slots, "resident": _bits(layer.resident, experts.count)}
        for layer in experts.streamed
    ]
    return {"version": __version__, **result}


def _bits(ids: tuple[int, ...], count: int) -> str:
    held = np.zeros(count, np.bool_)
    held[list(ids)] = True
    return b64encode(np.packbits(held, bitorder="little").tobytes()).decode()


def page_router() -> APIRouter:
    """``/`` and what it loads. The files are read now: no path from a request is ever looked for on a disk."""
    result = APIRouter(include_in_schema=False)
    for file in (files(__package__) / "page").iterdir():
        media_type = _TYPES.get(PurePath(file.name).suffix)
        if media_type is not None:  # not what an editor has left there
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            result.add_api_route(path, _serve(file.read_bytes(), media_type), response_model=None)
    return result


def _serve(content: bytes, media_type: str) -> Any:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**PAGE_HEADERS, "ETag": tag}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return serve
