"""Which experts of each layer are in memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from strata_mlx.errors import InputError
from strata_mlx.values import read_json


class ResidencyMap(Protocol):
    """What routing asks: a Residency, or a LiveResidency."""

    @property
    def layers(self) -> Mapping[int, Any]:
        """By the layers of which something is known."""

    def of(self, layer: int) -> NDArray[np.bool_] | None:
        """Which experts of a layer are in memory now, bool ``[E]``, or None where nobody is to be preferred."""

    def version(self, layer: int) -> int:
        """Another number whenever ``of(layer)`` may be another map."""

    def acts_on(self, rows: int) -> bool:
        """Whether it is for windows of so many rows."""

    def wants(self, layer: int, choose: Callable[[], mx.array] | None) -> None:
        """A window of a layer is being routed. choose: gives the router's own choice, uint ``[..., T, K]``, where
        another one may be made; what is in memory may depend on it.
        """


@dataclass(frozen=True, eq=False)
class Residency:
    """``layers`` maps a MoE layer's index to a bool ``[E]``; a layer that is not named has nothing in memory."""

    layers: Mapping[int, NDArray[np.bool_]]

    def version(self, layer: int) -> int:  # noqa: ARG002
        return 0

    def acts_on(self, rows: int) -> bool:  # noqa: ARG002
        return True

    def wants(self, layer: int, choose: Callable[[], mx.array] | None) -> None:
        """Nothing depends on it."""

    def of(self, layer: int) -> NDArray[np.bool_] | None:
        """The map of a layer, or None if nothing of it is in memory."""
        resident = self.layers.get(layer)
        return resident if resident is not None and resident.any() else None

    @classmethod
    def from_json(cls, path: Path, layer_count: int, experts: int, option: str = "--residency") -> "Residency":
        """Read ``{"0": [3, 17], "1": [...]}``: by layer, the experts that are in memory. option: what names the file.

        Raises InputError that names the file, for one that is broken or names a layer or an expert that there is not.
        """
        value = read_json(path, f"{option} {path}")
        if not isinstance(value, dict):
            raise InputError(f'{option} {path}: expected an object such as {{"0": [3, 17]}}')
        layers = {}
        for name, ids in value.items():
            if not (name.isascii() and name.isdigit() and int(name) < layer_count):
                raise InputError(f"{option} {path}: there is no layer {name!r}; they are 0 to {layer_count - 1}")
            if not isinstance(ids, list) or any(type(e) is not int or not 0 <= e < experts for e in ids):
                raise InputError(f"{option} {path}: layer {name}: expected a list of experts 0 to {experts - 1}")
            layers[int(name)] = np.isin(np.arange(experts), ids)
        return cls(layers)


class HasResident(Protocol):
    """What a table of slots tells of a layer: which experts are in memory, of how many that could be."""

    @property
    def resident(self) -> NDArray[np.bool_]:
        """Bool ``[E]``, changed in place."""

    @property
    def version(self) -> int:
        """Grows whenever ``resident`` changes."""

    @property
    def slots(self) -> int: ...

    wanted: Any
    """The router's own choice ``[..., T, K]`` for the window that is being routed, None where it has been made."""


class LiveResidency:
    """The experts that are in memory at the moment, by the slot tables of the layers.

    A layer prefers nobody until its slots have been full once: the experts of the first rows would keep all others
    out. Nor does it where all experts are in memory, or in windows of more than PROMPT_ROWS rows: these are a prompt's,
    and select nearly every expert with a preference as without (256 rows of the embedded model 120 of 128, not 125).
    """

    PROMPT_ROWS = 16

    def __init__(self, tables: Mapping[int, HasResident]):
        self.layers = tables
        self._filled: set[int] = set()

    def of(self, layer: int) -> NDArray[np.bool_] | None:
        """A view of what changes: copy it before anything is loaded."""
        table = self.layers.get(layer)
        if table is None:
            return None
        held = int(np.count_nonzero(table.resident))
        if held >= table.slots:
            self._filled.add(layer)
        return table.resident if layer in self._filled and 0 < held < table.resident.size else None

    def version(self, layer: int) -> int:
        table = self.layers.get(layer)
        return 0 if table is None else table.version

    def acts_on(self, rows: int) -> bool:
        return rows <= self.PROMPT_ROWS

    def wants(self, layer: int, choose: Callable[[], mx.array] | None) -> None:
        """Evictions go by what the router wants: what is chosen only because it is in memory would stay there."""
        table = self.layers.get(layer)
        if table is not None:
            table.wanted = choose and choose()
