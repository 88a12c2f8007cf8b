"""Models that several benchmarks compute with."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from strata_mlx.checkpoint import Checkpoint
from strata_mlx.checkpoint.convert import Conversion, convert
from strata_mlx.hub import EMBEDDED
from strata_mlx.models.plan import plan_model


def embedded_as_float32(folder: Path) -> Path:
    """Write the embedded model, dequantised to float32, into the new ``folder`` and return it."""
    plan = plan_model(Checkpoint.open(EMBEDDED))
    return convert(Conversion(plan, None, dequantise=True, dtype=mx.float32), folder, progress=False)
