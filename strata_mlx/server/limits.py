"""Who may ask, and how much: the key, the host that was asked for, the page that asks, and the size of a body."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..experts.sizes import format_size
from . import problems

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_WITHOUT_KEY = ("/", "/health", "/page/")  # the page asks for the key itself; /health says nothing but that


@dataclass(frozen=True)
class Limits:
    """hosts: names by which this server may be asked for, None for any: a name that an attacker has pointed at this
    machine is not among them, and so a page under that name reads nothing here (DNS rebinding). origins: of pages,
    beside this server's own, that may ask; "*" for any. key: that must be given, None for none. body: bytes of a
    request.
    """

    hosts: Collection[str] | None = LOOPBACK
    origins: Collection[str] = ()
    key: str | None = None
    body: int = 8_000_000

    def refusal(self, path: str, headers: Headers) -> tuple[int, str, str] | None:
        """Why a request may not go on, as status, message and a word for programs; None where it may."""
        host = _name(f"//{headers.get('host', '')}")
        if self.hosts is not None and host not in self.hosts:
            return 403, f"this server is not to be asked for as {host!r}: use {', '.join(sorted(self.hosts))}", "host"
        origin = headers.get("origin")
        if origin is not None and not {"*", origin} & set(self.origins) and not _same(origin, headers.get("host", "")):
            return 403, f"pages of {origin} may not ask this server: allow them with --allowed-origins", "origin"
        if (key := self._key_refusal(path, headers)) is not None:
            return 401, key, "invalid_api_key"
        length = headers.get("content-length", "")
        return (413, self.too_large, "body") if length.isdecimal() and int(length) > self.body else None

    def _key_refusal(self, path: str, headers: Headers) -> str | None:
        if self.key is None or path in _WITHOUT_KEY or path.startswith(_WITHOUT_KEY[-1]):
            return None
        if (given := _key(headers)) is None:
            return "no key was given: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            return "the key is not the one that this server was started with"
        return None

    @property
    def too_large(self) -> str:
        return f"the body is larger than the {format_size(self.body)} that --max-body allows"


class Gate:
    """Middleware that answers a request which ``limits`` refuse, before anything of its body is read, and reads no more
    of a body than they allow.
    """

    def __init__(self, app: ASGIApp, limits: Limits):
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self.limits.refusal(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        if refused is None:
            await self.app(scope, self._counted(receive), send)
            return
        status, message, code = refused
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        await problems.response(scope["path"], status, message, code=code, headers=headers)(scope, receive, send)

    def _counted(self, receive: Receive) -> Receive:
        """``receive`` that raises HTTPException where a body whose length was not told is too large."""
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limits.body:
                raise HTTPException(413, self.limits.too_large)
            return message

        return counted


def _key(headers: Headers) -> str | None:
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" and value else headers.get("x-api-key")


def _name(address: str) -> str | None:
    """Of the host in a URL, without its port."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _same(origin: str, host: str) -> bool:
    """Whether a page of ``origin`` came from ``host``, port included. The scheme may differ behind a proxy."""
    return urlsplit(origin).netloc.lower() == host.lower()
