"""What an adapter says about its family: how to build the model and under which names its tensors are stored."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Container
from copy import deepcopy
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import mlx.nn as nn

from ..checkpoint import Recipe
from ..errors import CheckpointError

# What a configuration may hold for a type that mlx-lm declares. MLX counts elements along an axis in 32 bits.
_VALUES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number from 0 to 2^31 - 1", lambda value: type(value) is int and 0 <= value < 2**31),
    float: ("a positive float32", lambda value: type(value) in (int, float) and 1e-38 < value < 3e38),
    str: ("a text", lambda value: isinstance(value, str)),
    list: ("a list of whole numbers", lambda value: isinstance(value, list) and all(type(n) is int for n in value)),
    dict: ("an object", lambda value: isinstance(value, dict)),
    NoneType: ("null", lambda value: value is None),
}
EXPERT_PARAMETER = re.compile(r"(?P<moe>.+)\.switch_mlp\.(?P<projection>\w+_proj)\.(?P<kind>\w+)")


@dataclass(frozen=True)
class Family:
    """One model architecture.

    model_type: as in config.json. build: makes the model from the text configuration and a number of MTP layers.
    shifted_norms: the Hugging Face layout stores RMSNorm weights around zero.
    names: maps a parameter's name to those that known layouts store it under, ours first.
    own_name: maps a stored name, given the text configuration, to ours where a layout numbers or names an MTP head's
    layers otherwise.
    derived: how to make a parameter that has no tensor of its own, given the stored names and mlx-lm's ModelArgs.
    cached: given ModelArgs and an attention layer, how many elements of its cache a token takes.
    ignored: prefixes of tensors that text generation does not need.
    """

    model_type: str
    build: Callable[[dict[str, Any], int], nn.Module]
    shifted_norms: bool = False
    names: Callable[[str], tuple[str, ...]] = lambda name: (name,)
    own_name: Callable[[str, dict[str, Any]], str] = lambda name, _: name
    derived: Callable[[str, Container[str], Any], Recipe | None] = lambda *_: None
    cached: Callable[[Any, nn.Module], int] = lambda args, _: 2 * args.num_key_value_heads * args.head_dim
    ignored: tuple[str, ...] = ()

    def text_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The part of config.json that describes the language model (a copy)."""
        return deepcopy(config.get("text_config", config))

    def recipe(self, parameter: str, module: nn.Module, present: Container[str], args: Any, from_torch: bool) -> Recipe:
        """How to make ``parameter`` of ``module`` from the tensors that are ``present``. args: mlx-lm's ModelArgs.

        from_torch: the tensors follow the Hugging Face layout. Raises KeyError with the name of the missing tensor.
        """
        candidates = self.names(parameter)
        for name in candidates:
            if name in present:
                shift = from_torch and self.shifted_norms and isinstance(module, nn.RMSNorm)
                return Recipe((name,), swap=from_torch and isinstance(module, nn.Conv1d), shift=shift)
        if match := EXPERT_PARAMETER.fullmatch(parameter):
            for moe in self.names(match["moe"]):
                if recipe := _expert_recipe(moe, match["projection"], match["kind"], present, args.num_experts):
                    return recipe
        if recipe := self.derived(parameter, present, args):
            return recipe
        raise KeyError(candidates[0])


def _expert_recipe(moe: str, projection: str, kind: str, present: Container[str], experts: int) -> Recipe | None:
    """Separate experts (``experts.N.gate_proj.weight``, packed ``switch_mlp.N.gate_proj.weight``) or fused ones
    (``experts.gate_up_proj``), if they are there.
    """
    for parent in ("experts", "switch_mlp"):
        if f"{moe}.{parent}.0.{projection}.{kind}" in present:
            separate = []
            for expert in range(experts):
                separate.append(f"{moe}.{parent}.{expert}.{projection}.{kind}")
                if separate[-1] not in present:
                    raise KeyError(separate[-1])
            return Recipe(tuple(separate))
    half = {"gate_proj": 0, "up_proj": 1}.get(projection)
    fused = f"{moe}.experts.{projection if half is None else 'gate_up_proj'}"
    return Recipe((fused,), half=half) if kind == "weight" and fused in present else None


def builder(args_type: Any, model_type: Any) -> Callable[[dict[str, Any], int], nn.Module]:
    """The ``build`` of a family whose model takes its checked arguments, a number of MTP layers and ``mtp_hidden``."""

    def build(config: dict[str, Any], mtp_layers: int) -> nn.Module:
        args = args_type.from_dict(config)
        check_args(args)
        model: nn.Module = model_type(args, mtp_layers, config.get("mtp_hidden", "after"))
        return model

    return build


def check_args(args: Any) -> None:
    """Raise CheckpointError unless every value of ``args``, mlx-lm's dataclass, is of the type that it declares and the
    values go together.
    """
    for name, declared in get_type_hints(type(args)).items():
        if name == "attention_dropout":  # for training
            continue
        value = getattr(args, name)
        alternatives = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
        described, allowed = zip(*(_VALUES[get_origin(kind) or kind] for kind in alternatives), strict=True)
        if not any(allows(value) for allows in allowed):
            raise CheckpointError(f"{name} is {reprlib.repr(value)}, expected {' or '.join(described)}")
    if getattr(args, "partial_rotary_factor", 1) > 1:
        raise CheckpointError(f"partial_rotary_factor is {args.partial_rotary_factor}, expected at most 1")
    name = "n_routed_experts" if hasattr(args, "n_routed_experts") else "num_experts"
    experts, top_k = args.num_experts or 0, args.num_experts_per_tok
    if experts < 1:
        raise CheckpointError(
            f"{name} is {args.num_experts}: this is not a mixture-of-experts model; run it with mlx_lm"
        )
    if not 1 <= top_k <= experts:
        raise CheckpointError(f"num_experts_per_tok is {top_k}, which must lie between 1 and {name} = {experts}")


def text_args(model: nn.Module) -> Any:
    """The configuration of a model, or of the language model inside it."""
    return getattr(model, "language_model", model).args
