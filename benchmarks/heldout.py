"""Text that the embedded model was not trained on: the sources of installed packages, read at run time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from strata_mlx.replay.recording import STEPS, Recording, record
from strata_mlx.texts import PACKAGES, installed

_CHARACTERS = 64  # of a text, for each token wanted: more than any has, and less than what tokenizers warn of


def documents(packages: Sequence[str] = PACKAGES) -> Iterator[str]:
    """The Python files of ``packages``, in a fixed order that alternates between packages."""
    return (text.text for text in installed(packages))


def windows(tokenizer: object, count: int, length: int) -> list[list[int]]:
    """``count`` token sequences of ``length``, each from the beginning of another document."""
    result = []
    for text in documents():
        tokens = tokenizer.encode(text[: _CHARACTERS * length])[:length]  # type: ignore[attr-defined]
        if len(tokens) == length:
            result.append(tokens)
        if len(result) == count:
            return result
    raise RuntimeError(
        f"the installed packages {', '.join(PACKAGES)} hold only {len(result)} documents of {length} tokens"
    )


def recording(
    model: Any, tokenizer: Any, count: int, tokens: int, *, prompt_tokens: int = 32, steps: int = STEPS
) -> Recording:
    """What a model does on ``count`` documents: the beginning of each is a prompt, followed by its own ``tokens``."""
    prompts = windows(tokenizer, count, prompt_tokens)
    names = [f"{PACKAGES[i % len(PACKAGES)]} {i}" for i in range(count)]
    with tqdm(total=count * (tokens - 1), desc="Recording", unit="position", disable=None) as bar:
        return record(model, tokenizer, prompts, tokens, names=names, steps=steps, report=bar.update)
