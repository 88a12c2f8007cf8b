"""Errors in the shape of the protocol that was spoken, and the status that each kind has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from ..errors import InputError
from .jobs import Busy, JobError

ANTHROPIC = "/v1/messages"
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
# What fields of a job are made of, where that has another name.
_FIELDS = {("/v1/chat/completions", "prompt"): "messages"}


def body(path: str, status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """What is answered to a request for ``path``: Anthropic's shape below its address, OpenAI's elsewhere.

    param: the field that is wrong. code: a word for programs.
    """
    if path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/"):
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def response(
    path: str,
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    return JSONResponse(body(path, status, message, param, code), status, dict(headers or {}))


def of(path: str, error: Exception) -> JSONResponse:
    """The answer to a request that ended in ``error``: InputError, Busy, or something that failed."""
    if isinstance(error, Busy):
        return response(path, 429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, JobError):
        return response(path, 400, str(error), param=_FIELDS.get((path, error.field), error.field))
    if isinstance(error, InputError):
        return response(path, 400, str(error))
    return response(path, 500, str(error))
