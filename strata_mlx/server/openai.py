"""OpenAI's protocol: chat completions, completions and models; ``usage.strata`` says more of what a text has cost."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from sse_starlette import ServerSentEvent

from ..errors import Fault
from . import problems
from .chat import (
    Call,
    Part,
    Reader,
    Reasoning,
    Text,
    Verbatim,
    chat_text,
    check_options,
    function_call,
    plain_text,
)
from .jobs import End, Token, Usage
from .openai_schema import ChatRequest, CompletionRequest
from .serving import Events, Server, answer, copies, steps
from .streams import Stream

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
_SINCE = int(time.time())


def router(server: Server) -> APIRouter:
    routes = APIRouter()
    settings = server.settings

    @routes.post(CHAT)
    async def chat(asked: ChatRequest, request: Request) -> Response:
        settings.check_model(asked.model)
        check_options(asked.chat_template_kwargs, "chat_template_kwargs")
        options = {**settings.template_options, **asked.chat_template_kwargs}
        messages, tools = [message.rendered() for message in asked.messages], asked.callable_tools
        prompt = await server.encode(chat_text, messages, tools, options, False)
        streams = server.submit(copies(asked.chat_job(prompt, settings.sampling), asked.n))
        one_call = not asked.parallel_tool_calls
        readers = [Reader(settings.tokenizer, prompt, tools, one_call) for _ in streams]
        made = _Answer(_CHAT, settings.model, asked.include_usage, asked.n)
        if asked.stream:
            return Events(made.events(streams, readers), streams)
        return await answer(request, streams, made.whole(streams, readers))

    @routes.post(COMPLETIONS)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        settings.check_model(asked.model)
        prompts = [
            await server.encode(plain_text, prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts
        ]
        jobs = [asked.completion_job(prompt, settings.sampling) for prompt in prompts]
        streams = server.submit([copy for job in jobs for copy in copies(job, asked.n)])
        readers = [Verbatim() for _ in streams]
        made = _Answer(_COMPLETION, settings.model, asked.include_usage, asked.n)
        if asked.stream:
            return Events(made.events(streams, readers), streams)
        return await answer(request, streams, made.whole(streams, readers))

    @routes.get(MODELS)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name) for name in settings.names]}

    @routes.get(MODELS + "/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        settings.check_model(name)
        return _model(name)

    return routes


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": _SINCE, "owned_by": "strata-mlx"}


@dataclass(frozen=True)
class _Kind:
    """path: what was asked. prefix: of the ids of answers. object, whole_object: what a chunk and a whole answer are
    called. choice: makes one, by its index.
    """

    path: str
    prefix: str
    object: str
    whole_object: str
    choice: Callable[[int], _ChatChoice | _CompletionChoice]


class _Answer:
    """An answer to one request, with n choices for each of its prompts."""

    def __init__(self, kind: _Kind, model: str, include_usage: bool, n: int):
        self.kind, self.model, self.include_usage, self.n = kind, model, include_usage, n
        self.id, self.created = f"{kind.prefix}-{uuid.uuid4().hex}", int(time.time())

    async def events(
        self, streams: Sequence[Stream], readers: Sequence[Reader | Verbatim]
    ) -> AsyncIterator[ServerSentEvent]:
        choices = [self.kind.choice(index) for index in range(len(streams))]
        usages = [stream.usage for stream in streams]
        for choice in choices:
            for begun in choice.begin():
                yield self._event([begun])
        try:
            async for step in steps(streams, readers):
                choice = choices[step.index]
                for chunk in choice.add(step.parts, step.tokens):
                    yield self._event([chunk])
                if step.end is not None:
                    usages[step.index] = step.end.usage
                    yield self._event([choice.end(step.end)])
        except Fault as error:
            yield _data(problems.body(self.kind.path, 500, str(error)))
            return
        if self.include_usage:
            yield self._event([], usage(usages, self.n))
        yield ServerSentEvent(data="[DONE]", sep="\n")

    async def whole(self, streams: Sequence[Stream], readers: Sequence[Reader | Verbatim]) -> dict[str, Any]:
        choices = [self.kind.choice(index) for index in range(len(streams))]
        ends: dict[int, End] = {}
        async for step in steps(streams, readers):
            choices[step.index].add(step.parts, step.tokens)
            if step.end is not None:
                ends[step.index] = step.end
        return {
            **self._head(self.kind.whole_object),
            "choices": [choice.whole(ends[index]) for index, choice in enumerate(choices)],
            "usage": usage([ends[index].usage for index in range(len(choices))], self.n),
        }

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _event(self, choices: list[dict[str, Any]], total: dict[str, Any] | None = None) -> ServerSentEvent:
        chunk = {**self._head(self.kind.object), "choices": choices}
        return _data({**chunk, "usage": total} if self.include_usage else chunk)


def _data(value: Mapping[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(data=json.dumps(value, ensure_ascii=False), sep="\n")


class _ChatChoice:
    def __init__(self, index: int):
        self.index = index
        self.text = self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] | None = None

    def begin(self) -> list[dict[str, Any]]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def add(self, parts: Sequence[Part], tokens: Sequence[Token]) -> list[dict[str, Any]]:
        """Take more of the answer, and return it as chunks."""
        deltas: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case Text(text):
                    self.text += text
                    deltas.append({"content": text})
                case Reasoning(text):
                    self.reasoning += text
                    deltas.append({"reasoning_content": text})
                case Call():
                    arguments = json.dumps(part.arguments, ensure_ascii=False)
                    call = function_call(part.id, part.name, arguments)
                    deltas.append({"tool_calls": [{"index": len(self.calls), **call}]})
                    self.calls.append(call)
        chunks = [self._chunk(delta) for delta in deltas]
        if tokens:
            found = [_logprob(token) for token in tokens]
            self.logprobs = [*(self.logprobs or ()), *found]
            chunks = chunks or [self._chunk({})]
            chunks[0]["logprobs"] = {"content": found, "refusal": None}
        return chunks

    def end(self, end: End) -> dict[str, Any]:
        return self._chunk({}, self._reason(end))

    def whole(self, end: End) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        logprobs = None if self.logprobs is None else {"content": self.logprobs, "refusal": None}
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self._reason(end)}

    def _reason(self, end: End) -> str:
        return "tool_calls" if self.calls and end.reason == "stop" else end.reason

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _logprob(token: Token) -> dict[str, Any]:
    top = [_one_logprob(text, logprob) for _, text, logprob in token.top]
    return {**_one_logprob(token.text, token.logprob), "top_logprobs": top}


def _one_logprob(text: str, logprob: float) -> dict[str, Any]:
    # A token may be a part of a character: then its text is a replacement, and says nothing of its bytes.
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class _CompletionChoice:
    def __init__(self, index: int):
        self.index = index
        self.text = ""
        self.tokens: list[Token] = []
        self.offset = 0  # of the next token in the text

    def begin(self) -> list[dict[str, Any]]:
        return []

    def add(self, parts: Sequence[Part], tokens: Sequence[Token]) -> list[dict[str, Any]]:
        text = "".join(part.text for part in parts if isinstance(part, Text))
        self.text += text
        self.tokens += tokens
        logprobs = self._logprobs(tokens, self.offset) if tokens else None
        self.offset += sum(len(token.text) for token in tokens)
        return [self._choice(text, logprobs, None)]

    def end(self, end: End) -> dict[str, Any]:
        return self._choice("", None, end.reason)

    def whole(self, end: End) -> dict[str, Any]:
        return self._choice(self.text, self._logprobs(self.tokens, 0) if self.tokens else None, end.reason)

    def _choice(self, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    @staticmethod
    def _logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{text: logprob for _, text, logprob in token.top} for token in tokens],
            "text_offset": offsets,
        }


_CHAT = _Kind(CHAT, "chatcmpl", "chat.completion.chunk", "chat.completion", _ChatChoice)
_COMPLETION = _Kind(COMPLETIONS, "cmpl", "text_completion", "text_completion", _CompletionChoice)


def usage(usages: Sequence[Usage], n: int) -> dict[str, Any]:
    """What all choices have cost together; a prompt that ``n`` of them share counts once."""
    prompts, cached = sum(one.prompt_tokens for one in usages[::n]), sum(one.cached_tokens for one in usages[::n])
    completion, accepted = sum(one.completion_tokens for one in usages), sum(one.accepted for one in usages)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": completion,
        "total_tokens": prompts + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(one.drafted for one in usages) - accepted,
        },
        "strata": extension(usages),
    }


def extension(usages: Sequence[Usage]) -> dict[str, Any]:
    """What the protocols have no word for. hits, misses and bytes_read are null where all experts are in memory."""

    def total(name: str) -> int | None:
        values = [getattr(one, name) for one in usages]
        return None if None in values else sum(values)

    return {
        "mode": "biased" if any(one.mode == "biased" for one in usages) else "exact",
        **{name: total(name) for name in ("drafted", "accepted", "hits", "misses", "bytes_read")},
        "seconds_prompt": max(one.seconds_prompt for one in usages),
        "seconds_total": max(one.seconds_total for one in usages),
    }
