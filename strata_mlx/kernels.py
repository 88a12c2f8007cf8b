"""Loads ``kernels/*.metal`` and runs them: on Metal, on CUDA, or wherever a given builder takes them.

A ``KernelSpec`` is one kernel's interface and a ``Launch`` how it is launched, whatever runs it; tests and
runtime share them. A builder has the interface of ``mx.fast.metal_kernel``.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from strata_mlx import cuda
from strata_mlx.errors import Fault, InputError

MAX_EXPERTS = 1024
MAX_TOP_K = 16
MAX_FUSED_ROWS = 8
SIMD = 32  # lanes of a simdgroup
PLAN_THREADS = 512

ROUTERS = ("softmax", "sigmoid")  # in the order of enum Router in kernels/route.h

Router = Literal["softmax", "sigmoid"]
Triple = tuple[int, int, int]
Constants = tuple[tuple[str, int | bool | float | str | mx.Dtype], ...]
Kernel = Callable[..., list[mx.array]]
Build = Callable[..., Kernel]


def folder() -> Path:
    """Where the kernel sources are: inside an installed package, or beside it in a source checkout."""
    packaged = Path(__file__).parent / "_kernels"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "kernels"


@cache
def text(name: str) -> tuple[str, str]:
    """The header and the body of kernel ``name``; the files that it includes, each once, are the header."""
    headers: dict[str, str] = {}
    body = _resolve(f"{name}.metal", headers)
    return "".join(headers.values()), body


def _resolve(file: str, headers: dict[str, str]) -> str:
    def include(match: re.Match[str]) -> str:
        wanted = match.group(1)
        if wanted not in headers:
            resolved = _resolve(wanted, headers)
            headers[wanted] = f'#line 1 "{wanted}"\n{resolved}'
        return ""

    return re.sub(r'^#include "([\w./]+)"', include, (folder() / file).read_text(), flags=re.MULTILINE)


@dataclass(frozen=True)
class Launch:
    """One launch: template constants, grid and threadgroup in threads, the outputs' shapes, and the dtype of those
    outputs that have none of their own.

    The grid is whole threadgroups and a threadgroup whole simdgroups: CUDA would round them up.
    """

    constants: Constants
    grid: Triple
    threadgroup: Triple
    output_shapes: tuple[tuple[int, ...], ...]
    dtype: mx.Dtype | None = None


@dataclass(frozen=True, eq=False)  # compared by identity: it is part of a key at every launch
class KernelSpec:
    """A kernel's interface: names of its inputs, names and dtypes of its outputs, None where a launch says it."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, mx.Dtype | None], ...]

    def run(self, inputs: Sequence[mx.array], launch: Launch, build: Build | None = None) -> list[mx.array]:
        """Launches the kernel.

        Raises:
            Fault: no builder was given and MLX has no GPU backend here.
        """
        dtypes = [dtype or launch.dtype for _, dtype in self.outputs]
        if 0 in launch.grid:
            return [mx.zeros(shape, dtype) for shape, dtype in zip(launch.output_shapes, dtypes, strict=True)]
        # Metal binds inputs of fewer than 8 elements otherwise, so smallness is part of a specialisation.
        kinds = tuple((x.dtype, x.size < 8) for x in inputs)
        kernel = _built(self, launch.constants, kinds, build or default_build())
        return kernel(
            inputs=inputs,
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            output_shapes=launch.output_shapes,
            output_dtypes=dtypes,
        )


@cache
def _built(spec: KernelSpec, constants: Constants, kinds: tuple[tuple[Any, bool], ...], build: Build) -> Kernel:
    header, body = text(spec.name)
    # Part of the text instead of MLX's template arguments, which it would format anew at every launch.
    body = "".join(map(_constant, constants)) + body
    # MLX caches compiled kernels by name, and not every version adds all of this to it.
    identity = hashlib.sha256(repr((constants, kinds, header, body)).encode()).hexdigest()[:16]
    return build(
        name=f"strata_{spec.name}_{identity}",
        input_names=spec.inputs,
        output_names=[name for name, _ in spec.outputs],
        source=body,
        header=header,
    )


def _constant(constant: tuple[str, int | bool | float | str | mx.Dtype]) -> str:
    """A line of the body. A text is another name for an input, which stands in for one that is not needed: each input
    of a launch costs the host time.
    """
    name, value = constant
    if isinstance(value, mx.Dtype):
        return f"using {name} = {_TYPES[value]};\n"
    if isinstance(value, str):
        return f"auto {name} = {value};\n"
    if isinstance(value, float):
        return f"constexpr float {name} = {value!r}f;\n"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"constexpr {kind} {name} = {int(value)};\n"


_TYPES = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.uint32: "uint"}


def build_metal(**kernel: Any) -> Kernel:
    """Builds for Apple GPUs."""
    return cast(Kernel, mx.fast.metal_kernel(**_compact(kernel)))


def build_cuda(**kernel: Any) -> Kernel:
    """Builds for NVIDIA GPUs: the same text, after the header that defines Metal's idiom."""
    dialect = (folder() / "dialect" / "cuda.h").read_text()
    whole = _compact({**kernel, "header": f"{dialect}\n{kernel['header']}"})
    return cuda.build(**whole) if cuda.available() else cast(Kernel, mx.fast.cuda_kernel(**whole))


def _compact(kernel: dict[str, Any]) -> dict[str, Any]:
    """The kernel without comments, indentation and line numbers: MLX copies and hashes the text at every launch."""
    texts = {key: re.sub(r"^#line.*$|//.*$", "", kernel[key], flags=re.MULTILINE) for key in ("header", "source")}
    return kernel | {key: re.sub(r"\s*\n\s*", "\n", text) for key, text in texts.items()}


@cache
def default_build() -> Build:
    """The builder of the GPU that MLX uses here.

    Raises:
        Fault: there is none.
    """
    if mx.metal.is_available():
        return build_metal
    if mx.cuda.is_available():
        return build_cuda
    raise Fault("MLX has no GPU backend here, so kernels cannot run: use the op path (strata_mlx.routing.select)")


_ROUTE_INPUTS = ("logits", "resident", "tables", "row_kind", "bias")
_ROUTE_OUTPUTS = (("ids", mx.uint32), ("weights", mx.float32))
_PLAN_OUTPUTS = (("plan", mx.uint32),)

ROUTE_SELECT = KernelSpec("route_select", _ROUTE_INPUTS, _ROUTE_OUTPUTS)
GROUP_PLAN = KernelSpec("group_plan", ("ids", "resident"), _PLAN_OUTPUTS)
ROUTE_FUSED = KernelSpec("route_fused", _ROUTE_INPUTS, _ROUTE_OUTPUTS + _PLAN_OUTPUTS)


def route_select(
    logits: mx.array,
    resident: mx.array | None,
    tables: NDArray[np.float32] | None,
    row_kind: mx.array | None,
    *,
    top_k: int,
    router: Router = "softmax",
    norm_topk: bool = True,
    bias: mx.array | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
    experts: int | None = None,
    build: Build | None = None,
) -> list[mx.array]:
    """Experts and weights of each row.

    Args:
        logits: ``[..., T, E]`` float32, bfloat16 or float16; E up to 1024.
        resident: bool or uint8 ``[E]``, or None: no score is scaled.
        tables: float32 ``[2, 2, K]`` on the host, what ``RoutingPolicy.tables`` returns; needed with ``resident``.
        row_kind: bool or uint8 ``[T]``, 0 for head rows, 1 for draft rows; needed with ``resident``.
        top_k: K, up to 16.
        router: "softmax" or "sigmoid".
        norm_topk: divide the weights by their sum (or 2^-14 if that is larger).
        bias: float32 ``[E]``, added to the scores for the choice only.
        n_group, topk_group: choose from the best ``topk_group`` of ``n_group`` (up to 32) equal groups.
        scale: multiplies the weights last.
        experts: E, where rows of ``logits`` are longer.
        build: what builds the kernel; by default that of MLX's GPU backend.

    Returns:
        ids uint32 ``[..., T, K]`` in the order they were picked, weights float32 ``[..., T, K]``.

    Raises:
        InputError: a size or an argument that the kernels do not take.
        Fault: there is no GPU and no builder.
    """
    inputs, constants = _route_arguments(
        logits, resident, tables, row_kind, top_k, router, norm_topk, bias, n_group, topk_group, scale, experts
    )
    rows = prod(logits.shape[:-1])
    launch = Launch(constants, (SIMD * rows, 1, 1), (SIMD, 1, 1), ((*logits.shape[:-1], top_k),) * 2)
    return ROUTE_SELECT.run(inputs, launch, build)


def group_plan(
    ids: mx.array,
    resident: mx.array | None,
    *,
    expert_count: int,
    split: bool = True,
    build: Build | None = None,
) -> mx.array:
    """The entries of a window (entry ``token * K + rank``) grouped by expert, as one array: see ``unpack_plan``.

    Args:
        ids: uint32 ``[T, K]``, each below ``expert_count``.
        resident: bool or uint8 ``[E]``, or None.
        expert_count: E, up to 1024.
        split: resident groups first (needs ``resident``).
        build: as for ``route_select``.

    Returns:
        uint32 ``[3 * G + T * K + 1]`` with ``G = min(E, T * K)``.

    Raises:
        InputError: a size or an argument that the kernel does not take.
        Fault: there is no GPU and no builder.
    """
    _check_experts(expert_count, resident)
    split = split and resident is not None
    threads = min(PLAN_THREADS, SIMD * -(-expert_count // SIMD))
    constants = (("E", expert_count), ("THREADS", threads), ("SPLIT", split))
    grid = (threads if ids.size else 0, 1, 1)
    launch = Launch(constants, grid, (threads, 1, 1), (_plan_shape(expert_count, ids.size),))
    (plan,) = GROUP_PLAN.run([ids, _NOTHING if resident is None else resident], launch, build)
    return plan


def unpack_plan(plan: mx.array, expert_count: int, entries: int) -> list[mx.array]:
    """The parts of a group plan, uint32: experts, offsets and counts ``[G]``, entries ``[T * K]``, number of groups
    ``[]``.

    Groups past that number are empty: expert 0, offset ``T * K``, count 0. ``entries`` is ``T * K``.
    """
    groups = min(expert_count, entries)
    bounds = (0, groups, 2 * groups, 3 * groups, 3 * groups + entries)
    return [*(plan[start:stop] for start, stop in itertools.pairwise(bounds)), plan[-1]]


def route_fused(
    logits: mx.array,
    resident: mx.array | None,
    tables: NDArray[np.float32] | None,
    row_kind: mx.array | None,
    *,
    top_k: int,
    router: Router = "softmax",
    norm_topk: bool = True,
    bias: mx.array | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
    split: bool = True,
    build: Build | None = None,
) -> list[mx.array]:
    """``route_select`` and ``group_plan`` of a decode window (T up to 8) in one launch: ids, weights and the plan.

    Raises:
        InputError: a size or an argument that the kernel does not take.
        Fault: there is no GPU and no builder.
    """
    rows, experts = logits.shape
    if rows > MAX_FUSED_ROWS:
        raise InputError(
            f"route_fused: {rows} rows, expected at most {MAX_FUSED_ROWS}; use route_select and group_plan"
        )
    inputs, constants = _route_arguments(
        logits, resident, tables, row_kind, top_k, router, norm_topk, bias, n_group, topk_group, scale
    )
    constants = (("T", rows), ("SPLIT", split and resident is not None), *constants)
    shapes = ((rows, top_k), (rows, top_k), _plan_shape(experts, rows * top_k))
    launch = Launch(constants, (SIMD * rows, 1, 1), (SIMD * rows, 1, 1), shapes)
    return ROUTE_FUSED.run(inputs, launch, build)


# Stand in for inputs that a kernel's constants switch off. Made from values and not by an operation, which
# would belong to the stream of the thread that made it.
_NOTHING = mx.array([0], mx.uint8)
_NO_NUMBERS = mx.array([0], mx.float32)


def _route_arguments(
    logits: mx.array,
    resident: mx.array | None,
    tables: NDArray[np.float32] | None,
    row_kind: mx.array | None,
    top_k: int,
    router: Router,
    norm_topk: bool,
    bias: mx.array | None,
    n_group: int,
    topk_group: int,
    scale: float,
    experts: int | None = None,
) -> tuple[list[mx.array], Constants]:
    rows, width = prod(logits.shape[:-1]), logits.shape[-1]
    experts = width if experts is None else experts
    _check_experts(experts, resident)
    if router not in ROUTERS:
        raise InputError(f"router is {router!r}, expected one of {', '.join(ROUTERS)}")
    if not 1 <= top_k <= min(MAX_TOP_K, experts):
        raise InputError(f"top_k is {top_k}, expected 1..{min(MAX_TOP_K, experts)} with {experts} experts")
    if not (1 <= topk_group <= n_group <= SIMD and experts % n_group == 0):
        raise InputError(
            f"n_group is {n_group} and topk_group {topk_group}, "
            f"expected 1..{SIMD} equal groups of the {experts} experts"
        )
    if bias is not None and tuple(bias.shape) != (experts,):
        raise InputError(f"bias has shape {tuple(bias.shape)}, expected ({experts},)")
    if resident is None or tables is None or row_kind is None:
        if resident is not None:
            raise InputError("a residency map needs tables and row_kind as well")
        tables, row_kind = np.ones((2, 2, top_k), np.float32), None
    elif tuple(tables.shape) != (2, 2, top_k) or tuple(row_kind.shape) != (rows,):
        raise InputError(
            f"tables have shape {tuple(tables.shape)} and row_kind {tuple(row_kind.shape)}, "
            f"expected (2, 2, {top_k}) and ({rows},)"
        )
    inputs = [
        logits,
        _NOTHING if resident is None else resident,
        _numbers(tables.tobytes(), scale),
        _head_rows(rows) if row_kind is None else row_kind,
        _NO_NUMBERS if bias is None else bias,
    ]
    constants = (
        ("WIDTH", width),
        ("HAS_RESIDENCY", resident is not None),
        *choice_constants(experts, top_k, router, norm_topk, bias is not None, n_group, topk_group),
    )
    return inputs, constants


def choice_constants(
    experts: int, top_k: int, router: Router, norm_topk: bool, has_bias: bool, n_group: int, topk_group: int
) -> Constants:
    """What ``select_row`` in kernels/route.h has to know of a router."""
    return (
        ("E", experts),
        ("K", top_k),
        ("ROUTER", ROUTERS.index(router)),
        ("NORM", norm_topk),
        ("HAS_BIAS", has_bias),
        ("N_GROUP", n_group),
        ("TOPK_GROUP", topk_group),
    )


def _check_experts(experts: int, resident: mx.array | None) -> None:
    if not 1 <= experts <= MAX_EXPERTS:
        raise InputError(f"{experts} experts, the kernels take 1..{MAX_EXPERTS}")
    if resident is not None and tuple(resident.shape) != (experts,):
        raise InputError(f"the residency map has shape {tuple(resident.shape)}, expected ({experts},)")


def _plan_shape(experts: int, entries: int) -> tuple[int]:
    return (3 * min(experts, entries) + entries + 1,)


@cache
def _numbers(tables: bytes, scale: float) -> mx.array:
    """The tables and the scale as one input, since each input of a launch costs the host time."""
    return mx.array([*np.frombuffer(tables, np.float32).tolist(), scale], mx.float32)


@cache
def _head_rows(rows: int) -> mx.array:
    return mx.array([0] * rows, mx.uint8)
