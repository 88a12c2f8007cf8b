"""Files that hold a model's state after a prompt, in mlx_lm's format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import cache as mlx_lm_cache

from .checkpoint import read_header
from .errors import Fault, InputError

EMBEDDED = "embedded"  # names the embedded model in the file's metadata


def check_destination(path: Path) -> None:
    """Raise InputError if no prompt cache can be written to ``path``, before any work is put into one."""
    if path.suffix != ".safetensors":
        raise InputError(f"{str(path)!r}: the name of a prompt cache must end in .safetensors")
    if path.is_dir():
        raise InputError(f"{path}: this is a folder; name a file")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist; make it first")


def save_prompt_cache(path: Path, cache: list[Any], model: str | None) -> None:
    """Write ``cache``, made with ``model``, to ``path``. The file appears complete or not at all.

    Raises InputError for a path that check_destination() refuses, and Fault when writing fails.
    """
    check_destination(path)
    unfinished = path.with_name(f".unfinished-{path.name}.safetensors")
    try:
        mlx_lm_cache.save_prompt_cache(str(unfinished), cache, {"model": model or EMBEDDED, "tokenizer_config": "{}"})
        read_header(unfinished)  # finds a short write
        os.replace(unfinished, path)
    except (RuntimeError, OSError, InputError) as error:
        unfinished.unlink(missing_ok=True)
        raise Fault(f"{path}: the prompt cache cannot be written: {error}") from error


def load_prompt_cache(path: Path, model: str | None) -> tuple[list[Any], str | None]:
    """Read a cache and the model to use it with: ``model``, or the one that made it where ``model`` is None.

    Raises InputError if the file is missing, broken, was made with another model or names none.
    """
    read_header(path)
    try:
        cache, metadata = mlx_lm_cache.load_prompt_cache(str(path), return_metadata=True)
        made_with = metadata.get("model")
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a prompt cache ({error}); make one with strata_mlx cache_prompt") from error
    if made_with is None and model is None:
        raise InputError(f"{path}: the prompt cache does not say which model made it; name the model")
    if model is not None and made_with not in (None, model):
        raise InputError(f"{path}: the prompt cache was made with the model {made_with!r}, not {model!r}")
    return cache, model or (None if made_with == EMBEDDED else made_with)


def check_fits(path: Path, cache: list[Any], model: nn.Module, empty: list[Any]) -> None:
    """Raise InputError unless ``cache`` has the layers of ``model``, whose ``empty`` cache is given."""
    fits = len(cache) == len(empty)
    for layer, other in zip(cache, empty, strict=False):
        fits &= isinstance(layer, mlx_lm_cache.ArraysCache) == isinstance(other, mlx_lm_cache.ArraysCache)
    if fits:
        try:  # one token on a copy of the state finds any other difference in shape
            copies = [type(layer).from_state(_copy(layer.state)) for layer in cache]
            mx.eval(model(mx.array([[0]]), cache=copies))
        except (ValueError, RuntimeError):
            fits = False
    if not fits:
        raise InputError(
            f"{path}: the prompt cache does not fit the model; make a new one with strata_mlx cache_prompt"
        )


def _copy(state: Any) -> Any:
    """The same arrays in lists and tuples of their own: recurrent layers put new arrays into their list."""
    return tree_map(lambda leaf: leaf, state)
