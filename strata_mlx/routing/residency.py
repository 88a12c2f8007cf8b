"""Which experts of each layer are in memory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata_mlx.errors import InputError


@dataclass(frozen=True, eq=False)
class Residency:
    """``layers`` maps a MoE layer's index to a bool ``[E]``; a layer that is not named has nothing in memory."""

    layers: Mapping[int, NDArray[np.bool_]]

    def of(self, layer: int) -> NDArray[np.bool_] | None:
        """The map of a layer, or None if nothing of it is in memory."""
        resident = self.layers.get(layer)
        return resident if resident is not None and resident.any() else None

    @classmethod
    def from_json(cls, path: Path, layer_count: int, experts: int, option: str = "--residency") -> "Residency":
        """Read ``{"0": [3, 17], "1": [...]}``: by layer, the experts that are in memory. option: what names the file.

        Raises InputError that names the file, for one that is broken or names a layer or an expert that there is not.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{option} {path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise InputError(f"{option} {path}: not valid JSON ({error})") from error
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
