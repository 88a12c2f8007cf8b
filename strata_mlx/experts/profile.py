"""What earlier runs of a model selected, and what was in memory at the end: a file that warms the next start.

    {"version": 1, "model": {"config": SHA-256, "experts": 128},
     "layers": {"0": {"counts": [12, 0, ...], "resident": [3, 17, ...]}, ...}}

counts: how often each expert was selected, in all runs. resident: those in memory when the last run ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..errors import InputError
from ..folders import write_whole
from ..models.plan import ModelPlan
from ..values import read_json
from .streaming import Streaming

VERSION = 1


@dataclass(frozen=True)
class LayerProfile:
    """counts: int64 ``[E]``. resident: bool ``[E]``."""

    counts: NDArray[np.int64]
    resident: NDArray[np.bool_]

    def hottest(self) -> list[int]:
        """The experts that were selected or in memory, the most selected first; among equals, those in memory."""
        order = np.lexsort((np.arange(self.counts.size), ~self.resident, -self.counts))
        return [int(expert) for expert in order if self.counts[expert] or self.resident[expert]]

    def to_dict(self) -> dict[str, list[int]]:
        return {"counts": self.counts.tolist(), "resident": self.resident.nonzero()[0].tolist()}


class ExpertProfile:
    """A profile file for the model of ``plan``. layers: what it held when it was opened, by index of the MoE layer."""

    def __init__(self, path: Path, model: Mapping[str, Any], layers: Mapping[int, LayerProfile]):
        self.path, self._model, self.layers = path, model, layers
        self._warned = False

    @classmethod
    def open(cls, path: Path, plan: ModelPlan) -> ExpertProfile:
        """Read the file, if there is one.

        Raises InputError for a file that is broken, belongs to another model or cannot be written in the end.
        """
        model = fingerprint(plan)
        _check_destination(path)
        layers = _read(path, model) if path.exists() else {}
        return cls(path, model, layers)

    def warm(self, streaming: Streaming) -> None:
        """Read the hottest experts into the slots, with a progress bar where that takes long, and let the eviction
        policies take them for used, the hottest last. Raises Fault where a read fails.
        """
        wanted = {index: layer.hottest() for index, layer in self.layers.items()}
        total = sum(
            min(len(wanted.get(index, ())), table.free) * streaming.expert_bytes(index)
            for index, table in streaming.tables.items()
        )
        with tqdm(total=total, unit="B", unit_scale=True, desc="Experts", delay=1, leave=False, disable=None) as bar:
            streaming.warm(wanted, bar.update)
        for index, table in streaming.tables.items():
            if order := wanted.get(index):
                table.eviction.used(np.array(order[::-1])[:, None])

    def save(self, streaming: Streaming) -> None:
        """Write what was known before and what ``streaming`` has learned. The file appears complete or stays as it was.

        Where it cannot be written, one line on standard error says so the first time: the run does what it is for.
        """
        layers = {index: layer.to_dict() for index, layer in self.layers.items()}  # an MTP head may be left out now
        for index, table in streaming.tables.items():
            before = self.layers.get(index)
            counts = table.counts + before.counts if before else table.counts
            layers[index] = LayerProfile(counts, table.resident).to_dict()
        record = {"version": VERSION, "model": self._model, "layers": layers}
        try:
            write_whole(self.path, f"{json.dumps(record)}\n".encode())
        except OSError as error:
            if not self._warned:
                print(f"warning: {self.path}: the expert profile is not saved: {error.strerror}", file=sys.stderr)
            self._warned = True


def fingerprint(plan: ModelPlan) -> dict[str, Any]:
    """What a model must have in common with the one that a profile was made with."""
    config = json.dumps(plan.checkpoint.config, sort_keys=True).encode()
    return {"config": hashlib.sha256(config).hexdigest(), "experts": plan.args.num_experts}


def _check_destination(path: Path) -> None:
    where = f"--expert-profile {path}"
    if path.is_dir():
        raise InputError(f"{where}: this is a folder; name a file")
    if not path.parent.is_dir():
        raise InputError(f"{where}: the folder {path.parent} does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{where}: nothing can be written to the folder {path.parent}; choose another one")


def _read(path: Path, model: Mapping[str, Any]) -> dict[int, LayerProfile]:
    where, again = f"--expert-profile {path}", "remove the file to begin a new one"
    record = read_json(path, where, again)
    if not isinstance(record, dict) or not isinstance(record.get("layers"), dict):
        raise InputError(f"{where}: not an expert profile; {again}")
    if record.get("version") != VERSION:
        raise InputError(f"{where}: has version {record.get('version')!r}, and this program reads {VERSION}; {again}")
    saved = record.get("model")
    if not isinstance(saved, dict) or saved.get("config") != model["config"]:
        raise InputError(f"{where}: was made with another model; name another file")
    layers = {}
    for name, fields in record["layers"].items():
        if not (name.isascii() and name.isdigit() and len(name) < 9):
            raise InputError(f"{where}: there is no layer {name!r}; {again}")
        layer = _layer(fields, model["experts"])
        if layer is None:
            raise InputError(
                f"{where}: layer {name}: expected counts of {model['experts']} experts and a list of residents; {again}"
            )
        layers[int(name)] = layer
    return layers


def _layer(fields: Any, experts: int) -> LayerProfile | None:
    """None where ``fields`` are not what save() writes."""
    if not isinstance(fields, dict):
        return None
    counts, resident = fields.get("counts"), fields.get("resident")
    if not isinstance(counts, list) or len(counts) != experts or not all(_is_int(count, 1 << 62) for count in counts):
        return None
    if not isinstance(resident, list) or not all(_is_int(expert, experts) for expert in resident):
        return None
    return LayerProfile(np.array(counts, np.int64), np.isin(np.arange(experts), resident))


def _is_int(value: Any, end: int) -> bool:
    return type(value) is int and 0 <= value < end
