"""A conversation as the text that a model reads, by the template that comes with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def render_chat(
    tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, Any]], unfinished: bool, options: Mapping[str, Any]
) -> str:
    """The conversation as text: ``unfinished`` leaves the last message open, else an answer begins after it.

    Raises InputError where the model's chat template refuses the messages or the options.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            continue_final_message=unfinished,
            add_generation_prompt=not unfinished,
            **options,
        )
    except Exception as error:  # a template is a program, which raises all kinds
        raise InputError(f"the model's chat template cannot render this: {error}") from error
    return str(rendered)
