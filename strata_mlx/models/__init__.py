"""Model families: one adapter file each, named after ``model_type``; the blocks are mlx-lm's."""

from __future__ import annotations

import importlib

from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from .family import Family

SUPPORTED = ("qwen3_next", "qwen3_5_moe", "qwen3_moe")


def find_family(checkpoint: Checkpoint) -> Family:
    """The adapter for the checkpoint's ``model_type``; raises CheckpointError naming those that are supported."""
    model_type = checkpoint.config.get("model_type")
    if model_type not in SUPPORTED:
        raise CheckpointError(
            f"{checkpoint.path / 'config.json'}: model_type {model_type!r} is not supported; supported are "
            f"{', '.join(SUPPORTED)}"
        )
    family: Family = importlib.import_module(f".{model_type}", __name__).FAMILY
    return family
