"""What computes a selection on this device: the kernel on a GPU, MLX ops elsewhere."""

import warnings
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from strata_mlx import kernels
from strata_mlx.errors import StrataError
from strata_mlx.routing.ops import Executor, Selection, select_ops
from strata_mlx.routing.policy import RoutingPolicy

TOLERANCE = 2e-7  # that two executors' weights may differ by


def select_kernel(
    logits: mx.array,
    resident: mx.array | None,
    tables: NDArray[np.float32],
    draft_rows: mx.array,
    *,
    selection_bias: mx.array | None = None,
    build: kernels.Build | None = None,
    **options: Any,
) -> Selection:
    """``select_ops`` as one kernel launch. ``build`` is what builds the kernel; by default, for MLX's GPU backend."""
    bias = None if selection_bias is None else selection_bias.astype(mx.float32)
    ids, weights = kernels.route_select(
        logits,
        resident,
        None if resident is None else tables,
        None if resident is None else draft_rows,
        bias=bias,
        build=build,
        **options,
    )
    return ids, weights


def kernel_executor(build: kernels.Build) -> Executor:
    """The kernel, built by ``build``, as an executor."""
    return partial(select_kernel, build=build)


@cache
def default_executor() -> Executor:
    """The executor for this device. A kernel that does not agree with the op path here is not used, and that is
    said.
    """
    if not (mx.metal.is_available() or mx.cuda.is_available()) or mx.default_device() == mx.cpu:
        return select_ops
    try:
        difference = disagreement(select_kernel)
    except (RuntimeError, StrataError) as error:
        difference = f"it does not run: {error}"
    if difference:
        warnings.warn(f"the routing kernel is not used on this device: {difference}", RuntimeWarning, stacklevel=2)
        return select_ops
    return select_kernel


def disagreement(executor: Executor) -> str | None:
    """Where ``executor`` differs from the op path on a few rows, in words; None if it does not."""
    rng = np.random.default_rng(0)
    experts, top_k = 100, 8  # not a multiple of a simdgroup
    rows = rng.normal(0, 2, (6, experts)).astype(np.float32)
    rows[1] = np.round(rows[1])  # ties
    rows[2, ::7] = np.nan
    rows[3] = np.nan
    resident, drafts = mx.array(rng.random(experts) < 0.5), mx.array([False, True] * 3)
    tables = RoutingPolicy(0.85, 0.4, 3, True).tables(top_k)
    for name, given in (("without residency", None), ("with residency", resident)):
        with mx.stream(mx.cpu):
            ids, weights = (np.array(x) for x in select_ops(mx.array(rows), given, tables, drafts, top_k=top_k))
        got_ids, got_weights = (np.array(x) for x in executor(mx.array(rows), given, tables, drafts, top_k=top_k))
        if (got_ids != ids).any():
            return f"{name}, it selects other experts"
        if not (np.abs(got_weights - weights) <= TOLERANCE).all():
            return f"{name}, its weights are off by up to {np.abs(got_weights - weights).max():.1e}"
    return None
