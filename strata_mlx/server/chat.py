"""Between messages and tokens: conversations become prompts, and what the model writes becomes reasoning, text and
tool calls, by the tokenizer's own template and mlx_lm's parsers.
"""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from transformers import PreTrainedTokenizerBase

from ..errors import InputError
from ..templates import render_chat

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
_NORMAL, _REASONING, _TOOL = "normal", "reasoning", "tool"
# Of the method that renders a template; what a template itself takes has other names.
_OWN = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Call:
    """arguments: a JSON object."""

    id: str
    name: str
    arguments: dict[str, Any]


Part = Text | Reasoning | Call


def function_call(id: str | None, name: str, arguments: Any) -> dict[str, Any]:  # noqa: A002  the protocol's name
    """A call as OpenAI's protocol and chat templates have it; ``arguments`` as JSON text in the one, as an object in
    the others.
    """
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def check_options(options: Mapping[str, Any], what: str) -> None:
    """Raise InputError, beginning with ``what``, for an option that is not the template's but of who renders it."""
    if taken := sorted(_OWN & options.keys()):
        raise InputError(f"{what}: {', '.join(taken)} cannot be given to the chat template")


def chat_text(
    tokenizer: TokenizerWrapper,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    options: Mapping[str, Any],
    unfinished: bool,
) -> tuple[str, bool]:
    """A conversation as the text that an answer follows or, where it is ``unfinished``, goes on with, and whether the
    tokenizer is to add its special tokens.

    A model without a chat template goes on with the texts themselves: what the assistant said follows what it was said
    to, and everything else begins a line.
    Raises InputError for what the template refuses, and for tools that the model cannot call.
    """
    if tools and not (tokenizer.has_chat_template and tokenizer.has_tool_calling):
        raise InputError("tools: this model cannot call tools; leave them out")
    if not tokenizer.has_chat_template:
        if options:
            raise InputError(f"this model has no chat template, which {', '.join(sorted(options))} could be given to")
        return _as_text(messages), True
    return render_chat(tokenizer, messages, unfinished, {**options, "tools": list(tools)} if tools else options), False


def plain_text(tokenizer: TokenizerWrapper, text: str) -> tuple[str, bool]:
    """The same of a text that is no conversation."""
    return text, tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)


def _as_text(messages: Sequence[Message]) -> str:
    text = ""
    for message in messages:
        text += "\n" if text and message["role"] != "assistant" else ""
        text += message["content"]
    return text


class Verbatim:
    """The reader of a text that is no answer in a chat: nothing in it has a meaning of its own."""

    done = False

    def feed(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class Reader:
    """Takes what a model writes apart, as it comes. Control sequences are left out, and the white space around them.

    What cannot be read as a call stays text, so that nothing is lost.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, prompt: Sequence[int], tools: Sequence[Tool], one_call: bool = False
    ):
        """one_call: ``done`` turns true after the first call."""
        self.calls = 0
        self._tokenizer, self._tools, self._one_call = tokenizer, tools, one_call
        self._marked = tokenizer.has_thinking or tokenizer.has_tool_calling
        self._machine = make_text_state_machine(tokenizer).make_state(_begins(tokenizer, prompt))
        self._call = ""  # that has begun
        self._blank = ""  # white space, of which it is not known whether it belongs to a text
        self._in_text = self._follows = False  # a text has begun; something came before it

    @property
    def done(self) -> bool:
        return self._one_call and self.calls > 0

    def feed(self, text: str) -> list[Part]:
        self._machine, segments = TextStateMachine.split(self._machine, text)
        return self._read(segments)

    def finish(self) -> list[Part]:
        """What was held back. Nothing may be fed after it."""
        self._machine, held, state = TextStateMachine.flush(self._machine)
        parts = self._read([(state, held)])
        if self._call:
            parts += self._end_call(whole=False)
        if self._blank and not self._follows:
            parts.append(Text(self._blank))
        return _joined(parts)

    def _read(self, segments: Sequence[tuple[str, str]]) -> list[Part]:
        parts: list[Part] = []
        for state, text in segments:
            if state == _TOOL:
                self._call += text
                continue
            if self._call:
                parts += self._end_call(whole=True)
            if state == _REASONING:
                self._interrupt()
                parts += [Reasoning(text)] if text else []
            else:
                parts += self._text(text)
            if self.done:
                break
        return _joined(parts)

    def _text(self, text: str) -> list[Part]:
        if not self._marked or self._in_text:
            return [Text(text)] if text else []
        text = self._blank + text
        self._in_text = bool(text.strip())
        self._blank = "" if self._in_text else text
        return [Text(text.lstrip() if self._follows else text)] if self._in_text else []

    def _interrupt(self) -> None:
        self._blank, self._in_text, self._follows = "", False, True

    def _end_call(self, whole: bool) -> list[Part]:
        written, self._call = self._call, ""
        calls = _parse(self._tokenizer, written, self._tools) if self._tools else None
        if calls is None:
            end = self._tokenizer.tool_call_end if whole else ""
            return self._text(f"{self._tokenizer.tool_call_start}{written}{end}")
        self._interrupt()
        self.calls += len(calls)
        return list(calls[:1] if self._one_call else calls)


def _begins(tokenizer: TokenizerWrapper, prompt: Sequence[int]) -> str:
    """In which state the answer to ``prompt`` begins: the prompt may have opened the reasoning."""
    state = _NORMAL
    if (
        tokenizer.has_thinking
        and tokenizer.has_chat_template
        and tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt)
    ):
        state = _REASONING
    return str(tokenizer.response_initial_state or state)


def _parse(tokenizer: TokenizerWrapper, written: str, tools: Sequence[Tool]) -> list[Call] | None:
    """The calls in what stands between the marks of one; None where it is none."""
    try:
        found = tokenizer.tool_parser(written, list(tools))
        return [_call(call) for call in (found if isinstance(found, list) else [found])] or None
    except Exception:  # parsers are not written for what a model may write instead, and raise all kinds
        return None


def _call(found: Mapping[str, Any]) -> Call:
    name, arguments = found["name"], found.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("not a call")
    return Call(found.get("id") or f"call_{uuid.uuid4().hex}", name, arguments)


def _joined(parts: Sequence[Part]) -> list[Part]:
    """With texts that follow each other as one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        else:
            joined.append(part)
    return joined
