"""A Hugging Face hub on loopback: one repository, what huggingface_hub asks of it, and faults on demand."""

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO = "owner/tiny-moe"
COMMIT = hashlib.sha1(b"first").hexdigest()


@dataclass(frozen=True)
class Status:
    """Refuse with an HTTP status, as the hub does: what exactly is wrong stands in a header."""

    code: int
    error_code: str | None = None
    message: str | None = None


@dataclass(frozen=True)
class Drop:
    """Announce the whole body, send ``after`` bytes of it, then close (or, with ``reset``, abort)."""

    after: int
    reset: bool = False


@dataclass(frozen=True)
class Replace:
    """Answer 200 with another body: a file that is not what the listing promised."""

    body: bytes


@dataclass(frozen=True)
class Silence:
    """Accept the request and never answer it."""


Trouble = Status | Drop | Replace | Silence


@dataclass(frozen=True)
class Request:
    """What arrived: ``target`` is ``info``, ``tree`` or the name of a file."""

    method: str
    target: str
    revision: str | None
    range: str | None
    authorization: str | None


@dataclass
class Hub:
    """The repository that the server shows, the faults it plays and the requests it has seen."""

    files: dict[str, bytes]
    endpoint: str = ""
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    requests: list[Request] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    _troubles: dict[tuple[str, str], Iterator[Trouble]] = field(default_factory=dict)

    def trouble(self, method: str, target: str, troubles: Iterable[Trouble]) -> None:
        """Play ``troubles`` for the next requests of this kind, one each; then answer properly again."""
        self._troubles[method, target] = iter(troubles)

    def recover(self) -> None:
        self._troubles.clear()

    def next_trouble(self, request: Request) -> Trouble | None:
        return next(self._troubles.get((request.method, request.target), iter(())), None)

    def fetched(self) -> list[str]:
        """The files whose content was asked for, in order of arrival."""
        return [r.target for r in self.requests if r.method == "GET" and r.target not in ("info", "tree")]

    def commit(self, revision: str | None) -> str | None:
        revision = revision or "main"
        return revision if revision in self.refs.values() else self.refs.get(revision)

    def info(self, commit: str) -> object:
        return {"id": REPO, "sha": commit, "siblings": [{"rfilename": name} for name in self.files]}

    def tree(self) -> object:
        return [
            {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
            for name, body in self.files.items()
        ]


API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: Nagle would hold the second for 40 ms
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep the tests' output clean."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = urlsplit(self.path).path
        if match := API.fullmatch(path):
            repo, kind, revision = match.groups()
            target = "tree" if kind == "tree" else "info"
        elif match := FILE.fullmatch(path):
            repo, revision, target = match.groups()
        else:
            return self.refuse(Status(404))
        revision = unquote(revision) if revision else None
        request = Request(self.command, unquote(target), revision, self.headers["Range"], self.headers["Authorization"])
        self.hub.requests.append(request)
        commit = self.hub.commit(revision)
        trouble = self.hub.next_trouble(request)
        if isinstance(trouble, Silence):
            self.hub.closing.wait()
            self.close_connection = True
        elif isinstance(trouble, Status):
            self.refuse(trouble)
        elif repo != REPO:
            self.refuse(Status(404, "RepoNotFound"))
        elif commit is None:
            self.refuse(Status(404, "RevisionNotFound"))
        elif request.target == "info":
            self.send(json.dumps(self.hub.info(commit)).encode(), commit, trouble)
        elif request.target == "tree":
            self.send(json.dumps(self.hub.tree()).encode(), commit, trouble)
        elif request.target in self.hub.files:
            self.send(self.hub.files[request.target], commit, trouble, request.range)
        else:
            self.refuse(Status(404, "EntryNotFound"))
        return None

    def send(self, body: bytes, commit: str, trouble: Trouble | None, span: str | None = None) -> None:
        etag = hashlib.sha256(body).hexdigest()
        if isinstance(trouble, Replace):
            body = trouble.body
        total, start = len(body), int(span.removeprefix("bytes=").split("-")[0]) if span else 0
        self.send_response(206 if span else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Linked-Etag", f'"{etag}"')
        self.send_header("X-Linked-Size", str(total))
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(total - start))
        if span:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if not isinstance(trouble, Drop):
            self.wfile.write(body[start:])
            return
        self.wfile.write(body[start : start + trouble.after])
        if trouble.reset:  # closing a socket that does not linger sends RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = True

    def refuse(self, status: Status) -> None:
        self.send_response(status.code)
        if status.error_code:
            self.send_header("X-Error-Code", status.error_code)
        if status.message:
            self.send_header("X-Error-Message", status.message)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Hub]:
    """Serve ``files`` as the repository ``REPO`` until the block ends."""
    hub = Hub(files)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.closing.set()
            server.shutdown()
            thread.join()
