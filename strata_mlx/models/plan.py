"""Bring a checkpoint and its family together: the model's skeleton and a validated recipe for every parameter.

Nothing but headers has been read when a plan stands, and samples of what an MTP layer may have copied; everything that
can be wrong with names, shapes, dtypes and quantisation has been found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache

from ..checkpoint import Checkpoint, Recipe, TensorEntry
from ..checkpoint.pack import PADDING
from ..checkpoint.precision import AFFINE_BITS, AFFINE_GROUP_SIZES, DEFAULTS
from ..checkpoint.safetensors import FLOATING
from ..errors import CheckpointError, in_one_line
from .family import Family, text_args
from .mtp import OWN_PARTS, NextTokenLayers

_TRUNK_LAYER = re.compile(r"(?:model\.|language_model\.)+layers\.(\d+)\.")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")
# Modes with one-byte scales, by (group size, bits); each allows exactly one pair.
_BYTE_SCALE_MODES = {precision: mode for mode, precision in DEFAULTS.items() if mode != "affine"}


class KeysAndValues(NamedTuple):
    """The cache of an attention layer: elements that a token takes, and how many tokens a sliding window has."""

    elements: int
    window: int | None

    def size(self, tokens: int) -> int:
        """Elements for so many tokens."""
        return self.elements * (tokens if self.window is None else min(tokens, self.window))


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

    def attention(self, head: bool = False) -> list[KeysAndValues]:
        """What each attention layer caches: of the trunk, or of the MTP head."""
        model = self.model.get("mtp") if head else self.model
        if model is None:
            return []
        made = model.make_cache() if hasattr(model, "make_cache") else [None] * len(model.layers)
        return [
            KeysAndValues(self.family.cached(self.args, layer), getattr(cache, "max_size", None))
            for layer, cache in zip(model.layers, made, strict=True)
            if not isinstance(cache, ArraysCache)
        ]

    def source_bytes(self, parameter: str) -> int:
        recipe = self.recipes[parameter]
        entries = [self.checkpoint.tensors[name] for name in recipe.sources]
        return int(sum(entry.nbytes for entry in entries) * recipe.share([entry.shape for entry in entries]))


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
    config = _text_config(checkpoint, family)
    own_names = {name: _own_name(name, family, config) for name in checkpoint.tensors}
    names = {own: stored for stored, own in own_names.items()}
    mtp_layers = len({match[1] for name in names if (match := _MTP_LAYER.match(name))})
    _check_layers(checkpoint, config, names, mtp_layers)
    model = _build(checkpoint, family, config, mtp_layers if mtp else 0)
    copies = _give_own_parts(checkpoint, model, names)
    planner = _Planner(checkpoint, family, model, names)
    recipes = planner.recipes()
    planner.check_surplus(recipes, own_names, copies if mtp else ("mtp.",))
    return ModelPlan(checkpoint, family, model, recipes, mtp_layers)


def _text_config(checkpoint: Checkpoint, family: Family) -> dict[str, Any]:
    config = family.text_config(checkpoint.config)
    if not isinstance(config, dict):
        raise CheckpointError(f"{checkpoint.path / 'config.json'}: 'text_config' must be an object")
    return config


def _own_name(stored: str, family: Family, config: dict[str, Any]) -> str:
    """Some conversions of Qwen3.5 keep the head inside the language model."""
    return family.own_name(re.sub(r"^language_model\.mtp\.", "mtp.", stored), config)


def _check_layers(checkpoint: Checkpoint, config: dict[str, Any], names: Iterable[str], mtp_layers: int) -> None:
    where = checkpoint.path / "config.json"
    stored = len({match[1] for name in names if (match := _TRUNK_LAYER.match(name))})
    if isinstance(layers := config.get("num_hidden_layers"), int) and layers > stored:
        raise CheckpointError(f"{where}: num_hidden_layers is {layers}, but {checkpoint.path} holds {stored} layers")
    said = config.get("num_nextn_predict_layers", mtp_layers)
    if mtp_layers and said != mtp_layers:  # most conversions leave the head out, all of it
        raise CheckpointError(
            f"{where}: num_nextn_predict_layers is {said!r}, but {checkpoint.path} holds {mtp_layers} MTP layers"
        )


def _build(checkpoint: Checkpoint, family: Family, config: dict[str, Any], mtp_layers: int) -> nn.Module:
    where = checkpoint.path / "config.json"
    try:
        model = family.build(config, mtp_layers)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except Exception as error:  # mlx-lm checks little, so a value can make anything fail
        reason = in_one_line(error).replace("ModelArgs.__init__() missing", "missing")
        reason = reason.replace("required positional argument", "field")
        raise CheckpointError(f"{where}: does not describe a {family.model_type} model: {reason}") from error
    if not any("switch_mlp" in module for _, module in model.named_modules()):
        raise CheckpointError(f"{where}: none of the layers has experts; run this model with mlx_lm")
    return model


def _give_own_parts(checkpoint: Checkpoint, model: nn.Module, names: dict[str, str]) -> tuple[str, ...]:
    """Let the MTP layers have the embeddings and output heads that are stored for them, unless these are copies of the
    trunk's. Returns prefixes of the copies' names.
    """
    head, copies = model.get("mtp"), []
    for layer in range(head.heads if isinstance(head, NextTokenLayers) else 0):
        for part, original in OWN_PARTS.items():
            stored, trunks = names.get(f"mtp.layers.{layer}.{part}.weight"), names.get(f"{original}.weight")
            if stored is None:
                continue
            if trunks is not None and checkpoint.alike(stored, trunks):
                copies.append(f"mtp.layers.{layer}.{part}.")
            else:
                head.give_own(layer, part, text_args(model).vocab_size)
    return tuple(copies)


class _Planner:
    def __init__(self, checkpoint: Checkpoint, family: Family, model: nn.Module, names: dict[str, str]):
        self.checkpoint, self.family, self.model, self.names = checkpoint, family, model, names
        self.args = text_args(model)
        self.tied: bool = self.args.tie_word_embeddings
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
                parameter, module, self.names, self.args, self.from_torch[parameter.startswith("mtp.")]
            )
        except KeyError as error:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {error.args[0]!r} is missing; download or convert the model again"
            ) from None
        return replace(found, sources=tuple(self.names[name] for name in found.sources))

    def _entry_of(self, parameter: str, module: nn.Module) -> TensorEntry | None:
        try:
            recipe = self.family.recipe(parameter, module, self.names, self.args, from_torch=False)
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

    def check_surplus(self, recipes: dict[str, Recipe], own_names: dict[str, str], ignored: tuple[str, ...]) -> None:
        used = {name for recipe in recipes.values() for name in recipe.sources}
        ignored = (PADDING, *self.family.ignored, *ignored)
        for stored, entry in self.checkpoint.tensors.items():
            name = own_names[stored]
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
