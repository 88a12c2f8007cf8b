"""Compiles kernels for NVIDIA GPUs, each once per machine: what NVRTC makes of them is kept on disk.

MLX would compile a custom kernel again in every process, which takes one to five seconds each. Its own kernels it
keeps, but where a reboot clears them away: prepare() gives them a better place.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from numpy.typing import NDArray

from . import modules
from .errors import Fault
from .folders import cache_folder, write_whole

_TYPES = {
    mx.bool_: "bool",
    mx.uint8: "unsigned char",
    mx.uint32: "unsigned int",
    mx.int32: "int",
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
}
# What is a fused multiply-add says the source: where the compiler chose, the bits of a row could depend on how many
# rows a kernel is for.
_OPTIONS = ("--fmad=false",)
_PREFERRED_LOCATION, _ACCESSED_BY, _HOST = 3, 5, -1  # of the driver's cuMemAdvise
_INCLUDES = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"


def folder() -> Path:
    """Where the compiled kernels of this package are kept."""
    return cache_folder() / "cuda"


def prepare() -> None:
    """Have MLX keep what it compiles in the user's cache, unless the environment names a place. Comes before its first
    kernel; does nothing without CUDA, or where the cache cannot be written.
    """
    if not mx.cuda.is_available() or modules.MLX_FOLDER in os.environ:
        return
    place = cache_folder() / "mlx" / version("mlx")
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
    if os.access(place, os.W_OK):
        os.environ[modules.MLX_FOLDER] = str(place)


class Ahead:
    """Kernels that are being compiled side by side, or were before: ``futures`` by name."""

    def __init__(self, pool: ThreadPoolExecutor):
        self._pool = pool
        self.futures: dict[str, Future[bytes]] = {}

    def add(self, name: str, text: str) -> None:
        if name not in self.futures:
            self.futures[name] = self._pool.submit(compiled, name, text)


_ahead: Ahead | None = None


@contextlib.contextmanager
def compiling_ahead(threads: int | None = None) -> Iterator[Ahead]:
    """Within, kernels are not run but compiled, in ``threads`` (by default one for each core), and give zeros: for a
    graph that is built to be thrown away. mx.compile() is off, since it would keep such a graph.

    At the end all have been compiled, or the first Fault is raised.
    """
    global _ahead
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        _ahead = ahead = Ahead(pool)
        mx.disable_compile()
        try:
            yield ahead
        finally:
            _ahead = None
            if not os.environ.get("MLX_DISABLE_COMPILE"):
                mx.enable_compile()
    for future in ahead.futures.values():
        future.result()


def build(
    name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
) -> Callable[..., list[mx.array]]:
    """What ``mx.fast.cuda_kernel`` would return, for inputs that always have the same dtypes and dimensions."""
    made: list[bytes] = []
    shaped = [name for name in input_names if re.search(rf"\b{name}_shape\b", source)]

    def run(
        *,
        inputs: Sequence[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        by_name = dict(zip(input_names, inputs, strict=True))
        if _ahead or not made:
            outputs = dict(zip(output_names, output_dtypes, strict=True))
            text = text_of(name, by_name, outputs, shaped, source, header)
            if _ahead:
                _ahead.add(name, text)
                return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
            code = compiled(name, text)
            made.append((modules.shorthand(name, code, modules.mlx_cache()) if shorthands() else None) or code)
        return mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=made[0],
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=[size for each in shaped for size in by_name[each].shape],
            grid=grid,
            threadgroup=threadgroup,
            ensure_row_contiguous=True,
        )

    return run


def text_of(
    name: str,
    inputs: dict[str, mx.array],
    outputs: dict[str, mx.Dtype],
    shaped: Sequence[str],
    source: str,
    header: str,
) -> str:
    """A kernel's translation unit: it takes pointers to inputs and outputs, then the sizes of the ``shaped`` inputs."""
    parameters = [f"const {_TYPES[array.dtype]}* {each}" for each, array in inputs.items()]
    parameters += [f"{_TYPES[dtype]}* {each}" for each, dtype in outputs.items()]
    shapes = ""
    for each in shaped:
        sizes = [f"{each}_size{axis}" for axis in range(inputs[each].ndim)]
        parameters += [f"int {size}" for size in sizes]
        shapes += f"const int {each}_shape[] = {{{', '.join(sizes)}}};\n"
    signature = f'extern "C" __global__ void {name}({", ".join(parameters)}) {{\n'
    return f"{_INCLUDES}{header}\n{signature}{shapes}{source}\n}}\n"


@cache
def compiled(name: str, text: str) -> bytes:
    """The machine code of a translation unit for the GPU in use, from the cache if it is there.

    Raises Fault where it does not compile.
    """
    key = hashlib.sha256(f"{nvrtc().version}{architecture()}{_OPTIONS}{text}".encode()).hexdigest()[:24]
    path = folder() / f"{name}-{key}.cubin"
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            return content[32:]
    code = nvrtc().compile(name, text, architecture())
    with contextlib.suppress(OSError):  # without the cache, the next process compiles again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, hashlib.sha256(code).digest() + code)
    return code


@cache
def shorthands() -> bool:
    """Whether MLX finds modules by their shorthand. To be asked for the first time outside of mx.compile()."""
    return modules.works(compiled, modules.mlx_cache())


@cache
def architecture() -> str:
    info = mx.device_info(mx.gpu)
    major, minor = info["compute_capability_major"], info["compute_capability_minor"]
    return f"sm_{major}{minor}{'a' if int(major) >= 9 else ''}"


@cache
def available() -> bool:
    """Whether kernels can be compiled here and run so; if not, MLX compiles them."""
    try:
        nvrtc()
    except OSError:
        return False
    return hasattr(mx.fast, "precompiled_cuda_kernel")


def stay_on_host(memory: NDArray[Any]) -> None:
    """Have pages of managed memory stay with the host, and the GPU read them over the bus: else they go to whichever
    touched them last, which takes tenths of a millisecond. Where a system has no such pages (WSL), or the driver cannot
    be asked, nothing is done: results do not depend on it.
    """
    with contextlib.suppress(OSError, AttributeError):
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        driver.cuDeviceGetCount(ctypes.byref(count))
        place, size = ctypes.c_uint64(memory.__array_interface__["data"][0]), ctypes.c_size_t(memory.nbytes)
        for advice, device in ((_PREFERRED_LOCATION, _HOST), *((_ACCESSED_BY, gpu) for gpu in range(count.value))):
            driver.cuMemAdvise(place, size, advice, ctypes.c_int(device))


class Nvrtc:
    """NVIDIA's run-time compiler. Raises OSError where the library or the headers are missing."""

    def __init__(self, library: str, include: Path):
        if os.path.isabs(library):  # NVRTC looks for this one where the system does, and not beside itself
            for builtins in Path(library).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
        self._library, self._include = ctypes.CDLL(library), include
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, name: str, text: str, architecture: str) -> bytes:
        program = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
        try:
            options = [f"--gpu-architecture={architecture}", f"--include-path={self._include}", *_OPTIONS]
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            try:
                self._call("CompileProgram", program, len(options), array)
            except Fault:
                log = self._content(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise Fault(f"kernel {name} does not compile for {architecture}: {log}") from None
            return self._content(program, "CUBIN")
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _content(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._library, f"nvrtc{function}")(*arguments):
            raise Fault(f"nvrtc{function} failed with status {status}")


@cache
def nvrtc() -> Nvrtc:
    """The one that is installed. Raises OSError where there is none."""
    return Nvrtc(_library(), _include())


def _library() -> str:
    """What MLX has loaded, if that can be seen, or what the system or MLX would find."""
    with contextlib.suppress(OSError):
        loaded = re.findall(r"/\S*libnvrtc\.so\S*", Path("/proc/self/maps").read_text())
        if loaded:
            return str(loaded[0])
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return name
    for place in _places():
        for library in sorted(place.glob("lib*/libnvrtc.so.*")):
            return str(library)
    raise OSError("no libnvrtc")


def _include() -> Path:
    """CUDA's headers, where MLX looks for them."""
    for place in _places():
        if (place / "include" / "cuda_bf16.h").exists():
            return place / "include"
    raise OSError("no CUDA headers")


def _places() -> list[Path]:
    """Where parts of CUDA may be: beside MLX among the installed packages, or with the toolkit."""
    packages = Path(mx.__file__).resolve().parents[1] / "nvidia"
    toolkits = filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"))
    return [packages / "cu13", packages / "cuda_nvrtc", packages / "cuda_runtime", *map(Path, toolkits)]
