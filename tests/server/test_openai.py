"""OpenAI's protocol, with the official client."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from openai.types.chat import ChatCompletionChunk

from strata_mlx.errors import Fault
from strata_mlx.server.jobs import End, Job, Piece, Token
from strata_mlx.server.serving import Sampling

from .conftest import Serve
from .scripted import WAIT, ScriptedEngine, WatchedStream, text, usage

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "\u00e9"}}</tool_call>'


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT)


@pytest.fixture
def ask(url: str) -> openai.OpenAI:
    return client(url)


def says(engine: ScriptedEngine, said: str, reason: str = "stop", stop: str | None = None, size: int = 3) -> None:
    """Without reasoning before it, which the template has begun."""
    engine.answer = lambda job: text(f"</think>{said}", job, reason, stop, size)


def prompt(engine: ScriptedEngine, tokenizer: TokenizerWrapper) -> str:
    return str(tokenizer.decode(list(engine.job.prompt)))


def put(stream: WatchedStream, *items: Any) -> None:
    for item in items:
        stream.put(item)


def joined(chunks: Iterable[ChatCompletionChunk], field: str = "content", index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(getattr(choice.delta, field, None) or "" for choice in choices)


# Chat


def test_an_answer(ask: openai.OpenAI, engine: ScriptedEngine, tokenizer: TokenizerWrapper) -> None:
    says(engine, "Hello, you.")
    answer = ask.chat.completions.create(model="tiny", messages=ASK)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.choices[0].message.content == "Hello, you."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert prompt(engine, tokenizer) == "<user>Hi\n<assistant><think>"


def test_the_usage_says_what_was_reused_and_drafted(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = ask.chat.completions.create(model="tiny", messages=ASK)
    assert answer.usage is not None
    length = len(engine.job.prompt)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (length, 3)
    assert answer.usage.total_tokens == length + 3
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 1)
    assert answer.usage.model_extra == {
        "strata": {
            "mode": "exact", "drafted": 4, "accepted": 3, "hits": None, "misses": None, "bytes_read": None,
            "seconds_prompt": 0.25, "seconds_total": 0.5,
        }
    }  # fmt: skip


def test_a_stream_gives_text_while_it_is_written(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = lambda _: []
    chunks = ask.chat.completions.create(model="tiny", messages=ASK, stream=True)
    stream = engine.stream()
    first = next(chunks)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    put(stream, Piece("</think>One "))
    assert next(chunks).choices[0].delta.content == "One "
    put(stream, Piece("two."), End("length", None, usage(stream.job)))
    rest = list(chunks)
    assert joined(rest) == "two."
    assert [choice.finish_reason for chunk in rest for choice in chunk.choices] == [None, "length"]
    assert all(chunk.usage is None for chunk in rest)


def test_a_stream_ends_with_the_usage_where_that_is_asked_for(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    says(engine, "Hello.")
    whole = ask.chat.completions.create(model="tiny", messages=ASK)
    chunks = list(
        ask.chat.completions.create(model="tiny", messages=ASK, stream=True, stream_options={"include_usage": True})
    )
    assert joined(chunks) == "Hello."
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_events_are_what_the_protocol_says(engine: ScriptedEngine, url: str) -> None:
    says(engine, "Hi")
    body = {"messages": ASK, "stream": True}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line for line in response.text.split("\n") if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events[:-1])


def test_a_request_becomes_a_job(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    ask.chat.completions.create(
        model="tiny",
        messages=ASK,
        max_completion_tokens=7,
        temperature=1,
        top_p=0.5,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"5": -100},
        stop=["a", "b"],
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.5},
    )
    assert engine.job == Job(engine.job.prompt, 7, 1.0, 0.5, 4, 0.1, 3, 1.5, 0.5, -1.0, {5: -100.0}, ("a", "b"))


def test_what_a_request_does_not_say_is_as_the_server_was_started(engine: ScriptedEngine, serve: Serve) -> None:
    ask = client(serve(engine, sampling=Sampling(9, 0.25, 0.75, 8, 0.125)))
    ask.chat.completions.create(model="tiny", messages=ASK, stop="x")
    assert engine.job == Job(engine.job.prompt, 9, 0.25, 0.75, 8, 0.125, stop=("x",))
    ask.chat.completions.create(model="tiny", messages=ASK, temperature=0, max_tokens=2)
    assert (engine.job.temperature, engine.job.max_tokens) == (0.0, 2)


def test_null_is_as_if_a_field_were_not_there(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("temperature", "top_p", "max_tokens", "stop", "seed", "n", "tools"))
    ask.chat.completions.create(model="tiny", messages=ASK, **nothing)
    assert engine.job == Job(engine.job.prompt, 512)


def test_several_answers_differ_by_their_seeds(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = lambda job: text(f"</think>seed {job.seed}", job)
    answer = ask.chat.completions.create(model="tiny", messages=ASK, n=3, seed=5, temperature=1.0)
    assert [choice.message.content for choice in answer.choices] == ["seed 5", "seed 6", "seed 7"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(engine.job.prompt)  # it is read for all of them
    assert answer.usage.completion_tokens == 9


def test_several_answers_are_streamed_as_they_come(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = lambda _: []
    chunks = ask.chat.completions.create(model="tiny", messages=ASK, n=2, stream=True)
    engine.stream()
    engine.stream()
    assert [next(chunks).choices[0].index for _ in range(2)] == [0, 1]
    first, second = engine.streams
    put(second, Piece("</think>two"))
    assert (got := next(chunks)).choices[0].index == 1
    assert got.choices[0].delta.content == "two"
    put(first, Piece("</think>one"), End("stop", None, usage(first.job)))
    put(second, End("length", None, usage(second.job)))
    rest = list(chunks)
    assert joined(rest, index=0) == "one"
    reasons = {c.index: c.finish_reason for chunk in rest for c in chunk.choices if c.finish_reason}
    assert reasons == {0: "stop", 1: "length"}


def test_log_probabilities(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    tokens = (Token(1, "H", -0.5, ((1, "H", -0.5), (2, "\ufffd", -1.5))), Token(3, "i", -0.25, ()))
    engine.answer = lambda job: [
        Piece("</think>H", tokens[:1]),
        Piece("i", tokens[1:]),
        End("stop", None, usage(job)),
    ]
    options: dict[str, Any] = {"model": "tiny", "messages": ASK, "logprobs": True, "top_logprobs": 2}
    answer = ask.chat.completions.create(**options)
    assert engine.job.top_logprobs == 2
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [(one.token, one.logprob, one.bytes) for one in content] == [("H", -0.5, [72]), ("i", -0.25, [105])]
    assert [(top.token, top.bytes) for top in content[0].top_logprobs] == [("H", [72]), ("\ufffd", None)]
    streamed = [
        one
        for chunk in ask.chat.completions.create(**options, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for one in choice.logprobs.content or []
    ]
    assert streamed == content
    assert ask.chat.completions.create(model="tiny", messages=ASK).choices[0].message is not None
    assert engine.job.top_logprobs is None


def test_an_answer_that_a_stop_string_ends(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    says(engine, "Hello", stop=".")
    assert ask.chat.completions.create(model="tiny", messages=ASK, stop=".").choices[0].finish_reason == "stop"


# Reasoning and tools


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_is_told_apart(ask: openai.OpenAI, engine: ScriptedEngine, size: int) -> None:
    engine.answer = lambda job: text("Let me see.</think>\n\nIt is 3 < 4.", job, size=size)
    message = ask.chat.completions.create(model="tiny", messages=ASK).choices[0].message
    assert (message.content, message.model_extra) == ("It is 3 < 4.", {"reasoning_content": "Let me see."})
    chunks = list(ask.chat.completions.create(model="tiny", messages=ASK, stream=True))
    assert (joined(chunks), joined(chunks, "reasoning_content")) == ("It is 3 < 4.", "Let me see.")


def test_templates_take_options(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = lambda job: text("Hello.", job)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    message = ask.chat.completions.create(model="tiny", messages=ASK, extra_body=off).choices[0].message
    assert (message.content, message.model_extra) == ("Hello.", {})


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_parsed(ask: openai.OpenAI, engine: ScriptedEngine, size: int) -> None:
    says(engine, f"Let me add.\n{CALL}\n{CALL}\n", size=size)
    answer = ask.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == "Let me add.\n"
    calls: list[Any] = answer.message.tool_calls or []
    assert [call.function.name for call in calls] == ["add", "add"]
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": "\u00e9"}] * 2
    assert len({call.id for call in calls}) == 2
    chunks = list(ask.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, stream=True))
    deltas: list[Any] = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in deltas] == [(0, "add"), (1, "add")]
    assert joined(chunks) == "Let me add.\n"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_an_answer_of_calls_alone_has_no_content(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    says(engine, f"\n\n{CALL}")
    answer = ask.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS).choices[0]
    assert answer.message.content is None
    assert len(answer.message.tool_calls or ()) == 1


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>{]</tool_call> and more",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        "a <tool",
    ],
)
def test_what_is_no_call_stays_text(ask: openai.OpenAI, engine: ScriptedEngine, said: str) -> None:
    says(engine, said)
    answer = ask.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS).choices[0]
    assert (answer.message.content, answer.message.tool_calls) == (said, None)
    assert answer.finish_reason == "stop"


def test_a_call_that_was_cut_off_stays_text(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    cut = '<tool_call>{"name": "add", "argu'
    says(engine, cut, reason="length")
    answer = ask.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS).choices[0]
    assert (answer.message.content, answer.finish_reason) == (cut, "length")


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_nothing_is_called_where_there_is_nothing_to_call(
    ask: openai.OpenAI, engine: ScriptedEngine, tokenizer: TokenizerWrapper, options: dict[str, Any]
) -> None:
    says(engine, CALL)
    answer = ask.chat.completions.create(model="tiny", messages=ASK, **options).choices[0]
    assert (answer.message.content, answer.finish_reason) == (CALL, "stop")
    assert prompt(engine, tokenizer).startswith("<user>")


def test_an_answer_that_is_cut_off_after_a_call(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    says(engine, f"{CALL} and", reason="length")
    answer = ask.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS).choices[0]
    assert (len(answer.message.tool_calls or ()), answer.message.content) == (1, "and")
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    "said", [CALL * 3, '<tool_call>[{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}]</tool_call>']
)
def test_one_call_at_a_time(ask: openai.OpenAI, engine: ScriptedEngine, said: str) -> None:
    says(engine, said)
    both = ask.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS).choices[0]
    assert len(both.message.tool_calls or ()) > 1
    answer = ask.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert len(answer.message.tool_calls or ()) == 1
    assert answer.finish_reason == "tool_calls"
    assert engine.streams[-1].left.is_set()


def test_a_conversation_with_tools_goes_on(
    ask: openai.OpenAI, engine: ScriptedEngine, tokenizer: TokenizerWrapper
) -> None:
    says(engine, CALL)
    message = ask.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS).choices[0].message
    assert message.tool_calls
    said: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        *ASK,
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"},
    ]
    says(engine, "It is 3.")
    answer = ask.chat.completions.create(model="tiny", messages=said, tools=TOOLS)
    assert answer.choices[0].message.content == "It is 3."
    assert prompt(engine, tokenizer) == (
        '[add;]<system>Be brief.\n<user>Hi\n<assistant><tool_call>add{"a": 1, "b": "\u00e9"}</tool_call>\n'
        "<tool>3\n<assistant><think>"
    )


def test_without_a_template_the_texts_are_gone_on_with(
    engine: ScriptedEngine, serve: Serve, plain_tokenizer: TokenizerWrapper
) -> None:
    engine.answer = lambda job: text("  return", job)
    ask = client(serve(engine, tokenizer=plain_tokenizer))
    said: list[Any] = [*ASK, {"role": "assistant", "content": " there"}, {"role": "user", "content": "def f():"}]
    assert ask.chat.completions.create(model="tiny", messages=said).choices[0].message.content == "  return"
    assert prompt(engine, plain_tokenizer) == "Hi there\ndef f():"
    with pytest.raises(openai.BadRequestError, match="cannot call tools"):
        ask.chat.completions.create(model="tiny", messages=said, tools=TOOLS)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        ask.chat.completions.create(model="tiny", messages=said, extra_body={"chat_template_kwargs": {"a": 1}})


# Completions and models


@pytest.mark.parametrize("asked", ["Hi", [72, 105], ["Hi"], [[72, 105]]])
def test_a_completion(ask: openai.OpenAI, engine: ScriptedEngine, tokenizer: TokenizerWrapper, asked: Any) -> None:
    ids = asked if asked in ("Hi", ["Hi"]) else json.loads(json.dumps(asked).replace("72, 105", "39, 72"))
    says(engine, CALL)  # nothing in a text has a meaning of its own
    answer = ask.completions.create(model="tiny", prompt=ids, max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == f"</think>{CALL}"
    assert answer.choices[0].finish_reason == "stop"
    assert list(engine.job.prompt) == tokenizer.encode("Hi")
    assert engine.job.max_tokens == 5


def test_several_prompts_and_answers(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = lambda job: text(f"{len(job.prompt)} {job.seed}", job)
    answer = ask.completions.create(model="tiny", prompt=["a", "bbbb"], n=2, seed=1, temperature=1.0)
    assert [choice.text for choice in answer.choices] == ["1 1", "1 2", "4 1", "4 2"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)


def test_a_streamed_completion_with_log_probabilities(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    tokens = (Token(1, "ab", -0.5, ((1, "ab", -0.5),)), Token(3, "c", -0.25, ((3, "c", -0.25),)))
    engine.answer = lambda job: [Piece("ab", tokens[:1]), Piece("c", tokens[1:]), End("length", None, usage(job))]
    whole = ask.completions.create(model="tiny", prompt="x", logprobs=1)
    assert engine.job.top_logprobs == 1
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.to_dict() == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"ab": -0.5}, {"c": -0.25}],
        "text_offset": [0, 2],
    }
    options: Any = {"stream_options": {"include_usage": True}}
    chunks = list(ask.completions.create(model="tiny", prompt="x", logprobs=1, stream=True, **options))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "abc"
    offsets = [o for chunk in chunks for c in chunk.choices if c.logprobs for o in c.logprobs.text_offset or []]
    assert offsets == [0, 2]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage


def test_models(engine: ScriptedEngine, serve: Serve) -> None:
    ask = client(serve(engine, names=("org/name", "gpt")))
    assert [model.id for model in ask.models.list()] == ["org/name", "gpt"]
    assert ask.models.retrieve("gpt").id == "gpt"
    assert ask.models.retrieve("org/name").object == "model"
    with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
        ask.models.retrieve("other")


def test_a_request_may_name_the_model_or_not(engine: ScriptedEngine, serve: Serve) -> None:
    url = serve(engine, names=("one", "two"))
    for name in ("one", "two", "default_model", None):
        answer = httpx.post(f"{url}/v1/chat/completions", json={"model": name, "messages": ASK}, timeout=WAIT)
        assert answer.json()["model"] == "one"
    with pytest.raises(openai.NotFoundError) as refused:
        client(url).chat.completions.create(model="three", messages=ASK)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


# Errors


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "'system', 'developer'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a text or a list of parts"),
        ({"messages": ["Hi"]}, "messages[0]", "expected an object"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": -1}, "temperature", "expected 0 to 100"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, None, "max_tokens and max_completion_tokens differ"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": True}, "n", "valid integer"),
        ({"stop": [""]}, "stop", "not empty"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"top_logprobs": 3}, None, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "expected 0 to 20"),
        ({"stream_options": {"include_usage": True}}, None, "stream_options is for streams"),
        ({"surprise": 1}, "surprise", "not a field that this server knows"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "chat_template_kwargs"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"functions": [{}]}, "functions", "use tools"),
        ({"adapters": "x"}, "adapters", "--adapter-path"),
        ({"tool_choice": "required"}, "tool_choice", "cannot be forced"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "'function'"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, None, "chat_template cannot be given"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "image_url is not supported: this server reads text alone",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "must be JSON",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    engine: ScriptedEngine, url: str, body: dict[str, Any], field: str | None, message: str
) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", json={"messages": ASK, **body}, timeout=WAIT)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert not engine.streams


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["a", [True]]}, "prompt"),
    ],
)
def test_a_completion_that_cannot_be_made_is_refused_by_name(url: str, body: dict[str, Any], field: str) -> None:
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "a", **body}, timeout=WAIT)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert field in response.json()["error"]["message"]


def test_fields_that_change_nothing_here_are_taken(ask: openai.OpenAI) -> None:
    harmless: dict[str, Any] = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k",
        "response_format": {"type": "text"}, "modalities": ["text"], "parallel_tool_calls": True, "tool_choice": "auto",
    }  # fmt: skip
    assert ask.chat.completions.create(model="tiny", messages=ASK, **harmless).choices


def test_a_full_queue_says_when_to_come_again(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.room = 0
    with pytest.raises(openai.RateLimitError, match="waiting") as refused:
        ask.chat.completions.create(model="tiny", messages=ASK)
    assert refused.value.response.headers["retry-after"] == "7"


def test_answers_are_asked_for_all_or_none(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer, engine.room = lambda _: [], 2
    with pytest.raises(openai.RateLimitError):
        ask.chat.completions.create(model="tiny", messages=ASK, n=3)
    assert all(stream.left.wait(WAIT) for stream in engine.streams)


def test_a_failure_is_told(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = lambda _: [Piece("</think>He"), Fault("the disk is gone")]
    with pytest.raises(openai.InternalServerError, match="the disk is gone"):
        ask.chat.completions.create(model="tiny", messages=ASK)
    chunks = ask.chat.completions.create(model="tiny", messages=ASK, stream=True)
    assert joined([next(chunks), next(chunks)]) == "He"
    with pytest.raises(openai.APIError, match="the disk is gone"):
        next(chunks)


def test_a_failure_of_one_answer_ends_the_others(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = lambda job: [] if job.seed == 0 else [Fault("no")]
    with pytest.raises(openai.InternalServerError, match="no"):
        ask.chat.completions.create(model="tiny", messages=ASK, n=2, seed=0)
    assert all(stream.left.wait(WAIT) for stream in engine.streams)


def test_an_engine_that_has_failed_is_told(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.refusal = Fault("the generation thread has ended")
    with pytest.raises(openai.InternalServerError, match="has ended"):
        ask.chat.completions.create(model="tiny", messages=ASK)


# Clients that leave


@pytest.mark.parametrize("streamed", [True, False])
def test_the_work_for_a_client_that_leaves_ends(engine: ScriptedEngine, url: str, streamed: bool) -> None:
    engine.answer = lambda _: [Piece("</think>Hello")]
    address = urlsplit(url)
    body = json.dumps({"messages": ASK, "stream": streamed, "n": 2}).encode()
    with socket.create_connection((address.hostname, address.port), timeout=WAIT) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        streams = [engine.stream(), engine.stream()]
        if streamed:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert not any(stream.cancelled for stream in streams)
    assert all(stream.left.wait(WAIT) for stream in engine.streams)


def test_a_client_that_stops_reading_ends_the_work(ask: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answer = lambda _: [Piece("</think>Hello")]
    with ask.chat.completions.create(model="tiny", messages=ASK, stream=True) as chunks:
        next(chunks)
        stream = engine.stream()
    assert stream.left.wait(WAIT)
