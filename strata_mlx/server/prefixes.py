"""What was read of earlier prompts and texts, kept for those that begin the same way.

Recurrent states, and windows that have slid, cannot be taken back to an earlier token, so a snapshot serves a prompt
that begins with all of it; where a model has full attention alone, it serves as far as the two agree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from numpy.typing import NDArray

from ..device import evaluate
from ..models.trunk import Hidden

Ids = NDArray[np.int32]

# Fewer tokens are read again about as fast as they are looked up, and everybody's prompts share the first few.
LEAST_TOKENS = 16


@dataclass(frozen=True)
class Head:
    """What a draft head has seen: its caches, and the trunk's hidden state of the last token, whose follower it has not
    seen; None where that is not known. Without this, it proposes worse.
    """

    cache: list[Any]
    hidden: Hidden | None


@dataclass(frozen=True)
class Snapshot:
    """Caches as they were after ``tokens``; nothing that is computed from a copy changes them."""

    tokens: Ids
    cache: list[Any]
    head: Head | None = None

    @property
    def nbytes(self) -> int:
        head = [] if self.head is None else [*self.head.cache, *(self.head.hidden or ())]
        return sum(part.nbytes for part in (*self.cache, *head)) + self.tokens.nbytes

    @property
    def trimmable(self) -> bool:
        return all(layer.is_trimmable() for layer in self.cache)


def frozen(cache: Sequence[Any]) -> list[Any]:
    """Copies of the caches of one sequence, no larger than what is in them."""
    result = [_frozen(layer) for layer in cache]
    evaluate([layer.state for layer in result], "keeping a prompt for later")
    return result


def thawed(cache: Sequence[Any], tokens: int | None = None) -> list[Any]:
    """Caches to go on from, which leave the frozen ``cache`` as it is. tokens: only so many, where all can be trimmed.

    The arrays are shared: a KVCache that is full makes a new one for the next token, and recurrent states are replaced.
    """
    result = [_alias(layer) for layer in cache]
    return result if tokens is None else frozen([_trimmed(layer, tokens) for layer in result])


class Prefixes:
    """Snapshots of at most ``budget`` bytes; where that is too little, the one that was of use longest ago goes."""

    def __init__(self, budget: int):
        self.budget = budget
        self.nbytes = 0
        self._kept: OrderedDict[bytes, Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, prompt: Ids) -> tuple[Snapshot | None, int]:
        """The snapshot that spares the most of ``prompt``, of which one token at least is left to be read, and how much
        of the prompt has been seen before: up to there, it is worth a snapshot of its own.
        """
        best: Snapshot | None = None
        spared = seen = 0
        for key, snapshot in self._kept.items():
            common = _common(prompt[:-1], snapshot.tokens)
            seen = max(seen, common)
            usable = common if snapshot.trimmable or common == len(snapshot.tokens) else 0
            if usable > spared:
                best, spared, found = snapshot, usable, key
        if best is None:
            return None, seen
        self._kept.move_to_end(found)
        if spared < len(best.tokens):
            best = Snapshot(best.tokens[:spared], thawed(best.cache, spared))
        return best, seen

    def keep(self, tokens: Ids, cache: Sequence[Any], head: Head | None = None) -> None:
        """Copy the caches of one sequence, which hold ``tokens``."""
        key = tokens.tobytes()
        if not self.budget or len(tokens) < LEAST_TOKENS:
            return
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        if head is not None:
            head = Head(frozen(head.cache), head.hidden)
        snapshot = Snapshot(tokens.copy(), frozen(cache), head)
        self._kept[key] = snapshot
        self.nbytes += snapshot.nbytes
        while self.nbytes > self.budget:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes


def _common(a: Ids, b: Ids) -> int:
    """How many tokens the two begin with alike."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def _frozen(layer: Any) -> Any:
    if isinstance(layer, ArraysCache):
        copy = ArraysCache(0)
        copy.cache = [mx.contiguous(array) for array in layer.cache]
        return copy
    if isinstance(layer, RotatingKVCache) and not layer.is_trimmable():
        return _ring(layer, mx.contiguous)
    return _trimmed(layer, layer.offset)


def _trimmed(layer: Any, tokens: int) -> Any:
    rotates = isinstance(layer, RotatingKVCache)
    copy = RotatingKVCache(layer.max_size, layer.keep) if rotates else KVCache()
    if tokens:
        copy.keys = mx.contiguous(layer.keys[..., :tokens, :])
        copy.values = mx.contiguous(layer.values[..., :tokens, :])
        copy.offset = tokens
        if rotates:
            copy._idx = tokens
    return copy


def _ring(layer: RotatingKVCache, copied: Callable[[mx.array], mx.array]) -> RotatingKVCache:
    copy = RotatingKVCache(layer.max_size, layer.keep)
    keys, values, *rest = layer.state
    copy.state = (copied(keys), copied(values), *rest)
    return copy


def _alias(layer: Any) -> Any:
    if isinstance(layer, ArraysCache):
        copy = ArraysCache(0)
        copy.cache = list(layer.cache)
        return copy
    if isinstance(layer, RotatingKVCache):  # rows are assigned into array objects, so that it needs its own
        return layer if layer.empty() else _ring(layer, lambda array: array[:])
    copy = KVCache()
    copy.keys, copy.values, copy.offset = layer.keys, layer.values, layer.offset
    return copy
