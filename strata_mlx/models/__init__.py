"""Model families: one adapter file each, named after ``model_type``; the blocks are mlx-lm's."""

from __future__ import annotations

import importlib
import pkgutil

from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from .family import Family


def find_family(checkpoint: Checkpoint) -> Family:
    """The adapter for the checkpoint's ``model_type``; raises CheckpointError naming those that are supported."""
    model_type = checkpoint.config.get("model_type")
    family = _family(model_type) if model_type in _modules() else None
    if family is None:
        raise CheckpointError(
            f"{checkpoint.path / 'config.json'}: model_type {model_type!r} is not supported; supported are "
            f"{', '.join(supported())}"
        )
    return family


def supported() -> list[str]:
    """Every ``model_type`` that has an adapter."""
    return [name for name in _modules() if _family(name)]


def _modules() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def _family(module: str) -> Family | None:
    """What the adapter in ``module`` says, if it is one."""
    return getattr(importlib.import_module(f".{module}", __name__), "FAMILY", None)
