"""A checkpoint folder: its configuration and where each of its tensors lies. Nothing but headers is read here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, Fault
from .safetensors import TensorEntry, read_header

INDEX = "model.safetensors.index.json"
MTP_FILE = "mtp.safetensors"  # apart from model*.safetensors, since mlx_lm refuses tensors it does not know there

_SAMPLES, _SAMPLE = 64, 4096  # how many, and the bytes of each


@dataclass(frozen=True)
class Checkpoint:
    """``config`` is config.json with the end-of-sequence ids of generation_config.json; ``tensors`` is by name."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read the configuration, the index and all headers of the folder ``path``.

        Raises CheckpointError for a missing or broken file, a tensor that the index and the shards do not agree on, or
        one that occurs twice.
        """
        config, generation = read_json(path / "config.json"), path / "generation_config.json"
        _check_token_ids(path / "config.json", config)
        if generation.exists():
            overriding = read_json(generation)
            _check_token_ids(generation, overriding)
            if overriding.get("eos_token_id") is not None:
                config["eos_token_id"] = overriding["eos_token_id"]
        tensors: dict[str, TensorEntry] = {}
        for file in _weight_files(path):
            for name, entry in read_header(file).items():
                if name in tensors:
                    raise CheckpointError(
                        f"{file}: tensor {name!r} is also in {tensors[name].file.name}; remove one of them"
                    )
                tensors[name] = entry
        if (path / INDEX).exists():
            _check_index(path, tensors)
        return cls(path, config, tensors)

    def alike(self, name: str, other: str) -> bool:
        """Whether two tensors look like copies of each other: of one type and shape, and equal in samples of their
        bytes. Raises Fault where these cannot be read.
        """
        one, two = self.tensors[name], self.tensors[other]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        step = max(one.nbytes // _SAMPLES, _SAMPLE)
        offsets = range(0, one.nbytes, step)
        return all(one.read(offset, _SAMPLE) == two.read(offset, _SAMPLE) for offset in offsets)

    def reader(self) -> TensorReader:
        return TensorReader(self.tensors)


class TensorReader:
    """Gives tensors as lazy MLX arrays. The data is read when an array is evaluated and freed with the array."""

    def __init__(self, tensors: dict[str, TensorEntry]):
        self._tensors = tensors
        self._open: dict[Path, dict[str, mx.array]] = {}

    def __call__(self, name: str) -> mx.array:
        file = self._tensors[name].file
        if file not in self._open:
            try:
                arrays = mx.load(str(file))
            except RuntimeError as error:
                raise Fault(f"{file}: cannot be loaded: {error}") from error
            assert isinstance(arrays, dict)
            self._open[file] = arrays
        return self._open[file][name]

    def release(self, names: Iterable[str]) -> None:
        """Forget tensors that are not needed again, so that their data can be freed."""
        for name in names:
            self._open.get(self._tensors[name].file, {}).pop(name, None)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint; raises CheckpointError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; {path.parent} does not hold a complete model") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download or convert it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__} where an object is expected")
    return value


def _check_token_ids(file: Path, config: dict[str, Any]) -> None:
    ids = config.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise CheckpointError(f"{file}: 'eos_token_id' must be a token id or a list of them")


def _weight_files(path: Path) -> list[Path]:
    """The shards that the index names, or all ``model*.safetensors`` without one; then the MTP file, if there is
    one.
    """
    if (path / INDEX).exists():
        shards = sorted({path / name for name in _weight_map(path).values()})
        for shard in shards:
            if not shard.exists():
                raise CheckpointError(f"{shard}: missing, though {INDEX} names it; download or convert the model again")
    else:
        shards = sorted(path.glob("model*.safetensors"))
        if not shards:
            raise CheckpointError(f"{path}: no model*.safetensors file; is this the folder of a model?")
    mtp = path / MTP_FILE
    return [*shards, mtp] if mtp.exists() and mtp not in shards else shards


def _weight_map(path: Path) -> dict[str, str]:
    names = read_json(path / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(
        isinstance(file, str) and Path(file).name == file not in ("", "..") for file in names.values()
    ):
        raise CheckpointError(f"{path / INDEX}: 'weight_map' must map tensor names to file names in the same folder")
    return names


def _check_index(path: Path, tensors: dict[str, TensorEntry]) -> None:
    for name, file in _weight_map(path).items():
        if name not in tensors or tensors[name].file.name != file:
            raise CheckpointError(f"{path / file}: tensor {name!r} is missing, though {INDEX} places it there")
