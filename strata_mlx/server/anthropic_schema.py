"""What Anthropic's protocol asks with, as far as it is served, and what that means as messages and as a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from .chat import Message, Tool, function_call
from .jobs import Job, told_as
from .schema import Closed, Content, FreeChoice, Refused, TextPart, known_type, only, parts, text_of
from .serving import Sampling


class ToolUse(Closed):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    harmless: ClassVar[frozenset[str]] = frozenset({"cache_control", "caller"})


class ToolResult(Closed):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content | None = None
    is_error: bool = False

    harmless: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    def rendered(self) -> Message:
        text = text_of(self.content)
        return {
            "role": "tool",
            "tool_call_id": self.tool_use_id,
            "content": f"Error: {text}" if self.is_error else text,
        }


class Thinking(Closed):
    type: Literal["thinking"]
    thinking: str

    harmless: ClassVar[frozenset[str]] = frozenset({"signature"})


Block = Annotated[TextPart | ToolUse | ToolResult | Thinking, Field(discriminator="type")]
_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}


def _known_blocks(content: Any) -> Any:
    known = {kind for kinds in _BLOCKS.values() for kind in kinds}
    return [known_type(block, known, f"content is {', '.join(sorted(known))}") for block in parts(content)]


class InputMessage(Closed):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_known_blocks)]

    @model_validator(mode="after")
    def _in_its_place(self) -> Self:
        for block in self.content:
            if block.type not in _BLOCKS[self.role]:
                raise ValueError(f"a message of the {self.role} has no block of type {block.type}")
        return self

    def rendered(self) -> list[Message]:
        """As chat templates take it: results of tools are messages of their own."""
        results = [block.rendered() for block in self.content if isinstance(block, ToolResult)]
        texts = [block.text for block in self.content if isinstance(block, TextPart)]
        if results and not texts:
            return results
        message: dict[str, Any] = {"role": self.role, "content": "".join(texts)}
        if thoughts := [block.thinking for block in self.content if isinstance(block, Thinking)]:
            message["reasoning_content"] = "".join(thoughts)
        if calls := [block for block in self.content if isinstance(block, ToolUse)]:
            message["tool_calls"] = [function_call(call.id, call.name, call.input) for call in calls]
        return [*results, message]


class ToolDefinition(Closed):
    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any]

    harmless: ClassVar[frozenset[str]] = frozenset({"cache_control", "eager_input_streaming", "input_examples"})
    refused: ClassVar[Refused] = {
        "strict": ("what a model writes as arguments is not held to a schema", (False,)),
        "defer_loading": ("all tools are shown to the model", (False,)),
        "allowed_callers": ("tools are called by the model alone", (["direct"],)),
    }

    @model_validator(mode="before")
    @classmethod
    def _of_the_client(cls, value: Any) -> Any:
        return known_type(value, {"custom"}, "this server runs no tools; define your own")

    def rendered(self) -> Tool:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {name: v for name, v in function.items() if v is not None}}


class ToolChoice(Closed):
    type: FreeChoice
    disable_parallel_tool_use: bool = False


class ThinkingChoice(Closed):
    type: Annotated[
        Literal["adaptive", "disabled"],
        only(
            "adaptive",
            "disabled",
            otherwise='thinking has no budget of its own here; give "adaptive" or "disabled"',
        ),
    ]

    harmless: ClassVar[frozenset[str]] = frozenset({"display"})


class Conversation(Closed):
    """What a prompt is made of."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Content | None = None
    tools: list[ToolDefinition] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None

    harmless: ClassVar[frozenset[str]] = frozenset({"cache_control", "user_profile_id", "workspace_id"})
    refused: ClassVar[Refused] = {
        "context_management": ("send the messages that are to be read", ()),
        "mcp_servers": ("this server runs no tools; define your own", ([],)),
        "output_config": ("answers are not held to a format or an effort", ({},)),
        "output_format": ("answers are not held to a format", ()),
        "prefill": ("end the messages with the beginning of an answer", ()),
        "speed": ("there is one speed", ("standard",)),
    }

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that may be called, as chat templates take them."""
        none = self.tool_choice is not None and self.tool_choice.type == "none"
        return [] if none else [tool.rendered() for tool in self.tools]

    @property
    def one_call(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use

    @property
    def unfinished(self) -> bool:
        """Whether the answer goes on with the last message."""
        last = self.messages[-1]
        return last.role == "assistant" and not any(isinstance(block, ToolUse) for block in last.content)

    def rendered(self) -> list[Message]:
        system: list[Message] = []
        if self.system is not None:
            system = [{"role": "system", "content": text_of(self.system)}]
        return system + [message for given in self.messages for message in given.rendered()]


class CountRequest(Conversation):
    pass


class MessagesRequest(Conversation):
    max_tokens: int
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    harmless: ClassVar[frozenset[str]] = Conversation.harmless | {"inference_geo", "metadata", "service_tier"}
    refused: ClassVar[Refused] = {
        **Conversation.refused,
        "container": ("this server runs no code", ()),
        "diagnostics": ("there are none beside usage.strata", ()),
    }

    def job(self, prompt: Sequence[int], defaults: Sampling) -> Job:
        """Raises JobError for a value that is out of its range."""
        with told_as("stop", "stop_sequences"):
            return Job(prompt=tuple(prompt), stop=tuple(self.stop_sequences), **defaults.of(self))
