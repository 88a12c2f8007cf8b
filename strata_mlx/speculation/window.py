"""A window of tokens that the caches may have to forget again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from ..errors import InputError
from ..models.gated_delta import LoggingCache

_TRIMMABLE = (KVCache, QuantizedKVCache)  # each token has a place of its own, which trim() frees


class Window:
    """One forward of ``rows`` tokens over ``cache``, of which commit() keeps a prefix.

    The forward must be given ``layers``. Attention caches grow in place and are trimmed. Recurrent layers get a
    LoggingCache: their entries of ``cache`` change at commit() only, to a state that is replayed from the log, without
    another forward. Of one row there is nothing to replay: it needs no log, is kept at once, and may be taken back; so
    may any number of forwards of one row each, all together.

    A sliding window's cache drops what leaves the window. Of a forward of several rows it has all that the first of
    them sees, so that rows can be cut off; what it was before the forward is kept, since one row overwrites another.
    """

    def __init__(self, cache: list[Any], rows: int):
        self.rows = rows
        self._cache = cache
        self._before = [_before(layer) for layer in cache]
        self.layers = cache if rows == 1 else [_logging(layer) for layer in cache]

    def commit(self, kept: int) -> None:
        """Leave every cache as the first ``kept`` of the window's tokens would have, computed one by one.

        May be called again with a smaller ``kept``.
        """
        for base, layer, before in zip(self._cache, self.layers, self._before, strict=True):
            if isinstance(base, RotatingKVCache):
                _cut(base, before, kept)
            elif not isinstance(base, ArraysCache):
                base.trim(base.offset - before - kept)
            elif kept == 0:
                base.cache = before
            elif kept == self.rows:
                base.cache = layer.cache
            else:
                assert layer.log is not None, "commit() comes after the window's forward"
                base.cache = layer.log.after(kept)


class _Ring(NamedTuple):
    """The state of a RotatingKVCache in the order of its own, with array objects that nothing assigns to."""

    keys: mx.array | None
    values: mx.array | None
    offset: int
    keep: int
    max_size: int
    place: int


def _before(layer: Any) -> Any:
    if isinstance(layer, RotatingKVCache):
        ring = _Ring(*layer.state)
        if layer.keys is not None:  # a row is assigned into the array object, so the cache goes on with another one
            layer.keys, layer.values = layer.keys[:], layer.values[:]
        return ring
    return list(layer.cache) if isinstance(layer, ArraysCache) else layer.offset


def _cut(layer: RotatingKVCache, before: _Ring, kept: int) -> None:
    surplus = layer.offset - before.offset - kept
    if kept == 0:
        layer.state = before
    elif surplus:  # of a forward of several rows, after which the arrays are in the order of the tokens
        size = layer.keys.shape[2] - surplus
        layer.keys, layer.values = layer.keys[..., :size, :], layer.values[..., :size, :]
        layer.offset, layer._idx = before.offset + kept, size


def _logging(layer: Any) -> Any:
    return LoggingCache(layer) if isinstance(layer, ArraysCache) else layer


def check_rollback(cache: Sequence[Any]) -> None:
    """Raise InputError unless every layer of ``cache`` can be rolled back exactly."""
    for layer in cache:
        recurrent = type(layer) is ArraysCache and layer.lengths is None and layer.left_padding is None
        sliding = type(layer) is RotatingKVCache and layer.keep == 0
        if not (recurrent or sliding or type(layer) in _TRIMMABLE):
            raise InputError(
                f"speculation needs caches that can be rolled back, which a {type(layer).__name__} cannot: give no "
                f"max_kv_size, or mtp=False"
            )
