"""Anthropic's protocol, with the official client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from strata_mlx.errors import Fault
from strata_mlx.server.jobs import End, Job, Piece
from strata_mlx.server.serving import Sampling

from .conftest import Serve
from .scripted import WAIT, ScriptedEngine, text, usage

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=WAIT)


@pytest.fixture
def ask(url: str) -> anthropic.Anthropic:
    return client(url)


def prompt(engine: ScriptedEngine, tokenizer: TokenizerWrapper) -> str:
    return str(tokenizer.decode(list(engine.job.prompt)))


def says(engine: ScriptedEngine, said: str, reason: str = "stop", stop: str | None = None, size: int = 3) -> None:
    engine.answer = lambda job: text(said, job, reason, stop, size)


def test_an_answer(ask: anthropic.Anthropic, engine: ScriptedEngine, tokenizer: TokenizerWrapper) -> None:
    says(engine, "</think>Hello, you.")
    message = ask.messages.create(model="tiny", max_tokens=9, messages=ASK, system="Be brief.")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello, you."}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert prompt(engine, tokenizer) == "<system>Be brief.\n<user>Hi\n<assistant><think>"
    read = message.usage
    assert (read.input_tokens, read.cache_read_input_tokens) == (len(engine.job.prompt) - 2, 2)
    assert read.output_tokens == 3
    assert (read.model_extra or {})["strata"]["accepted"] == 3


def test_a_request_becomes_a_job(ask: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    ask.messages.create(
        model="tiny",
        max_tokens=7,
        messages=ASK,
        stop_sequences=["a", "b"],
        metadata={"user_id": "me"},
        extra_body={"temperature": 0.5, "top_k": 4, "top_p": 0.25},
    )
    assert engine.job == Job(engine.job.prompt, 7, 0.5, 0.25, 4, stop=("a", "b"))


def test_what_a_request_does_not_say_is_as_the_server_was_started(engine: ScriptedEngine, serve: Serve) -> None:
    ask = client(serve(engine, sampling=Sampling(9, 0.25, 0.75, 8, 0.125)))
    ask.messages.create(model="tiny", max_tokens=3, messages=ASK)
    assert engine.job == Job(engine.job.prompt, 3, 0.25, 0.75, 8, 0.125)


@pytest.mark.parametrize(
    ("reason", "stop", "told"),
    [("stop", None, "end_turn"), ("length", None, "max_tokens"), ("stop", "END", "stop_sequence")],
)
def test_why_an_answer_ended(
    ask: anthropic.Anthropic, engine: ScriptedEngine, reason: str, stop: str | None, told: str
) -> None:
    says(engine, "</think>Hello", reason, stop)
    message = ask.messages.create(model="tiny", max_tokens=9, messages=ASK, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == (told, stop)
    with ask.messages.stream(model="tiny", max_tokens=9, messages=ASK, stop_sequences=["END"]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == (told, stop)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_is_the_same_answer(ask: anthropic.Anthropic, engine: ScriptedEngine, size: int) -> None:
    says(engine, f"Let me see.</think>\n\nI add.\n{CALL}\n{CALL}", size=size)
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": ASK, "tools": TOOLS}
    message = ask.messages.create(**options)
    blocks: list[Any] = message.content
    assert [block.type for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0].thinking, blocks[1].text) == ("Let me see.", "I add.\n")
    assert (blocks[2].name, blocks[2].input) == ("add", {"a": 1})
    assert blocks[2].id != blocks[3].id
    assert message.stop_reason == "tool_use"
    with ask.messages.stream(**options) as stream:
        final = stream.get_final_message()
    streamed: list[Any] = final.content
    assert [block.type for block in streamed] == [block.type for block in blocks]
    assert (streamed[0].thinking, streamed[1].text) == ("Let me see.", "I add.\n")
    assert streamed[3].input == {"a": 1}
    assert final.stop_reason == "tool_use"
    counted = ("input_tokens", "output_tokens", "cache_read_input_tokens")
    assert [getattr(final.usage, name) for name in counted] == [getattr(message.usage, name) for name in counted]


def test_events_are_what_the_protocol_says(engine: ScriptedEngine, url: str) -> None:
    says(engine, f"so</think>Hi{CALL}", size=1000)
    body = {"model": "tiny", "max_tokens": 9, "messages": ASK, "tools": TOOLS, "stream": True}
    response = httpx.post(f"{url}/v1/messages", json=body, timeout=WAIT)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [event.split("\n") for event in response.text.strip().split("\n\n")]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]
    assert all(name == event["type"] for name, event in events)
    assert [(name, event.get("index")) for name, event in events] == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert events[0][1]["message"]["content"] == []
    assert json.loads(events[9][1]["delta"]["partial_json"]) == {"a": 1}
    assert events[11][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[11][1]["usage"]["strata"]["drafted"] == 4


def test_a_stream_gives_text_while_it_is_written(ask: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.answer = lambda _: []
    with ask.messages.stream(model="tiny", max_tokens=9, messages=ASK) as stream:
        job = engine.stream()
        texts = stream.text_stream
        job.put(Piece("</think>One "))
        assert next(texts) == "One "
        job.put(Piece("two."))
        job.put(End("stop", None, usage(job.job)))
        assert list(texts) == ["two."]


def test_a_conversation_with_tools_goes_on(
    ask: anthropic.Anthropic, engine: ScriptedEngine, tokenizer: TokenizerWrapper
) -> None:
    says(engine, f"hm</think>I add.{CALL}")
    message = ask.messages.create(model="tiny", max_tokens=9, messages=ASK, tools=TOOLS)
    result: list[Any] = [
        {"type": "tool_result", "tool_use_id": message.content[-1].to_dict()["id"], "content": "no", "is_error": True},
        {"type": "text", "text": "Again.", "cache_control": {"type": "ephemeral"}},
    ]
    said: list[Any] = [
        {"role": "system", "content": "Add."},
        *ASK,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": result},
    ]
    ask.messages.create(model="tiny", max_tokens=9, messages=said, tools=TOOLS)
    assert prompt(engine, tokenizer) == (
        '[add;]<system>Add.\n<user>Hi\n<assistant>(hm)I add.<tool_call>add{"a": 1}</tool_call>\n'
        "<tool>Error: no\n<user>Again.\n<assistant><think>"
    )


def test_an_answer_that_was_begun_is_gone_on_with(
    ask: anthropic.Anthropic, engine: ScriptedEngine, tokenizer: TokenizerWrapper
) -> None:
    says(engine, " 4.")
    begun: list[Any] = [*ASK, {"role": "assistant", "content": "It is"}]
    message = ask.messages.create(model="tiny", max_tokens=9, messages=begun)
    assert message.content[0].to_dict()["text"] == " 4."
    assert prompt(engine, tokenizer) == "<user>Hi\n<assistant>It is"


def test_thinking_can_be_turned_off(
    ask: anthropic.Anthropic, engine: ScriptedEngine, tokenizer: TokenizerWrapper
) -> None:
    ask.messages.create(model="tiny", max_tokens=9, messages=ASK, thinking={"type": "disabled"})
    assert prompt(engine, tokenizer).endswith("<think></think>")
    ask.messages.create(model="tiny", max_tokens=9, messages=ASK, thinking={"type": "adaptive"})
    assert prompt(engine, tokenizer).endswith("<think>")
    with pytest.raises(anthropic.BadRequestError, match="no budget"):
        ask.messages.create(
            model="tiny", max_tokens=9999, messages=ASK, thinking={"type": "enabled", "budget_tokens": 1024}
        )


def test_a_model_that_does_not_think(engine: ScriptedEngine, serve: Serve, plain_tokenizer: TokenizerWrapper) -> None:
    ask = client(serve(engine, tokenizer=plain_tokenizer))
    with pytest.raises(anthropic.BadRequestError, match="does not think"):
        ask.messages.create(model="tiny", max_tokens=9, messages=ASK, thinking={"type": "adaptive"})
    ask.messages.create(model="tiny", max_tokens=9, messages=ASK, thinking={"type": "disabled"}, system="Be brief.")
    assert prompt(engine, plain_tokenizer) == "Be brief.\nHi"


def test_one_call_at_a_time(ask: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    says(engine, f"</think>{CALL}{CALL}")
    message = ask.messages.create(
        model="tiny",
        max_tokens=9,
        messages=ASK,
        tools=TOOLS,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.stop_reason == "tool_use"


def test_tokens_are_counted(ask: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "system": "Be brief.", "tools": TOOLS}
    counted = ask.messages.count_tokens(**options).input_tokens
    assert not engine.streams
    ask.messages.create(**options, max_tokens=1)
    assert counted == len(engine.job.prompt)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages: list should have at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "field required"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "no block of type"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": None}, "max_tokens: field required"),
        ({"stop_sequences": [""]}, "stop_sequences is"),
        ({"temperature": -1}, "temperature is -1"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type: a call cannot be forced"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search_20250305 is not supported"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"surprise": 1}, "surprise is not a field"),
    ],
)
def test_what_cannot_be_done_is_refused(engine: ScriptedEngine, url: str, body: dict[str, Any], message: str) -> None:
    asked = {"model": "tiny", "max_tokens": 9, "messages": ASK, **body}
    response = httpx.post(f"{url}/v1/messages", json=asked, timeout=WAIT)
    assert response.status_code == 400
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert message in error["error"]["message"]
    assert not engine.streams


def test_another_model_is_not_found(ask: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        ask.messages.create(model="claude", max_tokens=9, messages=ASK)
    with pytest.raises(anthropic.NotFoundError):
        ask.messages.count_tokens(model="claude", messages=ASK)


def test_a_full_queue_says_when_to_come_again(ask: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.room = 0
    with pytest.raises(anthropic.RateLimitError, match="rate_limit_error") as refused:
        ask.messages.create(model="tiny", max_tokens=9, messages=ASK)
    assert refused.value.response.headers["retry-after"] == "7"


def test_a_failure_is_told(ask: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.answer = lambda _: [Piece("</think>He"), Fault("the disk is gone")]
    with pytest.raises(anthropic.InternalServerError, match="the disk is gone"):
        ask.messages.create(model="tiny", max_tokens=9, messages=ASK)
    with ask.messages.stream(model="tiny", max_tokens=9, messages=ASK) as stream:
        assert next(stream.text_stream) == "He"
        with pytest.raises(anthropic.APIStatusError, match="the disk is gone"):
            next(stream.text_stream)


def test_a_client_that_stops_reading_ends_the_work(ask: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.answer = lambda _: [Piece("</think>Hello")]
    with ask.messages.stream(model="tiny", max_tokens=9, messages=ASK) as stream:
        next(stream.text_stream)
        job = engine.stream()
    assert job.left.wait(WAIT)
