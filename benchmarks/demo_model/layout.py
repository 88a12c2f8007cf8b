"""The Hugging Face layout on disk: which tensor goes into which shard, and the JSON files beside them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata_mlx.errors import CheckpointError, InputError

from .config import SPECIAL_TOKENS, Config

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 15_000_000


def plan_shards(sizes: Mapping[str, int], limit: int = SHARD_BYTES) -> dict[str, list[str]]:
    """Distribute tensors (bytes by name) over shards of at most ``limit`` bytes: file name -> tensor names.

    Tensors are taken in the order of their names; one that is larger than the limit has a shard of its own.
    """
    if limit <= 0:
        raise InputError(f"a shard must hold at least one byte, not {limit}")
    shards: list[list[str]] = []
    used = 0
    for name in sorted(sizes):
        if not shards or used + sizes[name] > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += sizes[name]
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}


def index(sizes: Mapping[str, int], shards: Mapping[str, list[str]]) -> dict[str, Any]:
    """The contents of ``model.safetensors.index.json``."""
    weight_map = {name: file for file, names in shards.items() for name in names}
    return {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}


def json_files(config: Config) -> dict[str, dict[str, Any]]:
    """The JSON files that depend on the configuration alone: file name -> contents."""
    end = SPECIAL_TOKENS[0]
    hf = config.to_hf()
    return {
        "config.json": hf,
        "generation_config.json": {"eos_token_id": config.eos_token_id, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "pad_token": end,
            "model_max_length": hf["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
        },
    }


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=1), encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint folder; raises CheckpointError if it is missing or no JSON object."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: name a folder written by `export`") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(contents).__name__}")
    return contents


def read_config(folder: Path) -> Config:
    return Config.from_hf(read_json(folder / "config.json"))


def read_weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> shard file name, from the index; a name never points outside the folder."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX}: {name} points to {file!r}, which is no file name")
    return weight_map
