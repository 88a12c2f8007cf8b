"""What the schemas of both protocols share: no field is ignored that would change an answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

Refused = Mapping[str, tuple[str, tuple[Any, ...]]]


class Closed(BaseModel):
    """A JSON object that has the declared fields and no others; null is as if a field were not there.

    harmless: fields that are accepted and change nothing here. refused: fields of the protocol that cannot be had, with
    what to do instead, and the values that ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    harmless: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Refused] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, (advice, neutral) in cls.refused.items():
            if value.get(name) is not None and value[name] not in neutral:
                raise unsupported(name, advice)
        return {
            name: given
            for name, given in value.items()
            if given is not None and name not in cls.harmless and name not in cls.refused
        }


class TextPart(Closed):
    """A part of a message's content. Those that are no text are refused by name."""

    type: Literal["text"]
    text: str

    harmless: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations", "prompt_cache_breakpoint"})

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, value: Any) -> Any:
        return known_type(value, {"text"}, "this server reads text alone")


def parts(content: Any) -> Any:
    """A text is short for a list of one part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError("expected a text or a list of parts")
    return content


Content = Annotated[list[TextPart], BeforeValidator(parts)]


def text_of(content: Sequence[TextPart] | None) -> str:
    return "".join(part.text for part in content or ())


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_texts)]  # one text, or several


def only(*allowed: str, otherwise: str) -> BeforeValidator:
    """Of a field that has the values ``allowed``; of any other, the client is told ``otherwise``."""

    def check(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(otherwise)
        return value

    return BeforeValidator(check)


FreeChoice = Annotated[
    Literal["auto", "none"], only("auto", "none", otherwise='a call cannot be forced; give "auto" or "none"')
]  # whether the model may call tools


def known_type(value: Any, known: Collection[str], advice: str) -> Any:
    """``value``, for a validator to go on with. Refuses an object of a type that is not ``known`` by that name."""
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind not in known:
        raise unsupported(kind, advice)
    return value


def unsupported(name: str, advice: str) -> PydanticCustomError:
    """To be raised by a validator. The field's name is what the client is told."""
    return PydanticCustomError("unsupported", "{field} is not supported: {advice}", {"field": name, "advice": advice})


def explain(error: Mapping[str, Any]) -> tuple[str, str | None]:
    """A validation error of pydantic as a line, and the field it is about, such as ``messages[0].content``."""
    if error["type"] == "json_invalid":
        return f"the body is not valid JSON: {error.get('ctx', {}).get('error', error['msg'])}", None
    where = _path(part for part in error["loc"] if part != "body")
    message = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    if error["type"] == "unsupported":
        return f"{where}: {message}" if where else message, where or error["ctx"]["field"]
    if error["type"] in ("model_type", "model_attributes_type") and where:
        return f"{where}: expected an object", where
    if error["type"] == "extra_forbidden":
        return f"{where} is not a field that this server knows", where
    if where:
        return f"{where}: {message[0].lower()}{message[1:]}", where
    if error["type"] == "value_error":
        return message, None
    return "the body is not a JSON object; send one with 'Content-Type: application/json'", None


def _path(place: Iterable[int | str]) -> str:
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():  # the others are pydantic's names of the members of a union
            path += f".{part}" if path else part
    return path
