"""Runs Metal kernel bodies on the CPU, thread by thread, with the interface of ``mx.fast.metal_kernel``.

``host_kernel`` writes the function that MLX would generate around a body (same parameters, shapes, constants
of the template), compiles it as C++ with ``kernels/dialect/host.h``, and runs every thread as a fiber. See
``machine.h`` for what counts as an error. Outputs are poisoned before a launch.
"""

import ctypes
import os
import re
import struct
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from threading import Lock
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.host import compiler
from tests.host.compiler import KernelError

# dtype name -> what MLX calls it in a signature, and how NumPy holds its bits
TYPES: dict[str, tuple[str, Any]] = {
    "bool": ("bool", np.bool_),
    "uint8": ("uint8_t", np.uint8),
    "uint16": ("uint16_t", np.uint16),
    "uint32": ("uint32_t", np.uint32),
    "uint64": ("uint64_t", np.uint64),
    "int8": ("int8_t", np.int8),
    "int16": ("int16_t", np.int16),
    "int32": ("int32_t", np.int32),
    "int64": ("int64_t", np.int64),
    "float16": ("float16_t", np.float16),
    "float32": ("float", np.float32),
    "bfloat16": ("bfloat16_t", np.uint16),
}

ATTRIBUTES = {
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

Template = Sequence[tuple[str, Any]]
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Buffer:
    """An array in row-major order and its kernel type; ``bfloat16`` is held as uint16 bit patterns."""

    data: NDArray[Any]
    dtype: str


def host_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    in_place: int = 0,
) -> Callable[..., list[Any]]:
    """What ``mx.fast.metal_kernel`` returns, for the CPU.

    The result is called with keywords ``inputs`` (mx.array, NumPy array, or a pair of uint16 bits and
    "bfloat16"), ``template``, ``grid``, ``threadgroup``, ``output_shapes``, ``output_dtypes`` and optionally
    ``init_value``, ``seed`` (0: threads in ascending order) and ``sanitize`` (run under the address and
    undefined-behaviour sanitisers). It returns mx.arrays when the first input is one, otherwise NumPy arrays.

    in_place: how many inputs, the last ones, the kernel may write to; not under the sanitisers.

    Raises:
        KernelError: the body does not compile, or a launch broke a rule of ``machine.h``.
        Fault: there is no C++ compiler.
    """
    code = re.sub(r"//.*", "", f"{header}\n{source}")
    if match := re.search(r"\bthreadgroup\s+[\w:]+\s*[*&]|\b(device|constant|thread)\s+\w", code):
        raise KernelError(
            f"kernel {name}: {match.group(0)!r}: the address space of a pointer is for a template parameter "
            "or auto to find; CUDA has no such names, and there __shared__ declares memory only"
        )
    kernel = _Kernel(name, tuple(input_names), tuple(output_names), source, header)

    def run(
        *,
        inputs: Sequence[Any],
        grid: Triple,
        threadgroup: Triple,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        template: Template = (),
        init_value: float | None = None,
        seed: int = 0,
        sanitize: bool = False,
        **_ignored: Any,  # verbose, stream
    ) -> list[Any]:
        given = (len(inputs), len(output_shapes), len(output_dtypes))
        if given != (len(input_names), len(output_names), len(output_names)):
            raise KernelError(
                f"kernel {name}: takes {len(input_names)} inputs and {len(output_names)} outputs, "
                "got {} inputs, {} output shapes and {} dtypes".format(*given)
            )
        fixed = len(inputs) - in_place
        ins = [_buffer(value) for value in inputs[:fixed]] + [_shared(value) for value in inputs[fixed:]]
        outs = [_poisoned(shape, dtype, init_value) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        text = kernel.generate(ins, outs, template)
        run_once = _run_sanitized if sanitize else partial(_run, fixed)
        results = run_once(kernel, text, ins, outs, grid, threadgroup, seed)
        as_mlx = len(inputs) > 0 and isinstance(inputs[0], mx.array)
        return [_to_mlx(out) if as_mlx else out.data for out in results]

    return run


@dataclass(frozen=True)
class HostBuild:
    """A builder for ``strata_mlx.kernels``: what it builds runs with this seed and edits, sanitised or not.

    An edit is a pair (old, new); header and body together must hold the old text once. See ``mutate``. in_place: how
    the names of those inputs begin that a kernel may write to; they are its last ones.
    """

    seed: int = 0
    sanitize: bool = False
    edits: tuple[tuple[str, str], ...] = ()
    in_place: str | None = None

    def __call__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
    ) -> Callable[..., list[Any]]:
        for old, new in self.edits:
            seam = "\0"
            header, source = mutate(header + seam + source, old, new).split(seam)
        written = sum(self.in_place is not None and each.startswith(self.in_place) for each in input_names)
        kernel = host_kernel(name, input_names, output_names, source, header, written)
        return partial(kernel, seed=self.seed, sanitize=self.sanitize)


def together(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Makes calls side by side, so that kernels are compiled on all cores; launches themselves take turns."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@dataclass(frozen=True)
class _Kernel:
    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str

    def generate(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer], template: Template) -> str:
        """The C++ file: dialect, header, the kernel under MLX's signature, and the machine's way in."""
        parameters, arguments = [], []
        for i, (name, buffer) in enumerate(zip(self.input_names, inputs, strict=True)):
            kind = TYPES[buffer.dtype][0]
            pointer = f"static_cast<const {kind}*>(launch.buffers[{i}])"
            if buffer.data.ndim == 0:
                parameters.append(f"const {kind}& {name}")
                arguments.append(f"*{pointer}")
                continue
            parameters.append(f"const {kind}* {name}")
            arguments.append(pointer)
            for suffix, declaration, argument in (
                ("shape", "const int*", f"launch.shapes[{i}]"),
                ("strides", "const int64_t*", f"launch.strides[{i}]"),
                ("ndim", "const int&", f"launch.ndims[{i}]"),
            ):
                if f"{name}_{suffix}" in self.source:
                    parameters.append(f"{declaration} {name}_{suffix}")
                    arguments.append(argument)
        for i, (name, buffer) in enumerate(zip(self.output_names, outputs, strict=True)):
            kind = TYPES[buffer.dtype][0]
            parameters.append(f"{kind}* {name}")
            arguments.append(f"static_cast<{kind}*>(launch.buffers[{len(inputs) + i}])")
        for attribute, kind in ATTRIBUTES.items():
            if attribute in self.source:
                parameters.append(f"{kind} {attribute}")
                arguments.append(f"at.{attribute}")
        return f"""#include "host.h"
#line 1 "{self.name}.header"
{self.header}
#line 1 "{self.name}.signature"
namespace {{
{"".join(_constant(name, value) for name, value in template)}
void kernel_body(
  {("," + chr(10) + "  ").join(parameters)}) {{
#line 1 "{self.name}.metal"
{self.source}
}}
void run_thread(const machine::Launch& launch, const machine::Position& at) {{
  (void)at;
  kernel_body({", ".join(arguments)});
}}
}}
extern "C" {{
extern unsigned char __start_threadgroup[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_threadgroup[] __attribute__((weak, visibility("hidden")));
__attribute__((visibility("default"))) extern const machine::Kernel strata_host_kernel = {{
  "{self.name}", run_thread, __start_threadgroup, __stop_threadgroup}};
}}
"""


def _constant(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};\n"
    return f"using {name} = {TYPES[_dtype_name(value)][0]};\n"


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("mlx.core.").removesuffix("_") if isinstance(dtype, mx.Dtype) else dtype
    name = name if isinstance(name, str) else np.dtype(name).name
    if name not in TYPES:
        raise KernelError(f"dtype {dtype!r} is not one of {', '.join(TYPES)}")
    return name


def _buffer(value: Any) -> Buffer:
    if isinstance(value, mx.array):
        name = _dtype_name(value.dtype)
        # MLX hands kernels row-contiguous inputs, whatever the strides of the arrays are.
        return Buffer(np.array(value.view(mx.uint16) if name == "bfloat16" else value, order="C"), name)
    if isinstance(value, tuple):
        bits, name = value
        return Buffer(np.ascontiguousarray(bits, TYPES[name][1]).reshape(np.shape(bits)), name)
    array = np.asarray(value)
    return Buffer(np.ascontiguousarray(array).reshape(array.shape), _dtype_name(array.dtype))


def _shared(value: mx.array) -> Buffer:
    """The memory of ``value`` itself."""
    name = _dtype_name(value.dtype)
    shown = value.view(mx.uint16) if name == "bfloat16" else value
    mx.eval(shown)
    return Buffer(np.array(shown, copy=False), name)


def _poisoned(shape: Sequence[int], dtype: Any, init_value: float | None) -> Buffer:
    name = _dtype_name(dtype)
    data = np.empty(tuple(shape), TYPES[name][1])
    if init_value is not None:
        data = np.array(mx.full(tuple(shape), init_value, getattr(mx, name + "_" * (name == "bool"))).view(mx.uint8))
        return Buffer(data.view(TYPES[name][1]).reshape(tuple(shape)), name)
    if name == "bfloat16":
        data.fill(0x7FC1)
    elif name.startswith("float"):
        data.fill(np.nan)
    else:
        data.reshape(-1).view(np.uint8).fill(0xA5)
    return Buffer(data, name)


def _to_mlx(buffer: Buffer) -> mx.array:
    return mx.array(buffer.data).view(mx.bfloat16) if buffer.dtype == "bfloat16" else mx.array(buffer.data)


_turn = Lock()  # there is one machine in a process


class _Launch(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_int64),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("names", ctypes.POINTER(ctypes.c_char_p)),
        ("bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("input_count", ctypes.c_uint64),
        ("buffer_count", ctypes.c_uint64),
        ("shapes", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("strides", ctypes.POINTER(ctypes.POINTER(ctypes.c_int64))),
        ("ndims", ctypes.POINTER(ctypes.c_int32)),
    )


def _strides(shape: Sequence[int]) -> list[int]:
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


def _run(
    fixed: int,
    kernel: _Kernel,
    text: str,
    inputs: Sequence[Buffer],
    outputs: Sequence[Buffer],
    grid: Triple,
    threadgroup: Triple,
    seed: int,
) -> Sequence[Buffer]:
    machine = compiler.load(compiler.machine(), True)
    library = compiler.load(compiler.compile_kernel(kernel.name, text), False)
    buffers = [*inputs, *outputs]
    names = [name.encode() for name in (*kernel.input_names, *kernel.output_names)]
    shapes = [(ctypes.c_int32 * b.data.ndim)(*b.data.shape) for b in inputs]
    strides = [(ctypes.c_int64 * b.data.ndim)(*_strides(b.data.shape)) for b in inputs]
    launch = _Launch(
        seed,
        (ctypes.c_uint32 * 3)(*grid),
        (ctypes.c_uint32 * 3)(*threadgroup),
        (ctypes.c_void_p * len(buffers))(*(buffer.data.ctypes.data for buffer in buffers)),
        (ctypes.c_char_p * len(buffers))(*names),
        (ctypes.c_uint64 * len(buffers))(*(buffer.data.nbytes for buffer in buffers)),
        fixed,  # of the inputs, which must not be written to
        len(buffers),
        (ctypes.POINTER(ctypes.c_int32) * len(inputs))(
            *(ctypes.cast(s, ctypes.POINTER(ctypes.c_int32)) for s in shapes)
        ),
        (ctypes.POINTER(ctypes.c_int64) * len(inputs))(
            *(ctypes.cast(s, ctypes.POINTER(ctypes.c_int64)) for s in strides)
        ),
        (ctypes.c_int32 * len(inputs))(*(b.data.ndim for b in inputs)),
    )
    error = ctypes.create_string_buffer(4096)
    entry = ctypes.byref(ctypes.c_char.in_dll(library, "strata_host_kernel"))
    with _turn:
        failed = machine.run_kernel(entry, ctypes.byref(launch), error, ctypes.c_size_t(len(error)))
    if failed:
        raise KernelError(error.value.decode())
    return outputs


def _run_sanitized(
    kernel: _Kernel,
    text: str,
    inputs: Sequence[Buffer],
    outputs: Sequence[Buffer],
    grid: Triple,
    threadgroup: Triple,
    seed: int,
) -> Sequence[Buffer]:
    request = [struct.pack("=9q", seed, *grid, *threadgroup, len(inputs), len(outputs))]
    for buffer in inputs:
        shape = buffer.data.shape
        request.append(struct.pack(f"=q{len(shape)}i{len(shape)}q", len(shape), *shape, *_strides(shape)))
    for buffer in [*inputs, *outputs]:
        request.append(struct.pack("=q", buffer.data.nbytes) + buffer.data.tobytes())
    done = subprocess.run(
        [compiler.compile_kernel(kernel.name, text, sanitize=True)],
        input=b"".join(request),
        capture_output=True,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"},
    )
    if done.returncode:
        raise KernelError(f"kernel {kernel.name}, sanitised: {done.stderr.decode(errors='replace').strip()}")
    results, at = [], 0
    for out in outputs:
        data = np.frombuffer(done.stdout, out.data.dtype, out.data.size, at).reshape(out.data.shape)
        results.append(Buffer(data.copy(), out.dtype))
        at += out.data.nbytes
    return results


def mutate(text: str, old: str, new: str) -> str:
    """``text`` with its one ``old`` replaced, so that a mutant cannot quietly become the original.

    Raises:
        ValueError: ``old`` is absent, occurs more than once, or equals ``new``.
    """
    if text.count(old) != 1 or old == new:
        raise ValueError(f"expected exactly one {old!r} to replace, found {text.count(old)}")
    return text.replace(old, new)
