"""What both protocols share: settings, jobs handed in together, and answers that end when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from ..errors import StrataError
from .chat import Part, Reader, Verbatim
from .jobs import End, Job, JobError, Piece, Token
from .limits import Limits
from .streams import Stream

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from .state import State

logger = logging.getLogger("strata_mlx.server")
_PING = 15  # seconds without a word after which a proxy may think that a stream is dead
_GRACE = 2.0  # seconds that a stream has for its last event when the server ends


class Generates(Protocol):
    """What the protocols need of an engine."""

    @property
    def alive(self) -> bool: ...
    def start(self) -> None: ...
    def close(self) -> None: ...
    def submit(self, job: Job) -> Stream: ...
    def state(self) -> State: ...


@dataclass(frozen=True)
class Sampling:
    """What a request gets that does not say: fields of Job."""

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def of(self, asked: object) -> dict[str, Any]:
        """These fields by name, with what ``asked`` says in their place, where it does."""
        given = {name: getattr(asked, name, None) for name in vars(self)}
        return vars(self) | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Settings:
    """names: of the model, the first of which answers bear; a request may give any, or mlx_lm's "default_model".
    template_options: for the chat template. max_context: of the engine. log_prompts: whether logs hold what is asked.
    """

    tokenizer: TokenizerWrapper
    names: tuple[str, ...] = ("strata-mlx-embedded",)
    sampling: Sampling = field(default_factory=Sampling)
    template_options: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    max_context: int | None = None
    log_prompts: bool = False

    @property
    def model(self) -> str:
        return self.names[0]

    def check_model(self, name: str | None) -> None:
        """Raise HTTPException where a request asks for another model than this server has."""
        if name not in (None, "default_model", *self.names):
            raise HTTPException(
                404, f"there is no model {name!r} here: this server has {' and '.join(map(repr, self.names))}"
            )


class Server:
    """An engine with its settings."""

    def __init__(self, engine: Generates, settings: Settings):
        self.engine, self.settings = engine, settings
        self._encoding = asyncio.Lock()  # tokenizers are not made for several threads
        longest = max(map(len, settings.tokenizer.get_vocab()))
        self._most = None if settings.max_context is None else settings.max_context * longest

    async def encode(self, text_of: Callable[..., tuple[str, bool]], *args: Any) -> list[int]:
        """The tokens of what ``text_of``, such as chat_text(), makes of ``args``, while the event loop goes on. Raises
        InputError.
        """
        async with self._encoding:
            return await asyncio.to_thread(self._encode, text_of, *args)

    def _encode(self, text_of: Callable[..., tuple[str, bool]], *args: Any) -> list[int]:
        text, special = text_of(self.settings.tokenizer, *args)
        if self._most is not None and len(text) > self._most:  # found out in no time, which encoding it would take
            raise JobError(
                "prompt",
                f"the prompt has {len(text)} characters, and this server has room for {self.settings.max_context} "
                "tokens with the answer: send less, or start the server with a larger --max-context",
            )
        return list(self.settings.tokenizer.encode(text, add_special_tokens=special))

    def submit(self, jobs: Sequence[Job]) -> list[Stream]:
        """Hand in ``jobs`` together: all, or where one is refused, none."""
        if self.settings.log_prompts:
            for job in jobs:
                logger.info("prompt: %r", self.settings.tokenizer.decode(list(job.prompt)))
        streams: list[Stream] = []
        try:
            for job in jobs:
                streams.append(self.engine.submit(job))
        except BaseException:
            cancel(streams)
            raise
        return streams


def copies(job: Job, n: int) -> list[Job]:
    """``job`` n times, each with a seed of its own where it has one."""
    return [job if job.seed is None else replace(job, seed=job.seed + i) for i in range(n)]


def cancel(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.cancel()


@dataclass(frozen=True)
class Step:
    """What came next for one of the answers, by its ``index``. end: where it is its last."""

    index: int
    parts: tuple[Part, ...]
    tokens: tuple[Token, ...] = ()
    end: End | None = None


async def steps(streams: Sequence[Stream], readers: Sequence[Reader | Verbatim]) -> AsyncIterator[Step]:
    """The steps of all ``streams`` as they come, until the last has ended. Raises Fault where one fails."""
    if len(streams) == 1:
        async for step in _steps(0, streams[0], readers[0]):
            yield step
        return
    queue: asyncio.Queue[Step | Exception] = asyncio.Queue(maxsize=len(streams))

    async def follow(index: int) -> None:
        try:
            async for step in _steps(index, streams[index], readers[index]):
                await queue.put(step)
        except Exception as error:  # raised again below
            await queue.put(error)

    tasks = [asyncio.create_task(follow(index)) for index in range(len(streams))]
    try:
        left = len(streams)
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            left -= found.end is not None
            yield found
    finally:
        for task in tasks:
            task.cancel()


async def _steps(index: int, stream: Stream, reader: Reader | Verbatim) -> AsyncIterator[Step]:
    async for item in stream:
        if isinstance(item, Piece):
            parts = reader.feed(item.text)
            if parts or item.tokens:
                yield Step(index, tuple(parts), item.tokens)
            if reader.done:
                stream.cancel()
                yield Step(index, (), end=End("stop", None, stream.usage))
                return
        else:
            yield Step(index, tuple(reader.finish()), end=item)


class Events(EventSourceResponse):
    """Server-sent events made from ``streams``, which are cancelled when the client leaves, whenever that is."""

    def __init__(
        self,
        content: AsyncIterator[ServerSentEvent],
        streams: Sequence[Stream],
        ping: Callable[[], ServerSentEvent] | None = None,
    ):
        super().__init__(
            content,
            sep="\n",
            ping=_PING,
            ping_message_factory=ping or (lambda: ServerSentEvent(comment="working", sep="\n")),
            shutdown_grace_period=_GRACE,
        )
        self.streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            cancel(self.streams)


async def answer(request: Request, streams: Sequence[Stream], body: Awaitable[dict[str, Any]]) -> Response:
    """The whole answer at once, unless the client leaves before, which ends the work for it. Raises Fault."""
    made = asyncio.ensure_future(body)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((made, gone), return_when=asyncio.FIRST_COMPLETED)
        if made.done():
            return JSONResponse(made.result())
        return Response(status_code=499)  # nobody reads it
    finally:
        cancel(streams)
        for task in (made, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, StrataError):
                await task


async def _gone(request: Request) -> None:
    """Returns when the client has left. Its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
