"""Texts to measure a model on: a user's files, or the sources of installed packages.

The embedded model was not trained on these packages. Nothing is copied: they are read where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .errors import InputError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

PACKAGES = ("mlx", "mlx_lm", "huggingface_hub")
_LEAST_BYTES = 2000
_PROMPT_LINES = ".jsonl"


@dataclass(frozen=True)
class Text:
    """A document. prompt: it is a whole prompt, which a chat template wraps; else it is any text."""

    name: str
    text: str
    prompt: bool = False


class Tokens(NamedTuple):
    """A document as token ids."""

    name: str
    ids: list[int]


def installed(packages: Sequence[str] = PACKAGES) -> Iterator[Text]:
    """The Python files of ``packages``, in a fixed order that alternates between packages. Raises InputError."""
    files = [_sources(package) for package in packages]
    for rank in range(max(map(len, files))):
        for package, of_package in zip(packages, files, strict=True):
            if rank < len(of_package):
                file = of_package[rank]
                yield Text(f"{package}/{file.name}", file.read_text(encoding="utf-8"))


def read(paths: Sequence[Path]) -> list[Text]:
    """The files in ``paths`` and, in the order of their names, those in folders that are text; hidden ones are not.

    A .jsonl file holds a prompt in each line: {"prompt": ...}. Any other file is one document.

    Raises InputError for a path that there is not, a file that is not text, and where nothing is left.
    """
    texts: list[Text] = []
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if file.is_file() and not hidden and (text := _decoded(file)) is not None:
                    texts += _of_file(file, str(file.relative_to(path)), text)
        else:
            text = _decoded(path)
            if text is None:
                raise InputError(f"--data {path}: not text in UTF-8")
            texts += _of_file(path, path.name, text)
    if not texts:
        raise InputError(f"--data {' '.join(map(str, paths))}: no text in there")
    return texts


def beginnings(texts: Iterable[Text], tokenizer: TokenizerWrapper, count: int, length: int) -> list[Tokens]:
    """The first ``length`` tokens of the first ``count`` texts that have as many."""
    result: list[Tokens] = []
    for text in texts:
        if len(result) == count:
            break
        ids = tokenizer.encode(text.text[: 20 * length])[:length]
        if len(ids) == length:
            result.append(Tokens(text.name, list(ids)))
    return result


def prompts(texts: Iterable[Text], tokenizer: TokenizerWrapper, count: int, length: int) -> list[Tokens]:
    """Up to ``count`` prompts: whole ones, by the model's chat template if it has one, and beginnings of texts."""
    result: list[Tokens] = []
    for text in texts:
        if len(result) == count:
            break
        if text.prompt:
            result.append(Tokens(text.name, _chat(tokenizer, text.text)))
        else:
            result += beginnings([text], tokenizer, 1, length)
    return result


def _chat(tokenizer: TokenizerWrapper, prompt: str) -> list[int]:
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(prompt))
    messages = [{"role": "user", "content": prompt}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def _of_file(file: Path, name: str, text: str) -> list[Text]:
    if file.suffix != _PROMPT_LINES:
        return [Text(name, text)]
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        prompt = value.get("prompt") if isinstance(value, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise InputError(f'--data {file}, line {number}: expected an object such as {{"prompt": "..."}}')
        found.append(Text(f"{name}:{number}", prompt, prompt=True))
    return found


def _decoded(file: Path) -> str | None:
    """The text of a file, None where it is none. Raises InputError where it cannot be read."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"--data {file}: cannot be read ({error.strerror})") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text or not text.strip() else text


def _sources(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"package {package} is not installed, so that its sources cannot serve as text: give --data")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return sorted(file for file in folder.rglob("*.py") if file.stat().st_size >= _LEAST_BYTES)
