"""Bring a checkpoint and its family together: the model's skeleton and a validated recipe for every parameter.

Nothing but headers has been read when a plan stands, and everything that can be wrong with names, shapes, dtypes and
quantisation has been found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoint import Checkpoint, Recipe, TensorEntry
from ..checkpoint.pack import PADDING
from ..checkpoint.precision import AFFINE_BITS, AFFINE_GROUP_SIZES, DEFAULTS
from ..checkpoint.safetensors import FLOATING
from ..errors import CheckpointError, in_one_line
from .family import Family, text_args

_TRUNK_LAYER = re.compile(r"(?:model\.|language_model\.)+layers\.(\d+)\.")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")
# Modes with one-byte scales, by (group size, bits); each allows exactly one pair.
_BYTE_SCALE_MODES = {precision: mode for mode, precision in DEFAULTS.items() if mode != "affine"}


@dataclass(frozen=True)
class ModelPlan:
    """model: the skeleton, whose random parameters were never computed. recipes: by parameter name, in tree order."""

    checkpoint: Checkpoint
    family: Family
    model: nn.Module
    recipes: dict[str, Recipe]
    mtp_layers: int

    @property
    def args(self) -> Any:
        """The language model's configuration, as mlx-lm's ModelArgs."""
        return text_args(self.model)

    def groups(self) -> dict[str, list[str]]:
        """The parameters by the part that is loaded or converted at a time: ``shared``, ``layers.N`` and ``mtp``."""
        groups: dict[str, list[str]] = {}
        for parameter in self.recipes:
            groups.setdefault(group_of(parameter), []).append(parameter)
        return groups

    def source_bytes(self, parameter: str) -> int:
        recipe = self.recipes[parameter]
        total = sum(self.checkpoint.tensors[name].nbytes for name in recipe.sources)
        return total if recipe.half is None else total // 2


def group_of(parameter: str) -> str:
    """``mtp``, ``layers.N`` or, for embedding, final norm and output head, ``shared``."""
    if parameter.startswith("mtp."):
        return "mtp"
    match = re.search(r"layers\.\d+(?=\.)", parameter)
    return match[0] if match else "shared"


def plan_model(checkpoint: Checkpoint, mtp: bool = True) -> ModelPlan:
    """Plan the model in ``checkpoint``, without its MTP head if ``mtp`` is false.

    Raises CheckpointError that names the file and tensor for whatever does not fit the model.
    """
    from . import find_family  # the registry imports the adapters, which import what this module builds on

    family = find_family(checkpoint)
    names = {_own_name(name): name for name in checkpoint.tensors}
    mtp_layers = len({match[1] for name in names if (match := _MTP_LAYER.match(name))})
    model = _build(checkpoint, family, mtp_layers if mtp else 0)
    planner = _Planner(checkpoint, family, model, names)
    recipes = planner.recipes()
    planner.check_surplus(recipes, mtp)
    return ModelPlan(checkpoint, family, model, recipes, mtp_layers)


def _own_name(stored: str) -> str:
    """Some conversions of Qwen3.5 keep the head inside the language model."""
    return re.sub(r"^language_model\.mtp\.", "mtp.", stored)


def _build(checkpoint: Checkpoint, family: Family, mtp_layers: int) -> nn.Module:
    where = checkpoint.path / "config.json"
    config = family.text_config(checkpoint.config)
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: 'text_config' must be an object")
    stored = len({match[1] for name in checkpoint.tensors if (match := _TRUNK_LAYER.match(name))})
    if isinstance(layers := config.get("num_hidden_layers"), int) and layers > stored:
        raise CheckpointError(f"{where}: num_hidden_layers is {layers}, but {checkpoint.path} holds {stored} layers")
    try:
        return family.build(config, mtp_layers)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except Exception as error:  # mlx-lm checks little, so a value can make anything fail
        reason = in_one_line(error).replace("ModelArgs.__init__() missing", "missing")
        reason = reason.replace("required positional argument", "field")
        raise CheckpointError(f"{where}: does not describe a {family.model_type} model: {reason}") from error


class _Planner:
    def __init__(self, checkpoint: Checkpoint, family: Family, model: nn.Module, names: dict[str, str]):
        self.checkpoint, self.family, self.model, self.names = checkpoint, family, model, names
        args = text_args(model)
        self.experts: int = args.num_experts
        self.tied: bool = args.tie_word_embeddings
        # The trunk and the MTP head may follow different layouts: heads are often added to converted checkpoints.
        self.from_torch = {
            is_mtp: any(".mlp.experts." in name for name in names if name.startswith("mtp.") is is_mtp)
            for is_mtp in (False, True)
        }

    def recipes(self) -> dict[str, Recipe]:
        _quantise(self.model, self.checkpoint, self._entry_of)
        modules = dict(self.model.named_modules())
        result = {}
        for parameter, array in tree_flatten(self.model.parameters()):
            recipe = self._recipe(parameter, modules[parameter.rpartition(".")[0]])
            self._check(parameter, recipe, array)
            result[parameter] = recipe
        return result

    def _recipe(self, parameter: str, module: nn.Module) -> Recipe:
        try:
            found = self.family.recipe(
                parameter, module, self.names, self.experts, self.from_torch[parameter.startswith("mtp.")]
            )
        except KeyError as error:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {error.args[0]!r} is missing; download or convert the model again"
            ) from None
        return Recipe(tuple(self.names[name] for name in found.sources), found.half, found.swap, found.shift)

    def _entry_of(self, parameter: str, module: nn.Module) -> TensorEntry | None:
        try:
            recipe = self.family.recipe(parameter, module, self.names, self.experts, from_torch=False)
        except KeyError:
            return None
        return self.checkpoint.tensors[self.names[recipe.sources[0]]]

    def _check(self, parameter: str, recipe: Recipe, array: mx.array) -> None:
        entries = [self.checkpoint.tensors[name] for name in recipe.sources]
        packed, byte_scales = array.dtype == mx.uint32, array.dtype == mx.uint8
        allowed = {"U32"} if packed else {"U8"} if byte_scales else FLOATING
        for entry in entries:
            if entry.dtype not in allowed:
                raise CheckpointError(
                    f"{entry.file}: tensor {entry.name!r} has dtype {entry.dtype}, expected "
                    f"{' or '.join(sorted(allowed))}"
                )
        try:
            shape = recipe.shape([entry.shape for entry in entries])
        except ValueError as error:
            raise CheckpointError(
                f"{entries[0].file}: tensor {entries[0].name!r} {list(entries[0].shape)}: {error}"
            ) from None
        if shape != array.shape:
            many = f" to {entries[-1].name!r}" if len(entries) > 1 else ""
            raise CheckpointError(
                f"{entries[0].file}: tensor {entries[0].name!r}{many} {list(entries[0].shape)} gives {parameter} the "
                f"shape "
                f"{list(shape)}, but the configuration asks for {list(array.shape)}"
            )

    def check_surplus(self, recipes: dict[str, Recipe], mtp: bool) -> None:
        used = {name for recipe in recipes.values() for name in recipe.sources}
        ignored = (PADDING, *self.family.ignored, *(() if mtp else ("mtp.",)))
        for stored, entry in self.checkpoint.tensors.items():
            name = _own_name(stored)
            head = self.tied and name.endswith("lm_head.weight")
            if stored not in used and not (name.startswith(ignored) or head or name.endswith("rotary_emb.inv_freq")):
                raise CheckpointError(
                    f"{entry.file}: tensor {stored!r} has no place in a {self.family.model_type} model of this "
                    f"configuration"
                )


def _quantise(model: nn.Module, checkpoint: Checkpoint, entry_of: Any) -> None:
    """Turn the modules whose scales are stored into quantised ones, with the parameters that the stored shapes
    imply.
    """
    places = (checkpoint.config, checkpoint.config.get("text_config", {}))
    found = (place.get(key) for place in places for key in ("quantization", "quantization_config"))
    config: Any = next(filter(None, found), {})
    where = checkpoint.path / "config.json"
    if not isinstance(config, dict):
        raise CheckpointError(f"{where}: 'quantization' must be an object")
    if "quant_method" in config:
        raise CheckpointError(
            f"{where}: weights quantised by {config['quant_method']!r} are not supported; use the bfloat16 original "
            f"or an MLX "
            "conversion"
        )

    def parameters(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        weight, scales = entry_of(f"{path}.weight", module), entry_of(f"{path}.scales", module)
        if weight is None or scales is None:
            return False
        inputs = module.weight.shape[-1]
        columns, groups = (entry.shape[-1] if entry.shape else 0 for entry in (weight, scales))
        group_size, bits = inputs // max(groups, 1), columns * 32 // max(inputs, 1)
        mode = "affine" if scales.dtype in FLOATING else _BYTE_SCALE_MODES.get((group_size, bits))
        fits = groups * group_size == inputs and columns * 32 == bits * inputs
        if (
            not fits
            or mode is None
            or (mode == "affine" and (bits not in AFFINE_BITS or group_size not in AFFINE_GROUP_SIZES))
        ):
            raise CheckpointError(
                f"{weight.file}: the quantisation of {path} does not divide its {inputs} inputs: weight "
                f"{list(weight.shape)}, "
                f"scales {list(scales.shape)} {scales.dtype}"
            )
        return {"group_size": group_size, "bits": bits, "mode": mode}

    nn.quantize(model, class_predicate=parameters)
