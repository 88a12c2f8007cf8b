"""The application: both protocols, the live state and the page around one engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteHTTPException

from .._version import __version__
from ..errors import Fault, InputError
from . import anthropic, live, openai, problems, schema
from .jobs import Busy
from .limits import Gate
from .serving import Generates, Server, Settings

logger = logging.getLogger("strata_mlx.server")


def make_app(engine: Generates, settings: Settings) -> FastAPI:
    """The application. It starts ``engine`` when it starts, and closes it when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await run_in_threadpool(engine.close)

    app = FastAPI(
        title="strata-mlx",
        version=__version__,
        lifespan=lifespan,
        # Their pages load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
    )
    # The last one added comes first: a browser asks without the key whether it may ask.
    app.add_middleware(Gate, limits=settings.limits)
    if settings.limits.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.limits.origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    server = Server(engine, settings)
    app.include_router(openai.router(server))
    app.include_router(anthropic.router(server))
    app.include_router(live.router(engine))
    app.include_router(live.page_router())
    _answer_errors(app)
    return app


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, param = schema.explain(error.errors()[0])
        return problems.response(request.url.path, 400, message, param)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        path, message, param, code = request.url.path, error.detail, None, None
        match error.status_code, message:
            case 404, "Not Found":
                message = f"there is nothing at {path}"
            case 404, _:
                param, code = "model", "model_not_found"
            case 405, _:
                message = f"{path} is not for {request.method}"
            case 400, "There was an error parsing the body":
                message = "the body cannot be read as JSON"
        return problems.response(path, error.status_code, message, param, code, error.headers)

    @app.exception_handler(InputError)
    @app.exception_handler(Busy)
    @app.exception_handler(Fault)
    async def failed(request: Request, error: Exception) -> Response:
        return problems.of(request.url.path, error)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s failed", request.url.path, exc_info=error)
        return problems.response(request.url.path, 500, "an internal error; the server's log says more")
