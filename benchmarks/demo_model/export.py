"""Write a trained model in the Hugging Face layout, and read such a folder back exactly."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from strata_mlx.errors import CheckpointError, Fault, InputError

from .config import Config
from .layout import (
    INDEX,
    index,
    json_files,
    plan_shards,
    read_config,
    read_weight_map,
    write_json,
)
from .model import Model

GATE_UP = "experts_gate_up"
DOWN = "experts_down"


def to_checkpoint(state: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The checkpoint's tensors: experts apart, as [outputs, inputs]; bfloat16, but ``A_log`` float32."""
    tensors = {}
    inner = config.moe_intermediate_size
    for name, value in state.items():
        prefix, _, last = name.rpartition(".")
        if last == GATE_UP:  # [E, D, 2F]
            for expert, matrix in enumerate(value):
                tensors[f"{prefix}.experts.{expert}.gate_proj.weight"] = matrix[:, :inner].T
                tensors[f"{prefix}.experts.{expert}.up_proj.weight"] = matrix[:, inner:].T
        elif last == DOWN:  # [E, F, D]
            for expert, matrix in enumerate(value):
                tensors[f"{prefix}.experts.{expert}.down_proj.weight"] = matrix.T
        else:
            tensors[name] = value
    return {
        name: value.to(torch.float32 if name.endswith("A_log") else torch.bfloat16).contiguous()
        for name, value in tensors.items()
    }


def from_checkpoint(tensors: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The inverse of ``to_checkpoint``: the state of a Model, in float32."""
    state = {}
    for name, value in tensors.items():
        prefix, found, rest = name.partition(".experts.")
        if not found:
            state[name] = value.float()
        elif rest == "0.down_proj.weight":
            paths = [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)]
            gate = torch.stack([tensors[f"{path}.gate_proj.weight"].T for path in paths])
            up = torch.stack([tensors[f"{path}.up_proj.weight"].T for path in paths])
            down = torch.stack([tensors[f"{path}.down_proj.weight"].T for path in paths])
            state[f"{prefix}.{GATE_UP}"] = torch.cat([gate, up], -1).float()
            state[f"{prefix}.{DOWN}"] = down.float()
    return state


def export(model: Model, tokenizer: Path, folder: Path) -> list[str]:
    """Write the model and a copy of its tokenizer into a new folder; returns the names of its files.

    The folder appears only when it is complete. Raises InputError if it exists or the tokenizer does not.
    """
    if folder.exists():
        raise InputError(f"{folder} exists already: delete it, or name another folder")
    if not tokenizer.is_file():
        raise InputError(f"{tokenizer} does not exist: name the folder that `prepare` wrote")
    tensors = to_checkpoint(model.state_dict(), model.config)
    sizes = {name: value.numel() * value.element_size() for name, value in tensors.items()}
    shards = plan_shards(sizes)

    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file, names in shards.items():
        try:
            save_file({name: tensors[name] for name in names}, partial / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise Fault(f"cannot write {partial / file}: {error}") from error
    write_json(partial / INDEX, index(sizes, shards))
    for file, contents in json_files(model.config).items():
        write_json(partial / file, contents)
    shutil.copyfile(tokenizer, partial / "tokenizer.json")
    partial.rename(folder)
    return sorted(path.name for path in folder.iterdir())


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor that the index names, as stored."""
    weight_map = read_weight_map(folder)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        try:
            tensors |= load_file(folder / file)
        except FileNotFoundError:
            raise CheckpointError(f"{folder / file} does not exist, but the index names it") from None
        except SafetensorError as error:
            raise CheckpointError(f"{folder / file} is broken: {error}") from error
    return tensors


def load(folder: Path) -> Model:
    """Read a folder that `export` wrote, in float32; raises CheckpointError where it is anything else."""
    config = read_config(folder)
    tensors = _read_tensors(folder)
    model = Model(config)
    expected = to_checkpoint(model.state_dict(), config)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise CheckpointError(f"{folder} lacks {len(missing)} tensors, among them {missing[0]}")
    if surplus := sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(f"{folder} has {len(surplus)} tensors too many, among them {surplus[0]}")
    for name, value in expected.items():
        if tensors[name].shape != value.shape:
            wanted, found = list(value.shape), list(tensors[name].shape)
            raise CheckpointError(f"{folder}: {name} has the shape {found}, not {wanted} as in config.json")
    model.load_state_dict(from_checkpoint(tensors, config))
    return model
