"""Models that several benchmarks compute with."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from strata_mlx.checkpoint import Checkpoint
from strata_mlx.checkpoint.convert import Conversion, convert
from strata_mlx.device import on_cpu
from strata_mlx.hub import EMBEDDED
from strata_mlx.models.plan import plan_model


def embedded_as_float32(folder: Path) -> Path:
    """Write the embedded model, dequantised to float32, into the new ``folder`` and return it."""
    plan = plan_model(Checkpoint.open(EMBEDDED))
    return convert(Conversion(plan, None, dequantise=True, dtype=mx.float32), folder, progress=False)


def embedded_with_float32_scales(folder: Path) -> Path:
    """Write the embedded model's trunk into the new ``folder`` and return it: experts in 4 bits, linear layers in 8,
    their scales and everything else in float32.

    The codes are the embedded ones, so nothing is quantised anew. MLX's CPU backend multiplies with bfloat16 scales
    several times slower.
    """
    plan = plan_model(Checkpoint.open(EMBEDDED), mtp=False)
    return convert(Conversion(plan, None, dtype=mx.float32), folder, progress=False)


def packed(model: Path, folder: Path, mtp: bool = False) -> Path:
    """Write ``model``, its MTP head if ``mtp``, into the new ``folder``, one record per expert, and return it."""
    return convert(Conversion(plan_model(Checkpoint.open(model), mtp=mtp), pack=True), folder, progress=False)


def for_mlx_lm(model: str | None, folder: Path) -> str | Path:
    """``model``, or the embedded model as mlx_lm is fastest with it here: on a CPU, a copy in the new ``folder``."""
    return model or (embedded_with_float32_scales(folder) if on_cpu() else EMBEDDED)
