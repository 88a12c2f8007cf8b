"""What an adapter says about its family: how to build the model and under which names its tensors are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from ..checkpoint import Recipe
from ..errors import CheckpointError

EXPERT_PARAMETER = re.compile(r"(?P<moe>.+)\.switch_mlp\.(?P<projection>\w+_proj)\.(?P<kind>\w+)")


@dataclass(frozen=True)
class Family:
    """One model architecture.

    model_type: as in config.json. build: makes the model from the text configuration and a number of MTP layers.
    shifted_norms: the Hugging Face layout stores RMSNorm weights around zero.
    names: maps a parameter's name to those that known layouts store it under, ours first.
    ignored: prefixes of tensors that text generation does not need.
    """

    model_type: str
    build: Callable[[dict[str, Any], int], nn.Module]
    shifted_norms: bool = False
    names: Callable[[str], tuple[str, ...]] = lambda name: (name,)
    ignored: tuple[str, ...] = ()

    def text_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The part of config.json that describes the language model (a copy)."""
        return deepcopy(config.get("text_config", config))

    def recipe(
        self, parameter: str, module: nn.Module, present: Container[str], experts: int, from_torch: bool
    ) -> Recipe:
        """How to make ``parameter`` of ``module`` from the tensors that are ``present``.

        from_torch: the tensors follow the Hugging Face layout. Raises KeyError with the name of the missing tensor.
        """
        candidates = self.names(parameter)
        for name in candidates:
            if name in present:
                shift = from_torch and self.shifted_norms and isinstance(module, nn.RMSNorm)
                return Recipe((name,), swap=from_torch and isinstance(module, nn.Conv1d), shift=shift)
        if match := EXPERT_PARAMETER.fullmatch(parameter):
            for moe in self.names(match["moe"]):
                if recipe := _expert_recipe(moe, match["projection"], match["kind"], present, experts):
                    return recipe
        raise KeyError(candidates[0])


def _expert_recipe(moe: str, projection: str, kind: str, present: Container[str], experts: int) -> Recipe | None:
    """Separate experts (``experts.N.gate_proj.weight``) or fused ones (``experts.gate_up_proj``), if they are there."""
    if f"{moe}.experts.0.{projection}.{kind}" in present:
        separate = tuple(f"{moe}.experts.{e}.{projection}.{kind}" for e in range(experts))
        if missing := next((name for name in separate if name not in present), None):
            raise KeyError(missing)
        return Recipe(separate)
    half = {"gate_proj": 0, "up_proj": 1}.get(projection)
    fused = f"{moe}.experts.{projection if half is None else 'gate_up_proj'}"
    return Recipe((fused,), half=half) if kind == "weight" and fused in present else None


def require_experts(args: Any) -> None:
    """Raise CheckpointError unless the configuration routes each token to between 1 and all of its experts."""
    experts, top_k = args.num_experts, args.num_experts_per_tok
    if experts < 1:
        raise CheckpointError(f"num_experts is {experts}: this is not a mixture-of-experts model; run it with mlx_lm")
    if not 1 <= top_k <= experts:
        raise CheckpointError(f"num_experts_per_tok is {top_k}, which must lie between 1 and num_experts = {experts}")
