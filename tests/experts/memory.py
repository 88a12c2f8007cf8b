"""Memory for experts, and the experts as plain loading has them."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from strata_mlx.checkpoint import Checkpoint
from strata_mlx.experts import ExpertStore
from strata_mlx.experts.casts import HOST_TYPES
from strata_mlx.models.plan import ModelPlan, plan_model


def plan(folder: Path) -> ModelPlan:
    return plan_model(Checkpoint.open(folder))


def make_room(store: ExpertStore, layer: int) -> list[NDArray[Any]]:
    """Arrays for one expert, full of nonsense."""
    return [np.full(field.shape, 77, HOST_TYPES[field.dtype]) for field in store.fields(layer)]


def bits(array: mx.array) -> NDArray[Any]:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def loaded(plan: ModelPlan, cast: mx.Dtype | None) -> dict[str, NDArray[Any]]:
    """All expert parameters ``[E, ...]`` by name, as loading makes them."""
    read = plan.checkpoint.reader()
    names = [name for name, _ in tree_flatten(plan.model.parameters()) if ".switch_mlp." in name]
    return {name: bits(plan.recipes[name].build(read, cast)) for name in names}


def equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Bit for bit."""
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def expert_of(store: ExpertStore, layer: int, expert: int, parameters: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
    return [parameters[f"{store.layers[layer]}.switch_mlp.{field.name}"][expert] for field in store.fields(layer)]
