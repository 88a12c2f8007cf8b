"""Models that stream, and what is compared of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from strata_mlx import load
from strata_mlx.experts import files, stream, streaming
from strata_mlx.experts.disk import DiskSettings
from strata_mlx.experts.slots import SlotPool, UnifiedSlots
from strata_mlx.models.trunk import Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.routing import verify_window
from strata_mlx.speculation.window import Window
from tests.experts.staged import STAGED
from tests.tiny import TINY, make_checkpoint

EXPERTS, TOP_K = 16, 4
# A prompt that needs every expert of a layer, plain steps, windows of drafts that are rejected in part, another prompt.
TEXT = [(i * i * 31 + 7 * i) % 256 for i in range(40)]
WINDOWS = (40, 1, 1, 1, 4, 2, 1, 3, 17, 1)


def checkpoint(path: Path, family: str = "qwen3_next", layout: str = "separate", **changes: Any) -> Path:
    mtp = {"stacked": "stacked", "fused": "fused"}.get(layout, "separate") if TINY[family].heads else None
    options = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, **changes}
    return make_checkpoint(path, family, layout, mtp=mtp, **options)


def made_by(kind: Callable[..., SlotPool]) -> Callable[..., SlotPool]:
    """What takes the place of make_slots()."""
    return kind if kind in STAGED else lambda *parts: kind(*parts[:3])


def streamed(
    folder: Path,
    slots: int | Sequence[int],
    *,
    kind: Callable[..., Any] = UnifiedSlots,
    threads: int = 1,
    eviction: str = "lru",
    mtp: bool = False,
) -> nn.Module:
    with patch.object(streaming, "make_slots", made_by(kind)):
        model, _ = load(folder, slots=slots, eviction=eviction, mtp=mtp)
    if found := streaming.streaming_of(model):
        found.store.settings = DiskSettings(threads)
    return model


def logits(model: nn.Module, windows: Sequence[int] = WINDOWS) -> list[NDArray[np.float32]]:
    """Of each window, one after another, as decoding has them; of drafts, one is accepted."""
    trunk, cache, result, start = Trunk(model), make_cache(model), [], 0
    for rows in windows:
        tokens = mx.array([TEXT[(start + i) % len(TEXT)] for i in range(rows)])[None]
        if 1 < rows < 8:
            window = Window(cache, rows)
            with verify_window():
                hidden = trunk(tokens, window.layers)
            result.append(np.array(trunk.logits(hidden.after)))
            window.commit(2)
        else:
            hidden = trunk(tokens, cache)
            result.append(np.array(trunk.logits(hidden.after)))
        if "mtp" in model:
            result.append(np.array(trunk.logits(model.mtp(trunk.embed(tokens), hidden.after))))
        start += rows
    return result


def same(a: list[NDArray[np.float32]], b: list[NDArray[np.float32]]) -> bool:
    """To the last bit."""
    return len(a) == len(b) and all(x.shape == y.shape and (x == y).all() for x, y in zip(a, b, strict=True))


@contextmanager
def reads(act: Callable[[int], None]) -> Iterator[list[int]]:
    """``act`` is called before each read with its number, from 0, and may raise. Gives a list with the count so far."""
    count, original = [0], files.pread_into

    def pread_into(*args: Any) -> int:
        count[0] += 1
        act(count[0] - 1)
        return original(*args)

    with patch.object(files, "pread_into", pread_into):
        yield count


def splitting(split: bool) -> Any:
    """Have windows with misses computed apart, or at once."""
    return patch.object(stream, "SPLIT_SECONDS", -1.0 if split else float("inf"))
