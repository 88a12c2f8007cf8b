"""What OpenAI's protocol asks with, as far as it is served, and what that means as a job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from .chat import Message, Tool, function_call
from .jobs import Job, JobError, told_as
from .schema import Closed, Content, FreeChoice, Refused, Texts, text_of
from .serving import Sampling

_NO_CONTEXT = ("penalties are about the latest tokens, the same number for all requests", ())
_EXTENSIONS: Refused = {  # of mlx_lm.server
    "adapters": ("start the server with --adapter-path", ()),
    "draft_model": ("speculation uses the model's own MTP head", ("default_model",)),
    "num_draft_tokens": ("speculation uses the model's own MTP head; see --mtp-max-steps", ()),
    "repetition_context_size": _NO_CONTEXT,
    "presence_context_size": _NO_CONTEXT,
    "frequency_context_size": _NO_CONTEXT,
    "xtc_probability": ("sample with top_p, top_k and min_p", (0,)),
    "xtc_threshold": ("sample with top_p, top_k and min_p", ()),
    "role_mapping": ("start the server with --chat-template", ()),
}


class StreamOptions(Closed):
    include_usage: bool = False

    refused: ClassVar[Refused] = {"include_obfuscation": ("streams are not padded", (False,))}


class Sampled(Closed):
    """What both kinds of request say about how to go on."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Texts = Field(default_factory=list)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _streamed(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: give stream as well, or leave it out")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def job(self, prompt: Sequence[int], defaults: Sampling, top_logprobs: int | None) -> Job:
        """Raises JobError for a value that is out of its range."""
        return Job(
            prompt=tuple(prompt),
            seed=self.seed,
            repetition_penalty=self.repetition_penalty or 1.0,  # as in mlx_lm, 0 is off
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias),
            stop=tuple(self.stop),
            top_logprobs=top_logprobs,
            **defaults.of(self),
        )


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise JobError("logit_bias", 'logit_bias: its keys must be token ids, such as "50256"') from None


class Function(Closed):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _object(cls, text: str) -> str:
        try:
            arguments = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"arguments must be JSON ({error})") from None
        if not isinstance(arguments, dict):
            raise ValueError("arguments must be a JSON object, as a string")
        return text


class ToolCall(Closed):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function

    harmless: ClassVar[frozenset[str]] = frozenset({"index"})


class ChatMessage(Closed):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None

    harmless: ClassVar[frozenset[str]] = frozenset({"annotations", "refusal"})
    refused: ClassVar[Refused] = {
        "audio": ("this server writes text alone", ()),
        "function_call": ("use tool_calls", ()),
    }

    def rendered(self) -> Message:
        """As chat templates take it."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text_of(self.content),
        }
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                function_call(call.id, call.function.name, json.loads(call.function.arguments or "{}"))
                for call in self.tool_calls
            ]
        return message


class FunctionDefinition(Closed):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})

    refused: ClassVar[Refused] = {"strict": ("what a model writes as arguments is not held to a schema", (False,))}


class ToolDefinition(Closed):
    type: Literal["function"]
    function: FunctionDefinition


class ChatRequest(Sampled):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[ToolDefinition] = Field(default_factory=list)
    tool_choice: FreeChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        }
    )
    refused: ClassVar[Refused] = {
        **_EXTENSIONS,
        "audio": ("this server writes text alone", ()),
        "function_call": ("use tool_choice", ("auto", "none")),
        "functions": ("use tools", ([],)),
        "modalities": ("this server writes text alone", (["text"],)),
        "moderation": ("answers are not judged", ()),
        "prediction": ("drafts come from the model's own MTP head", ()),
        "reasoning_effort": ("say what the model's chat template takes in chat_template_kwargs", ()),
        "response_format": ("answers are not held to a format; ask for it in a message", ({"type": "text"},)),
        "verbosity": ("ask for it in a message", ("medium",)),
        "web_search_options": ("this server does not search", ()),
    }

    @model_validator(mode="after")
    def _asked(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that may be called, as chat templates take them."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools]

    def chat_job(self, prompt: Sequence[int], defaults: Sampling) -> Job:
        top = (self.top_logprobs or 0) if self.logprobs else None
        if self.max_completion_tokens is not None:
            defaults = replace(defaults, max_tokens=self.max_completion_tokens)
        return self.job(prompt, defaults, top)


def _prompts(value: Any) -> Any:
    """One or more prompts, as a list of them."""
    several = value if isinstance(value, list) else [value]
    if several and all(type(token) is int for token in several):
        return [several]
    for prompt in several:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and all(type(token) is int for token in prompt)
        ):
            raise ValueError("expected a text, a list of token ids, or a list of these")
    return several


class CompletionRequest(Sampled):
    """prompts: each a text or token ids."""

    prompts: Annotated[
        list[str | list[int]], Field(alias="prompt", min_length=1, max_length=128), BeforeValidator(_prompts)
    ]
    logprobs: int | None = None

    harmless: ClassVar[frozenset[str]] = frozenset({"user"})
    refused: ClassVar[Refused] = {
        **_EXTENSIONS,
        "best_of": ("ask for more answers with n", (1,)),
        "echo": ("put the prompt before the text yourself", (False,)),
        "suffix": ("this server writes on from the end of a prompt", ("",)),
    }

    def completion_job(self, prompt: Sequence[int], defaults: Sampling) -> Job:
        with told_as("top_logprobs", "logprobs"):
            return self.job(prompt, defaults, self.logprobs)
