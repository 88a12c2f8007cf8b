"""Text that the embedded model was not trained on: the sources of installed packages, read at run time."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from strata_mlx.replay.recording import STEPS, Recording, record

PACKAGES = ("mlx", "mlx_lm", "huggingface_hub")


def documents(packages: Sequence[str] = PACKAGES, min_bytes: int = 2000) -> Iterator[str]:
    """The Python files of ``packages`` with at least ``min_bytes``, in a fixed order that alternates between
    packages.
    """
    files = [_files(package, min_bytes) for package in packages]
    for rank in range(max(map(len, files))):
        for of_package in files:
            if rank < len(of_package):
                yield of_package[rank].read_text(encoding="utf-8")


def windows(tokenizer: object, count: int, length: int) -> list[list[int]]:
    """``count`` token sequences of ``length``, each from the beginning of another document."""
    result = []
    for text in documents():
        tokens = tokenizer.encode(text)[:length]  # type: ignore[attr-defined]
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


def _files(package: str, min_bytes: int) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"package {package} is not installed, so its sources cannot serve as text")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return sorted(file for file in folder.rglob("*.py") if file.stat().st_size >= min_bytes)
