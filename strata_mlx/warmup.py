"""What a session computes, once each, so that a backend compiles all of it and keeps what it has compiled."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import cuda, modules
from .device import on_cpu
from .engine import generate_step
from .experts.streaming import streaming_of
from .fused.project import MAX_ROWS
from .models.family import text_args
from .models.trunk import Trunk
from .prefill import make_cache
from .routing import verify_window
from .routing.executors import default_executor
from .speculation.decoder import SpeculativeDecoder
from .speculation.draft import MAX_STEPS, MTPDrafter
from .speculation.retention import RetentionPolicy
from .speculation.sampling import Sampling
from .speculation.window import Window

PROMPTS = (20, 100, 600)  # tokens; MLX has kernels of their own for few, some and many rows
TOKENS = 8  # after each prompt
CONTEXT = max(PROMPTS) + TOKENS
Work = Callable[[], object]


def stores() -> dict[str, tuple[Path, str]]:
    """By what compiles: the folder where this device's kernels are kept, and the pattern of their files. Metal's are
    kept by the system, where they cannot be seen.
    """
    if on_cpu():
        return {"MLX": (Path(tempfile.gettempdir()) / "mlx" / version("mlx") / "cpu", "*.so")}
    if mx.cuda.is_available():
        cuda.prepare()
        return {"MLX": (modules.mlx_cache(), "*.ptx"), "strata_mlx": (cuda.folder(), "*.cubin")}
    return {}


def kept() -> dict[str, set[str]]:
    """The names of the kernels in each of the stores(). MLX's may hold copies of ours, which do not count there."""
    return {
        name: {file.name for file in folder.glob(pattern) if name != "MLX" or not file.name.startswith("strata_")}
        for name, (folder, pattern) in stores().items()
    }


def compile_ahead(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Compile the kernels of this package that windows of ``model`` run, side by side; yields how many are done, and of
    how many. Does nothing where they are not compiled by cuda.compiled().
    """
    if on_cpu() or not mx.cuda.is_available() or not cuda.available():
        return
    if streaming_of(model):
        default_executor()  # it is checked by what it computes, which has to happen before
    with cuda.compiling_ahead() as ahead:
        build_graphs(model)
        yield 0, len(ahead.futures)
        for done, _ in enumerate(as_completed(list(ahead.futures.values())), 1):
            yield done, len(ahead.futures)


def build_graphs(model: nn.Module) -> None:
    """Build the graph of a window of every size that has kernels of its own, and of its drafts; evaluate none."""
    trunk, cache = Trunk(model), make_cache(model)
    drafter = MTPDrafter(model) if "mtp" in model else None
    trunk(_tokens(model, MAX_ROWS + 1)[None], cache)
    for rows in range(1, MAX_ROWS + 1):
        tokens, window = _tokens(model, rows), Window(cache, rows)
        with verify_window():
            hidden = trunk(tokens[None], window.layers)
        trunk.logits(hidden.after)
        if drafter:
            drafter.observe(tokens, hidden)
            list(islice(drafter.steps(), 2))
        window.commit(rows)


def rehearsal(model: nn.Module) -> list[Work]:
    """Prompts of several lengths with a few steps after each, sampled text, and windows of every size where there is a
    draft head.
    """
    work: list[Work] = [partial(_plain, model, size) for size in PROMPTS]
    work.append(partial(_plain, model, PROMPTS[0], sampler=Sampling(0.7, top_p=0.9)))
    if "mtp" in model:
        work += [partial(_speculate, model, drafts) for drafts in range(1, MAX_STEPS + 1)]
    return work


def first_token_seconds(model: nn.Module) -> float:
    """Of the shortest prompt."""
    start = time.perf_counter()
    next(iter(generate_step(_tokens(model, PROMPTS[0]), model, max_tokens=1)))
    return time.perf_counter() - start


def _plain(model: nn.Module, size: int, **options: Any) -> None:
    for _ in generate_step(_tokens(model, size), model, max_tokens=TOKENS, **options):
        pass


def _speculate(model: nn.Module, drafts: int) -> None:
    prompt, everything = _tokens(model, PROMPTS[0]), RetentionPolicy(0.0)
    # So many tokens that the first window holds all drafts.
    for _ in SpeculativeDecoder(model, prompt=prompt, max_tokens=drafts + 2, max_steps=drafts, retention=everything):
        pass


def _tokens(model: nn.Module, count: int) -> mx.array:
    """``[count]``, different ones, so that they need different experts."""
    return (mx.arange(count) * 31 + 7) % text_args(model).vocab_size
