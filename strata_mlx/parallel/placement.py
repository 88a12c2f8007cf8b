"""Which rank has which experts of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Owners = NDArray[np.int32]  # [E], the rank that has each expert


@dataclass(frozen=True, eq=False)
class Placement:
    """owners: by the index of the MoE layer; ``default`` for those that are not named. Both as int32 ``[E]``.

    In each layer, the ranks have equally many experts, up to one.
    """

    default: Owners
    owners: Mapping[int, Owners]

    def of(self, layer: int) -> Owners:
        return self.owners.get(layer, self.default)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        named = {str(layer): owners.tolist() for layer, owners in self.owners.items()}
        return {"default": self.default.tolist(), "owners": named}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Placement:
        """What to_dict() made."""
        named = {int(layer): np.array(owners, np.int32) for layer, owners in value["owners"].items()}
        return cls(np.array(value["default"], np.int32), named)


def even(experts: int, ranks: int) -> Placement:
    """Experts are dealt out in turn, so that routers which choose among groups of neighbours find them apart."""
    return Placement(np.arange(experts, dtype=np.int32) % ranks, {})


def balanced(counts: Mapping[int, Sequence[int] | NDArray[np.int64]], experts: int, ranks: int) -> Placement:
    """Each rank has about as much to do in every layer, by how often each expert was selected.

    counts: by the index of the MoE layer, ``[E]``. The experts are dealt out from the most selected one on, each to
    the rank with the least to do that has room (Graham, *Bounds on Multiprocessing Timing Anomalies*, 1969, LPT).
    """
    owners = {layer: _dealt(np.asarray(of_layer), ranks) for layer, of_layer in counts.items()}
    return Placement(even(experts, ranks).default, owners)


def load(counts: Sequence[int] | NDArray[np.int64], owners: Owners, ranks: int) -> NDArray[np.float64]:
    """Selections of each rank's experts ``[ranks]``."""
    return np.bincount(owners, weights=np.asarray(counts, np.float64), minlength=ranks).astype(np.float64)


def share(experts: int, ranks: int) -> int:
    """The most experts of a layer that a rank has."""
    return -(-experts // ranks)


def _dealt(counts: NDArray[np.int64], ranks: int) -> Owners:
    room = np.bincount(np.arange(counts.size) % ranks, minlength=ranks)
    owners, busy = np.empty(counts.size, np.int32), np.zeros(ranks, np.int64)
    for expert in np.argsort(-counts, kind="stable"):
        rank = min((rank for rank in range(ranks) if room[rank]), key=lambda rank: (busy[rank], -room[rank], rank))
        owners[expert] = rank
        busy[rank] += counts[expert]
        room[rank] -= 1
    return owners
