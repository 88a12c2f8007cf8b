"""Who may ask, and how much: keys, hosts, pages of others, and bodies of every kind."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from strata_mlx.server.limits import LOOPBACK, Limits
from strata_mlx.server.serving import Settings

from .conftest import Serve
from .scripted import END, WAIT, ScriptedEngine, serving

ASK: list[Any] = [{"role": "user", "content": "what nobody else may see"}]
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
KEY = "a key"


def post(url: str, path: str = CHAT, **options: Any) -> httpx.Response:
    if "content" not in options:
        options.setdefault("json", {"messages": ASK})
    return httpx.post(f"{url}{path}", timeout=WAIT, **options)


# Keys


@pytest.fixture(scope="module")
def locked(tokenizer: TokenizerWrapper) -> Iterator[str]:
    """The address of a server with a key."""
    with serving(ScriptedEngine(), Settings(tokenizer, names=("tiny",), limits=Limits(key=KEY))) as url:
        yield url


@pytest.mark.parametrize(
    "headers", [{"Authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer {KEY}"}, {"x-api-key": KEY}]
)
def test_who_has_the_key_may_ask(locked: str, headers: dict[str, str]) -> None:
    assert post(locked, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Bearer a kex"},
        {"Authorization": "Bearer a ke"},
        {"x-api-key": ""},
        {"x-api-key": b"\xff"},
    ],
)
def test_nobody_else_may(locked: str, headers: dict[str, Any]) -> None:
    for path in (CHAT, MESSAGES):
        response = post(locked, path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/engine",
        "/metrics",
        "/openapi.json",
        "/v1/nothing",
        "/page",
        "/page/../v1/models",
        "//v1/models",
    ],
)
def test_all_else_needs_the_key_too(locked: str, path: str) -> None:
    with httpx.Client(base_url=locked, timeout=WAIT) as client:
        address = client.base_url.copy_with(raw_path=path.encode())
        assert client.get(address).status_code == 401


def test_the_page_asks_for_the_key_itself(locked: str) -> None:
    assert httpx.get(f"{locked}/", timeout=WAIT).status_code == 200
    assert httpx.get(f"{locked}/page/page.css", timeout=WAIT).status_code == 200
    assert httpx.get(f"{locked}/health", timeout=WAIT).status_code == 200


def test_clients_give_the_key_as_they_do(locked: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{locked}/v1", api_key="wrong", max_retries=0).models.list()
    assert openai.OpenAI(base_url=f"{locked}/v1", api_key=KEY, max_retries=0).models.list().data
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=locked, api_key="wrong", max_retries=0).messages.count_tokens(
            model="tiny", messages=ASK
        )
    assert anthropic.Anthropic(base_url=locked, api_key=KEY, max_retries=0).messages.count_tokens(
        model="tiny", messages=ASK
    )


# Hosts and pages of others


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1", "[::1]:1", "LOCALHOST"])
def test_names_of_this_machine_are_answered_to(url: str, host: str) -> None:
    assert post(url, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "evil.example:127", "[::1", ""]
)
def test_other_names_are_not(url: str, engine: ScriptedEngine, host: str) -> None:
    response = post(url, headers={"Host": host})
    assert response.status_code == 403
    assert response.json()["error"]["type"] == "permission_error"
    assert httpx.get(f"{url}/", headers={"Host": host}, timeout=WAIT).status_code == 403
    assert not engine.streams


def test_where_any_name_will_do(engine: ScriptedEngine, serve: Serve) -> None:
    assert post(serve(engine, limits=Limits(hosts=None)), headers={"Host": "my.host"}).status_code == 200


def test_pages_of_others_may_not_ask(url: str, engine: ScriptedEngine) -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", f"{url}.evil.example"):
        response = post(url, headers={"Origin": origin})
        assert response.status_code == 403
        assert "--allowed-origins" in response.json()["error"]["message"]
        assert "access-control-allow-origin" not in response.headers
    assert not engine.streams
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in httpx.options(f"{url}{CHAT}", headers=asked, timeout=WAIT).headers
    assert post(url, headers={"Origin": url}).status_code == 200


@pytest.mark.parametrize("origins", [("https://mine.example",), ("*",)])
def test_pages_that_are_allowed_may(engine: ScriptedEngine, serve: Serve, origins: tuple[str, ...]) -> None:
    url = serve(engine, limits=Limits(origins=origins, key=KEY))
    origin = {"Origin": "https://mine.example"}
    before = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    told = httpx.options(f"{url}{CHAT}", headers=before, timeout=WAIT)
    assert told.status_code == 200
    assert told.headers["access-control-allow-origin"] in ("https://mine.example", "*")
    assert told.headers["access-control-allow-headers"] == "authorization"
    answer = post(url, headers={**origin, "Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" in answer.headers
    if origins != ("*",):
        assert post(url, headers={"Origin": "https://other.example", "x-api-key": KEY}).status_code == 403


def test_a_page_cannot_ask_without_being_asked_first(url: str, engine: ScriptedEngine) -> None:
    """A browser sends a form or plain text to another server without asking whether it may."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = post(url, content=json.dumps({"messages": ASK}).encode(), headers={"Content-Type": kind})
        assert response.status_code == 400
    assert not engine.streams


# Bodies


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "invalid_request_error"), (MESSAGES, "request_too_large")])
def test_a_body_that_is_too_large_is_not_read(engine: ScriptedEngine, serve: Serve, path: str, kind: str) -> None:
    url = serve(engine, limits=Limits(body=1000))

    def pieces(count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield b" " * 100

    headers = {"Content-Type": "application/json"}
    for content in (b" " * 1001, b" " * 100_000, pieces(11), pieces(1000)):
        response = post(url, path, content=content, headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["type"] == kind
        assert "1 KB" in response.json()["error"]["message"]
    body = json.dumps({"model": "tiny", "max_tokens": 3, "messages": ASK}).encode()
    assert post(url, path, content=body.ljust(1000), headers=headers).status_code == 200
    assert post(url, path, content=iter([body, b" " * 500]), headers=headers).status_code == 200


def test_what_is_too_large_is_told_before_it_is_sent(engine: ScriptedEngine, serve: Serve) -> None:
    address = urlsplit(serve(engine, limits=Limits(body=1000)))
    with socket.create_connection((address.hostname, address.port), timeout=WAIT) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000000000\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_text_that_cannot_fit_is_not_taken_apart(
    engine: ScriptedEngine, serve: Serve, tokenizer: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, longest = serve(engine, max_context=10), len(END)
    assert post(url, "/v1/completions", json={"prompt": "x" * 10 * longest}).status_code == 200
    monkeypatch.setattr(type(tokenizer), "encode", None, raising=False)
    for path, body, field in (
        ("/v1/completions", {"prompt": "x" * (10 * longest + 1)}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 10 * longest}]}, "messages"),
    ):
        response = post(url, path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
        assert "room for 10 tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/completions"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b"{'a': 1}", b"[" * 100_000, b'{"a":' * 100_000, b"NaN",
     b'{"messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\ud800", "model": "tiny", "max_tokens": 3}'],
)  # fmt: skip
def test_a_body_that_is_no_request_is_an_error_in_the_protocols_shape(
    url: str, engine: ScriptedEngine, path: str, body: bytes
) -> None:
    response = post(url, path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert ("param" in response.json()["error"]) == (path != MESSAGES)
    assert not engine.streams


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/chat", 404),
        ("POST", "/v1/messages/other", 404),
        ("GET", "/v1/messages", 405),
        ("GET", "/page/../../pyproject.toml", 404),
        ("GET", "/page/%2e%2e/%2e%2e/pyproject.toml", 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/docs", 404),
    ],
)
def test_addresses_that_are_none(url: str, method: str, path: str, status: int) -> None:
    with httpx.Client(base_url=url, timeout=WAIT) as client:
        response = client.request(method, client.base_url.copy_with(raw_path=path.encode()))
    assert response.status_code == status
    assert response.json()["error"]["message"]
    assert (response.json().get("type") == "error") == path.startswith(MESSAGES)


def test_the_protocol_is_described(url: str) -> None:
    paths = httpx.get(f"{url}/openapi.json", timeout=WAIT).json()["paths"]
    assert {CHAT, MESSAGES, "/v1/completions", "/v1/models", "/health"} <= paths.keys()


# What is kept to itself


def test_an_internal_error_is_logged_and_not_told(
    url: str, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.refusal = RuntimeError("what nobody needs to know")
    for path in (CHAT, "/v1/completions"):
        response = post(url, path, json={"messages": ASK} if path == CHAT else {"prompt": "x"})
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "nobody needs" not in response.text
    assert "what nobody needs to know" in caplog.text


@pytest.mark.parametrize("asked", [False, True])
def test_logs_hold_prompts_only_where_that_is_asked_for(
    engine: ScriptedEngine, serve: Serve, caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("sse_starlette").setLevel(logging.INFO)  # as the command does
    url = serve(engine, log_prompts=asked)
    assert post(url).status_code == 200
    assert post(url, json={"messages": ASK, "stream": True}).status_code == 200
    assert post(url, json={"messages": ASK, "temperature": -1}).status_code == 400
    assert post(url, json={"messages": ASK, "surprise": 1}).status_code == 400
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert any("what nobody else may see" in message for message in ours) == asked


def test_the_hosts_of_a_server_that_nobody_told_are_this_machines() -> None:
    assert Limits().hosts == LOOPBACK
    assert not Limits().origins
