"""Which expert of a layer makes room for one that is needed.

Every policy keeps a score per expert, resident or not, that grows with use; the smallest score goes first. So what a
policy knows outlives the residency of an expert, and is saved and restored as one list of numbers. Where routing
prefers residents, a use is what the router itself would have chosen: a preference would confirm itself.

The rows of a prompt count like those of decoding. Of the embedded model's picks in the first 50 rows after a prompt of
1000, with 32 slots of 128, 54.6 % then miss; 56.8 % where the prompt is ignored, 56.1 % where its rows do not decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

DEFAULT_EVICTION = "lrfu"
HALF_LIVES = {"lrfu": 16.0, "frequency": 128.0}  # rows; benchmarks/residency_tradeoff.py compares
_LARGEST_WEIGHT = 1e100  # of a use, before the scores are scaled down

Ids = NDArray[np.integer[Any]]
Rows = Ids | Sequence[Sequence[int]]  # [T, K]


class Eviction(Protocol):
    """The eviction policy of one layer. Ids are of experts, from 0 to E - 1, and no row holds one twice.

    score: of each expert. epoch: grows whenever scores become smaller; until then, use alone changes them.
    """

    score: memoryview[float]
    epoch: int

    def used(self, ids: Rows) -> None:
        """The rows of a window have selected the experts ``ids [T, K]``."""

    def victims(self, candidates: Sequence[int], count: int) -> list[int]:
        """Those ``count`` of ``candidates`` that are to be evicted, the one that is missed least first; all of them,
        if they are fewer. Of equal ones, the first in ``candidates`` goes first.
        """

    def to_dict(self) -> dict[str, Any]:
        """What the policy has learned, ready for JSON; make_eviction() takes it back."""


def make_eviction(name: str, experts: int, state: Mapping[str, Any] | None = None) -> Eviction:
    """The policy ``name`` for a layer of ``experts``. state: what such a policy had learned before.

    "lru" evicts what was used least recently, "frequency" what was used least often lately, and "lrfu" weighs both.

    Raises InputError for a name that there is not, and for a state of another policy or of other experts.
    """
    if name not in EVICTIONS:
        raise InputError(f"eviction is {name!r}, expected one of {', '.join(EVICTIONS)}")
    scores = np.zeros(experts) if state is None else _scores(name, experts, state)
    return LRU(scores) if name == "lru" else DecayedFrequency(scores, name)


class _Scores:
    """What policies with a score per expert have in common: those with the smallest go first."""

    def __init__(self, scores: NDArray[np.float64]):
        self._scores = scores  # [E]
        self.score, self.epoch = scores.data.cast("B").cast("d"), 0

    def victims(self, candidates: Sequence[int], count: int) -> list[int]:
        return sorted(candidates, key=self.score.__getitem__)[:count]


class LRU(_Scores):
    """Least recently used: the score is the number of the row that last selected the expert."""

    def __init__(self, scores: NDArray[np.float64]):
        super().__init__(scores)
        self._rows = float(scores.max())

    def used(self, ids: Rows) -> None:
        rows = len(ids)
        # Of repeated ids, NumPy leaves behind what is assigned last.
        self._scores[ids] = self._rows + 1 if rows == 1 else np.arange(1, rows + 1)[:, None] + self._rows
        self._rows += rows

    def to_dict(self) -> dict[str, Any]:
        return _state("lru", self._scores - self._rows)


class DecayedFrequency(_Scores):
    """The score is the sum over all uses of ``2 ** (-age / half_life)``, age in rows.

    That is LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001, section 3), with 1 / half_life as its
    lambda: from "least recently used" where it is short to "least frequently used" where it is endless.
    """

    def __init__(self, scores: NDArray[np.float64], name: str):
        super().__init__(scores)  # in units of _weight
        self._weight = 1.0  # of a use in the latest row: it grows, so that nothing else need shrink row by row
        self._name, self._growth = name, 2 ** (1 / HALF_LIVES[name])

    def used(self, ids: Rows) -> None:
        if len(ids) > 1 or self._weight > _LARGEST_WEIGHT:
            age = np.arange(len(ids))[::-1]
            self._scores *= self._growth ** -len(ids) / self._weight
            weights = np.repeat(self._growth**-age, len(ids[0]))
            self._scores += np.bincount(np.ravel(ids), weights, self._scores.size)
            self._weight = 1.0
            self.epoch += 1
        else:
            self._weight *= self._growth
            for expert in ids[0]:
                self.score[expert] += self._weight

    def to_dict(self) -> dict[str, Any]:
        return _state(self._name, self._scores / self._weight)


EVICTIONS = ("lru", *HALF_LIVES)


def _state(name: str, scores: NDArray[np.float64]) -> dict[str, Any]:
    return {"eviction": name, "scores": scores.tolist()}


def _scores(name: str, experts: int, state: Mapping[str, Any]) -> NDArray[np.float64]:
    """The scores ``[E]`` in ``state``."""
    if state.get("eviction") != name:
        raise InputError(f"the state is of the eviction policy {state.get('eviction')!r}, not of {name!r}")
    values: Any = state.get("scores")
    numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    if not numbers or len(values) != experts or not np.isfinite(values).all():
        raise InputError(f"the state of the eviction policy {name!r} must hold {experts} finite scores")
    return np.array(values, np.float64)
