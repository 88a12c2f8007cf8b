"""Anthropic's protocol: messages, whole and as events, and the counting of their tokens."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from sse_starlette import ServerSentEvent

from ..errors import Fault, InputError
from . import problems
from .anthropic_schema import Conversation, CountRequest, MessagesRequest
from .chat import Call, Part, Reader, Reasoning, Text, chat_text
from .jobs import End, Usage
from .openai import extension
from .serving import Events, Server, answer, steps
from .streams import Stream

MESSAGES = problems.ANTHROPIC
_REASONS = {"stop": "end_turn", "length": "max_tokens", "cancelled": "end_turn"}


def router(server: Server) -> APIRouter:
    routes = APIRouter()
    settings = server.settings

    async def encode(asked: Conversation) -> list[int]:
        settings.check_model(asked.model)
        options = {**settings.template_options, **_thinking(asked, settings.tokenizer.has_thinking)}
        return await server.encode(chat_text, asked.rendered(), asked.callable_tools, options, asked.unfinished)

    @routes.post(MESSAGES)
    async def messages(asked: MessagesRequest, request: Request) -> Response:
        prompt = await encode(asked)
        streams = server.submit([asked.job(prompt, settings.sampling)])
        reader = Reader(settings.tokenizer, prompt, asked.callable_tools, asked.one_call)
        message = _Message(settings.model)
        if asked.stream:
            return Events(message.events(streams[0], reader), streams, ping=lambda: _event({"type": "ping"}))
        return await answer(request, streams, message.whole(streams[0], reader))

    @routes.post(f"{MESSAGES}/count_tokens")
    async def count_tokens(asked: CountRequest) -> dict[str, int]:
        return {"input_tokens": len(await encode(asked))}

    return routes


def _thinking(asked: Conversation, can: bool) -> dict[str, Any]:
    """What the chat template is told about thinking. Raises InputError where the model does not."""
    if asked.thinking is None:
        return {}
    wanted = asked.thinking.type == "adaptive"
    if wanted and not can:
        raise InputError("thinking: this model does not think before it answers; leave it out")
    return {"enable_thinking": wanted} if can else {}


class _Message:
    """An answer: blocks of thinking, text and calls, one after another."""

    def __init__(self, model: str):
        self.id, self.model = f"msg_{uuid.uuid4().hex}", model
        self.blocks: list[dict[str, Any]] = []
        self._open: str | None = None  # the type of the last block, while more of it may come

    async def events(self, stream: Stream, reader: Reader) -> AsyncIterator[ServerSentEvent]:
        yield _event({"type": "message_start", "message": self._message(None, stream.usage)})
        yield _event({"type": "ping"})
        try:
            async for step in steps([stream], [reader]):
                for part in step.parts:
                    for event in self._add(part):
                        yield _event(event)
                if step.end is not None:
                    for event in self._close():
                        yield _event(event)
                    delta = {"stop_reason": self._reason(step.end), "stop_sequence": step.end.stop}
                    yield _event({"type": "message_delta", "delta": delta, "usage": _usage(step.end.usage)})
        except Fault as error:
            yield _event(problems.body(MESSAGES, 500, str(error)))
            return
        yield _event({"type": "message_stop"})

    async def whole(self, stream: Stream, reader: Reader) -> dict[str, Any]:
        end: End | None = None
        async for step in steps([stream], [reader]):
            for part in step.parts:
                for _ in self._add(part):
                    pass
            end = step.end
        assert end is not None  # a stream ends with one, or a Fault is raised
        return self._message(end, end.usage)

    def _message(self, end: End | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self.blocks,
            "stop_reason": end and self._reason(end),
            "stop_sequence": end and end.stop,
            "usage": _usage(usage),
        }

    def _reason(self, end: End) -> str:
        if end.stop is not None:
            return "stop_sequence"
        called = any(block["type"] == "tool_use" for block in self.blocks)
        return "tool_use" if called and end.reason == "stop" else _REASONS[end.reason]

    def _add(self, part: Part) -> list[dict[str, Any]]:
        """Take more of the answer, and return it as events."""
        match part:
            case Text(text):
                return self._extend("text", "text", text, {"type": "text", "text": ""})
            case Reasoning(text):
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                return self._extend("thinking", "thinking", text, empty)
            case Call():
                return self._call(part)

    def _extend(self, kind: str, field: str, text: str, empty: dict[str, Any]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if self._open != kind:
            events = [*self._close(), *self._begin(empty)]
            self.blocks.append(dict(empty))
            self._open = kind
        self.blocks[-1][field] += text
        return [*events, self._delta({"type": f"{field}_delta", field: text})]

    def _call(self, call: Call) -> list[dict[str, Any]]:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        events = [*self._close(), *self._begin(block)]
        self.blocks.append({**block, "input": call.arguments})
        self._open = "tool_use"
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        return [*events, self._delta({"type": "input_json_delta", "partial_json": arguments}), *self._close()]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "content_block_start", "index": len(self.blocks), "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]


def _event(value: Mapping[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(data=json.dumps(value, ensure_ascii=False), event=value["type"], sep="\n")


def _usage(usage: Usage) -> dict[str, Any]:
    """As the protocol has it, tokens that were not read again are not among input_tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "strata": extension([usage]),
    }
