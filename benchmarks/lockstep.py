"""Many documents through a model at once, a token of each at a time, on a CPU.

MLX's matrix products on the CPU take a time that is linear in the rows, so that a batch gains nothing. Here NumPy's
BLAS multiplies instead; everything else is the model's own. The logits are the same within rounding. Where the cores
are busy with other work, OPENBLAS_NUM_THREADS=1 is several times faster.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU
from numpy.typing import NDArray


class _Linear(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self._product = np.ascontiguousarray(np.array(linear.weight).T)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.array(np.array(x, copy=False) @ self._product)


class _Experts(nn.Module):
    """The experts of a layer, one after the other, each on the rows that selected it."""

    def __init__(self, experts: SwitchGLU):
        super().__init__()
        self.experts = len(experts.gate_proj.weight)
        gate, up, down = (np.array(experts[f"{name}_proj"].weight) for name in ("gate", "up", "down"))
        self._gate_up = np.ascontiguousarray(np.concatenate([gate, up], axis=1).swapaxes(1, 2))
        self._down = np.ascontiguousarray(down.swapaxes(1, 2))

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        rows = np.array(x, copy=False).reshape(-1, x.shape[-1])
        picked = np.array(ids, np.int64).ravel()
        order = np.argsort(picked, kind="stable")
        sorted_rows = rows[order // ids.shape[-1]]
        hidden = np.empty((picked.size, self._gate_up.shape[-1]), np.float32)
        result = np.empty((picked.size, rows.shape[1]), np.float32)
        experts, starts = np.unique(picked[order], return_index=True)
        groups = list(zip(experts.tolist(), starts.tolist(), [*starts[1:].tolist(), picked.size], strict=True))
        for expert, start, stop in groups:
            np.matmul(sorted_rows[start:stop], self._gate_up[expert], out=hidden[start:stop])
        gate, up = np.split(hidden, 2, axis=1)
        active = np.ascontiguousarray(gate / (1 + np.exp(-gate)) * up)
        for expert, start, stop in groups:
            result[order[start:stop]] = active[start:stop] @ self._down[expert]
        return mx.array(result).reshape(*ids.shape, -1)


def multiply_with_numpy(model: nn.Module) -> nn.Module:
    """Let NumPy do the matrix products of ``model``, which must be of float32 and not quantised, and return it."""
    replaced: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            replaced.append((name, _Linear(module)))
        elif isinstance(module, SwitchGLU):
            replaced.append((name, _Experts(module)))
    inside = [name for name, module in replaced if isinstance(module, _Experts)]
    replaced = [(n, m) for n, m in replaced if not any(n.startswith(f"{each}.") for each in inside)]
    model.update_modules(tree_unflatten(replaced))
    return model


def log_likelihood(logits: mx.array, tokens: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Of ``tokens [B]`` under ``logits [B, V]``, in nats, float64 ``[B]``."""
    z = np.array(logits, np.float64)
    top = z.max(axis=-1)
    return z[np.arange(len(z)), tokens] - top - np.log(np.exp(z - top[:, None]).sum(axis=-1))
