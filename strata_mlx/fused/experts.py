"""The experts of a few rows in two launches, or apart from each other, as streaming needs them.

Each expert's output for a row is summed up alone and enters the mixture in the order of ranks. So no bit of the result
depends on what else is computed, or when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from ..kernels import SIMD, Build, Constants, KernelSpec, Launch, choice_constants
from ..routing import Router
from .matrix import Matrix, Norm, matrices_of, names
from .project import SIMDGROUPS, outputs_at_a_time

DOWN_OUTPUTS = 4  # of a threadgroup


@dataclass(frozen=True)
class Experts:
    """gate, up ``[E, I, D]`` and down ``[E, D, I]`` of alike experts; without E those of one, which all rows share."""

    gate: Matrix
    up: Matrix
    down: Matrix

    @classmethod
    def of(cls, module: nn.Module) -> Experts | None:
        """Those of mlx-lm's SwitchGLU or of a gated MLP; None where the kernels do not take them."""
        if type(module) is SwitchGLU and type(module.activation) is not SwiGLU:
            return None
        found = matrices_of(module.gate_proj, module.up_proj, module.down_proj)
        if found is None or len({matrix.kind for matrix in found}) > 1:
            return None
        return cls(*found)

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.gate.arrays, *self.up.arrays, *self.down.arrays]

    @classmethod
    def of_arrays(cls, arrays: Sequence[mx.array], bits: int, group: int) -> Experts:
        parts = zip(arrays[::3], arrays[1::3], arrays[2::3], strict=True)
        return cls(*(Matrix(*part, bits, group) for part in parts))

    @property
    def stacked(self) -> Experts:
        """One shared expert as a stack of one."""
        return Experts(self.gate.stacked, self.up.stacked, self.down.stacked)


@dataclass(frozen=True)
class Passing:
    """What joins a mixture in the end: ``residual [B, T, D]``, and the shared expert, whose gate is the last column of
    ``logits [B, T, N]`` where it is ``gated``.
    """

    residual: mx.array
    shared: Experts | None
    logits: mx.array
    gated: bool

    @property
    def constants(self) -> Constants:
        matrix = self.shared.down.constants("SHARED_") if self.shared else (("SHARED_BITS", 0), ("SHARED_GROUP", 1))
        return *matrix, ("SHARED", self.shared is not None), ("GATED", self.gated), ("LOGITS", self.logits.shape[-1])

    @property
    def arrays(self) -> list[mx.array]:
        return [self.residual, self.logits, *(self.shared.down.arrays if self.shared else [])]


def _aliases(instead: str, *matrices: str) -> Constants:
    """Names of what a launch has not got, for what it has."""
    return tuple((name, instead) for name in names(*matrices))


@cache
def _up(norm: bool, shared: bool, routed: bool, bias: bool) -> tuple[KernelSpec, Constants]:
    """The kernel with the inputs that it needs, and names for the others."""
    inputs = ["x", *names("gate", "up"), *(["norm"] if norm else []), *(["bias"] if bias else [])]
    inputs += ["logits" if routed else "ids", *(names("shared_gate", "shared_up") if shared else ())]
    aliases: Constants = tuple((name, "x") for name in ("norm", "bias") if name not in inputs)
    aliases += (("ids", "picked"),) if routed else (("logits", "x"), ("picked", "y"), ("weights", "y"))
    if not shared:
        aliases += (*_aliases("x", "shared_gate", "shared_up"), ("shared_up_w_shape", "x_shape"))
    chosen = (("picked", mx.uint32), ("weights", mx.float32)) if routed else ()
    return KernelSpec("experts_up", tuple(inputs), (("y", None), *chosen)), aliases


@cache
def _last(kernel: str, inputs: tuple[str, ...], passing: bool, shared: bool) -> tuple[KernelSpec, Constants]:
    """The kernel that adds what is passing, where that is given."""
    aliases: Constants = ()
    if passing:
        inputs += ("residual", "logits", *(names("shared_down") if shared else ()))
    else:
        aliases += tuple((name, inputs[0]) for name in ("weights", "residual", "logits"))
    if not shared:
        aliases += _aliases(inputs[0], "shared_down")
    if "x" not in inputs:
        aliases += (("x", inputs[0]), ("x_shape", f"{inputs[0]}_shape"))
    return KernelSpec(kernel, inputs, (("y", None),)), aliases


def experts_up(
    x: mx.array,
    ids: mx.array | None,
    experts: Experts,
    shared: Experts | None = None,
    *,
    norm: Norm | None = None,
    logits: mx.array | None = None,
    router: Router | None = None,
    bias: mx.array | None = None,
    build: Build | None = None,
) -> list[mx.array]:
    """``silu(gate x) * up x`` of rows ``x [B, T, D]`` by their ``experts`` ``ids`` uint32 ``[B, T, K]``, and by the
    ``shared`` one: ``[B, T, K * I + S]``. norm: an RMS normalisation of x.

    Without ``ids``, ``router`` chooses by the first E columns of ``logits`` float32 ``[B, T, N]`` and its selection
    ``bias`` float32 ``[E]``, as route_select() does; ids and weights float32 ``[B, T, K]`` are returned as well.
    """
    top_k = router.top_k if router else ids.shape[-1] if ids is not None else 0
    kind = router or Router(top_k)  # of what is compiled, and not run, where ids are given
    rows, width, lead = x.shape[0] * x.shape[1], experts.gate.outputs, x.shape[:-1]
    shared_width = shared.gate.outputs if shared else 0
    spec, aliases = _up(norm is not None, shared is not None, router is not None, bias is not None)
    at_a_time = outputs_at_a_time(top_k * width)
    constants: Constants = (
        ("OUT", at_a_time),
        ("SIMDGROUPS", SIMDGROUPS),
        ("RMS", norm is not None),
        ("EPS", norm.eps if norm else 0.0),
        ("SHARED", shared is not None),
        ("SPAN", experts.gate.span),
        ("Y", x.dtype),
        ("ROUTED", router is not None),
        ("Picked", mx.uint32 if router else x.dtype),
        ("Weight", mx.float32 if router else x.dtype),
        ("LOGITS", logits.shape[-1] if logits is not None else 1),
        ("SCALE", float(kind.scale)),
        *choice_constants(
            experts.gate.weight.shape[0] if router else top_k,
            top_k,
            kind.kind,
            kind.norm_topk,
            bias is not None,
            kind.n_group,
            kind.topk_group,
        ),
        *experts.gate.constants(),
        *(shared or experts).gate.constants("SHARED_"),
        *aliases,
    )
    threads, blocks = SIMD * SIMDGROUPS, -(-max(width, shared_width) // (at_a_time * SIMDGROUPS))
    chosen = ((*lead, top_k),) * 2 if router else ()
    shapes = ((*lead, top_k * width + shared_width), *chosen)
    grid = (blocks * threads, top_k + (shared is not None), rows)
    given = (norm.weight if norm else None, bias, logits if router else ids)
    inputs = [x, *experts.gate.arrays, *experts.up.arrays, *(array for array in given if array is not None)]
    inputs += [*shared.gate.arrays, *shared.up.arrays] if shared else []
    return spec.run(inputs, Launch(constants, grid, (threads, 1, 1), shapes, x.dtype), build)


def experts_down(
    values: mx.array, ids: mx.array, weights: mx.array, experts: Experts, passing: Passing, build: Build | None = None
) -> mx.array:
    """What the experts make of experts_up()'s ``values [B, T, K * I + S]``, mixed by ``weights`` float32 ``[B, T, K]``,
    and what is ``passing``: ``[B, T, D]``.
    """
    shared = passing.shared is not None
    spec, aliases = _last("experts_down", ("x", "ids", *names("down"), "weights"), True, shared)
    inputs = [values, ids, *experts.down.arrays, weights, *passing.arrays]
    constants = _down_constants(ids, experts, apart=False) + passing.constants + aliases
    return _down(spec, inputs, constants, ids.shape[-1] + shared, passing.residual.shape, passing.residual.dtype, build)


def experts_apart(values: mx.array, ids: mx.array, experts: Experts, build: Build | None = None) -> mx.array:
    """What each expert makes of experts_up()'s ``values [B, T, K * I]``, by rank: float32 ``[B, T, K, D]``."""
    spec, aliases = _last("experts_down", ("x", "ids", *names("down")), False, False)
    nothing: Constants = (
        ("SHARED_BITS", 0),
        ("SHARED_GROUP", 1),
        ("SHARED", False),
        ("GATED", False),
        ("LOGITS", 1),
    )
    constants = _down_constants(ids, experts, apart=True) + nothing + aliases
    shape = (*ids.shape, experts.down.outputs)
    return _down(spec, [values, ids, *experts.down.arrays], constants, ids.shape[-1], shape, mx.float32, build)


def _down_constants(ids: mx.array, experts: Experts, *, apart: bool) -> Constants:
    down = experts.down
    return ("K", ids.shape[-1]), ("APART", apart), ("SPAN", down.span), ("OUT", DOWN_OUTPUTS), *down.constants()


def _down(
    spec: KernelSpec,
    inputs: list[mx.array],
    constants: Constants,
    simdgroups: int,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    build: Build | None,
) -> mx.array:
    """A simdgroup for each expert, and the shared one."""
    rows, threads = inputs[0].shape[0] * inputs[0].shape[1], SIMD * simdgroups
    grid = (-(-shape[-1] // DOWN_OUTPUTS) * threads, rows, 1)
    (y,) = spec.run(inputs, Launch((("Y", dtype), *constants), grid, (threads, 1, 1), (shape,), dtype), build)
    return y


def experts_mix(
    pairs: mx.array, weights: mx.array, shared_values: mx.array | None, passing: Passing, build: Build | None = None
) -> mx.array:
    """experts_down() where the experts' own outputs ``pairs`` float32 ``[B, T, K, D]`` are known, to the same bits.

    shared_values: ``[B, T, S]``, what experts_up() makes for the shared expert alone.
    """
    shared = passing.shared is not None
    spec, aliases = _last("experts_mix", ("pairs", "weights", *(["x"] if shared else [])), True, shared)
    inputs = [pairs, weights, *([shared_values] if shared and shared_values is not None else [])]
    rows, outputs = pairs.shape[0] * pairs.shape[1], pairs.shape[-1]
    at_a_time, dtype = outputs_at_a_time(outputs), passing.residual.dtype
    constants: Constants = (("K", weights.shape[-1]), ("OUT", at_a_time), ("SIMDGROUPS", SIMDGROUPS), ("Y", dtype))
    threads, blocks = SIMD * SIMDGROUPS, -(-outputs // (at_a_time * SIMDGROUPS))
    launch = Launch(
        constants + passing.constants + aliases,
        (blocks * threads, rows, 1),
        (threads, 1, 1),
        (passing.residual.shape,),
        dtype,
    )
    (y,) = spec.run([*inputs, *passing.arrays], launch, build)
    return y
