"""Kernels for NVIDIA GPUs, as far as they can be looked at without one: their text, their cache, and, where NVRTC is
installed (extra dev on Linux x86_64), that every kernel compiles.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from benchmarks.route_kernel import empty_kernel
from strata_mlx import Fault, cuda, kernels, load, modules
from strata_mlx.experts.staged import StagedSlots
from strata_mlx.fused.experts import Passing, experts_mix
from strata_mlx.fused.layer import fuse
from strata_mlx.fused.tokens import likeliest
from strata_mlx.warmup import build_graphs
from tests.experts.streamed import checkpoint, streamed


class Compiler:
    """Instead of NVRTC: machine code that tells what it was made of."""

    version = "13.0"

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, name: str, text: str, architecture: str) -> bytes:
        self.compiled.append(name)
        return f"{architecture} {text}".encode()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for what is compiled, by a process that has compiled nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda, "architecture", lambda: "sm_90a")
    cuda.compiled.cache_clear()
    yield cuda.folder()
    cuda.compiled.cache_clear()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(cuda, "nvrtc", lambda: compiler)
    monkeypatch.setattr(cuda, "available", lambda: True)
    monkeypatch.setattr(cuda, "shorthands", lambda: False)
    return compiler


def again(name: str, text: str) -> bytes:
    """As another process would have it."""
    cuda.compiled.cache_clear()
    return cuda.compiled(name, text)


# The text of a kernel


def test_a_translation_unit_takes_pointers_and_the_sizes_that_the_body_asks_for() -> None:
    inputs = {"x": mx.zeros((2, 3), mx.bfloat16), "ids": mx.zeros(4, mx.uint32)}
    text = cuda.text_of("k", inputs, {"y": mx.float32}, ["x"], "y[0] = x_shape[1];", "struct S {};")
    signature = "const __nv_bfloat16* x, const unsigned int* ids, float* y, int x_size0, int x_size1"
    assert f'extern "C" __global__ void k({signature}) {{' in text
    assert "const int x_shape[] = {x_size0, x_size1};\ny[0] = x_shape[1];\n}" in text
    assert text.index("cuda_bf16.h") < text.index("struct S {};") < text.index("__global__")


def test_a_launch_hands_over_the_code_and_the_sizes(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[dict[str, Any]] = []

    def launch(**given: Any) -> list[mx.array]:
        launches.append(given)
        return []

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
    kernel = cuda.build("k", ["x", "ids"], ["y"], "y[0] = ids[x_shape[0]]; // not_x_shape, ids_shapes", "")
    x, ids = mx.zeros((2, 3)), mx.zeros(4, mx.uint32)
    for _ in range(2):
        kernel(inputs=[x, ids], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32])
    assert compiler.compiled == ["k"]
    assert [launch["scalars"] for launch in launches] == [[2, 3]] * 2
    assert launches[0]["compiled_source"].startswith(b"sm_90a ")


# The cache


def test_another_process_finds_the_code(compiler: Compiler, cache: Path) -> None:
    code = cuda.compiled("k", "text")
    assert again("k", "text") == code
    assert compiler.compiled == ["k"]
    assert [file.suffix for file in cache.iterdir()] == [".cubin"]  # nothing unfinished is left
    assert again("k", "other text") != code
    assert compiler.compiled == ["k", "k"]


def test_another_compiler_or_device_compiles_anew(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.compiled("k", "text")
    compiler.version = "13.1"
    again("k", "text")
    monkeypatch.setattr(cuda, "architecture", lambda: "sm_80")
    assert again("k", "text").startswith(b"sm_80 ")
    assert len(compiler.compiled) == 3


@pytest.mark.parametrize("broken", [b"", b"short", bytes(80)])
def test_a_broken_file_is_written_again(broken: bytes, compiler: Compiler, cache: Path) -> None:
    code = cuda.compiled("k", "text")
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(broken)
    assert again("k", "text") == code
    assert len(compiler.compiled) == 2
    assert file.read_bytes() == whole


def test_without_a_writable_folder_a_process_compiles_once(compiler: Compiler, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    assert cuda.compiled("k", "text") == cuda.compiled("k", "text")
    assert compiler.compiled == ["k"]


# Ahead of use


def test_kernels_compile_side_by_side_and_are_found_when_they_run(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, compile_alone = Barrier(3, timeout=60), compiler.compile

    def compile_together(*given: Any) -> bytes:
        together.wait()  # fails unless three wait at the same time
        return compile_alone(*given)

    monkeypatch.setattr(compiler, "compile", compile_together)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **_: [mx.ones(2)])
    built = [cuda.build(name, ["x"], ["y"], "", "") for name in ("a", "b", "c")]
    options: Any = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(2,)], "output_dtypes": [mx.float32]}

    def run() -> list[float]:
        x = mx.zeros(2)
        for kernel in built * 2:
            (x,) = kernel(inputs=[x], **options)
        return x.tolist()  # type: ignore[return-value]

    with cuda.compiling_ahead(threads=3) as ahead:
        assert run() == [0, 0]
    assert sorted(ahead.futures) == ["a", "b", "c"]
    assert run() == [1, 1]
    assert sorted(compiler.compiled) == ["a", "b", "c"]


def test_a_graph_that_is_thrown_away_is_not_kept_by_compiled_functions(compiler: Compiler) -> None:  # noqa: ARG001
    calls = []

    @mx.compile
    def double(x: mx.array) -> mx.array:
        calls.append(1)
        return 2 * x

    with cuda.compiling_ahead():
        double(mx.ones(2))
    for _ in range(3):
        double(mx.ones(2))
    assert len(calls) == 2


def test_what_does_not_compile_ahead_is_a_fault(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, *_: Any) -> bytes:
        raise Fault(f"kernel {name} does not compile")

    monkeypatch.setattr(compiler, "compile", fail)
    with pytest.raises(Fault, match="kernel k does not compile"), cuda.compiling_ahead() as ahead:
        ahead.add("k", "text")


# NVRTC's interface


class Library:
    """The functions of libnvrtc, with a program of another text than CORRECT being wrong."""

    CORRECT, LOG = b"right", b"k.cu(3): error: expected a ;\0"

    def __init__(self, status: int = 0):
        self.destroyed, self._status = 0, status

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 13, 2
        return 0

    def nvrtcCreateProgram(self, program: Any, text: bytes, *_: Any) -> int:
        program._obj.value, self._text = 1, text
        return self._status

    def nvrtcCompileProgram(self, _program: Any, count: int, options: Any) -> int:
        self.options = [options[i].decode() for i in range(count)]
        return 0 if self._text == self.CORRECT else 6

    def nvrtcDestroyProgram(self, _: Any) -> int:
        self.destroyed += 1
        return 0

    def nvrtcGetCUBINSize(self, _: Any, size: Any) -> int:
        size._obj.value = 4
        return 0

    def nvrtcGetCUBIN(self, _: Any, buffer: Any) -> int:
        buffer[:4] = b"\0ELF"
        return 0

    def nvrtcGetProgramLogSize(self, _: Any, size: Any) -> int:
        size._obj.value = len(self.LOG)
        return 0

    def nvrtcGetProgramLog(self, _: Any, buffer: Any) -> int:
        buffer[: len(self.LOG)] = self.LOG
        return 0


@pytest.fixture
def nvrtc_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Library], cuda.Nvrtc]:
    def make(library: Library) -> cuda.Nvrtc:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_: library)
        return cuda.Nvrtc("libnvrtc.so", Path("/headers"))

    return make


def test_nvrtc_is_asked_for_machine_code(nvrtc_of: Callable[[Library], cuda.Nvrtc]) -> None:
    library = Library()
    nvrtc = nvrtc_of(library)
    assert nvrtc.version == "13.2"
    assert nvrtc.compile("k", "right", "sm_90a") == b"\0ELF"
    assert library.options == ["--gpu-architecture=sm_90a", "--include-path=/headers", "--fmad=false"]
    assert library.destroyed == 1


def test_what_does_not_compile_is_one_fault_with_the_log(nvrtc_of: Callable[[Library], cuda.Nvrtc]) -> None:
    library = Library()
    with pytest.raises(Fault) as caught:
        nvrtc_of(library).compile("k", "wrong", "sm_80")
    assert str(caught.value) == "kernel k does not compile for sm_80: k.cu(3): error: expected a ;"
    assert library.destroyed == 1


def test_a_call_that_fails_names_itself(nvrtc_of: Callable[[Library], cuda.Nvrtc]) -> None:
    with pytest.raises(Fault, match="nvrtcCreateProgram failed with status 5"):
        nvrtc_of(Library(5)).compile("k", "right", "sm_80")


# Where MLX keeps its own kernels


@pytest.fixture
def mlx_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "")  # so that it is what it was, afterwards
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    monkeypatch.setattr(modules, "mlx_cache", modules.mlx_cache.__wrapped__)


@pytest.mark.usefixtures("mlx_on_cuda")
def test_mlx_keeps_its_kernels_in_the_users_cache(tmp_path: Path) -> None:
    cuda.prepare()
    assert Path(os.environ["MLX_PTX_CACHE_DIR"]).parent == tmp_path / "strata_mlx" / "mlx"
    assert modules.mlx_cache().is_dir()


@pytest.mark.usefixtures("mlx_on_cuda")
def test_a_folder_that_the_environment_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/elsewhere")
    cuda.prepare()
    assert modules.mlx_cache() == Path("/elsewhere")


@pytest.mark.usefixtures("mlx_on_cuda")
def test_without_a_writable_cache_mlx_has_its_own_way(tmp_path: Path) -> None:
    (tmp_path / "strata_mlx").write_text("in the way")
    cuda.prepare()
    assert "MLX_PTX_CACHE_DIR" not in os.environ
    assert modules.mlx_cache().name == "ptx"


def test_loading_names_the_folder_before_the_first_kernel_and_only_for_cuda(tmp_path: Path) -> None:
    script = """
import os
import mlx.core as mx
from strata_mlx import device, load, loading
evaluate, seen = loading.evaluate, []
loading.evaluate = lambda *given: (seen.append(os.environ.get("MLX_PTX_CACHE_DIR")), evaluate(*given))
load()
mx.cuda.is_available = lambda: True
load()
print([place is not None for place in seen[:: len(seen) - 1]])
"""
    environment = {name: value for name, value in os.environ.items() if name != "MLX_PTX_CACHE_DIR"}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "[False, True]\n"
    assert (tmp_path / "strata_mlx" / "mlx").is_dir()


# All kernels


def fused(model: nn.Module) -> nn.Module:
    fuse(model, kernels.build_cuda)
    return model


def launch_everything(folder: Path) -> None:
    """Every kernel of the package: in the types of a checkpoint and of streamed experts, with and without residency."""
    build = kernels.build_cuda
    build_graphs(fused(load(mtp=True, dtype="bfloat16")[0]))
    staged = partial(StagedSlots, build=build)
    build_graphs(fused(streamed(checkpoint(folder, "qwen3_next", "stacked"), 4, kind=staged)))
    resident, kinds, tables = mx.zeros(16, mx.bool_), mx.zeros(2, mx.bool_), np.ones((2, 2, 4), np.float32)
    for dtype in (mx.float32, mx.bfloat16):
        logits = mx.zeros((2, 16), dtype)
        likeliest(logits, build=build)
        x, pairs = mx.zeros((1, 1, 64), dtype), mx.zeros((1, 1, 4, 64))
        experts_mix(pairs, mx.zeros((1, 1, 4)), None, Passing(x, None, logits, False), build)
        for router in get_args(kernels.Router):
            for given in ((None, None, None), (resident, tables, kinds)):
                ids, _ = kernels.route_select(logits, *given, top_k=4, router=router, build=build)
                kernels.route_fused(logits, *given, top_k=4, router=router, build=build)
                kernels.group_plan(ids, given[0], expert_count=16, build=build)
    empty_kernel(2, build)(mx.zeros((2, 16)))


def test_everything_is_launched(compiler: Compiler, tmp_path: Path) -> None:
    with cuda.compiling_ahead():
        launch_everything(tmp_path / "m")
    launched = {name.removeprefix("strata_").rpartition("_")[0] for name in compiler.compiled}
    assert launched == {file.stem for file in kernels.folder().glob("*.metal")}
    assert len(set(compiler.compiled)) == len(compiler.compiled)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_every_kernel_compiles(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        nvrtc = cuda.nvrtc()
    except OSError as error:
        # They exist for Linux on x86-64 only; there the extra `dev` brings them.
        pytest.skip(f"{error}: install nvidia-cuda-nvrtc, nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl")
    with pytest.raises(Fault, match=r"kernel k does not compile for sm_\d+a?: k.cu\(1\): error: "):
        nvrtc.compile("k", "this is no kernel", architecture)
    monkeypatch.setattr(cuda, "architecture", lambda: architecture)
    with cuda.compiling_ahead() as ahead:
        launch_everything(tmp_path / "m")
    assert all(future.result()[:4] == b"\x7fELF" for future in ahead.futures.values())


def test_memory_stays_with_the_host_where_the_driver_does_that(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, advice = np.zeros(4, np.uint32), []

    class Driver:
        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = 2
            return 0

        def cuMemAdvise(self, *given: Any) -> int:
            advice.append([value if isinstance(value, int) else value.value for value in given])
            return 1  # a refusal changes nothing

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    cuda.stay_on_host(memory)
    assert advice == [[memory.ctypes.data, 16, *each] for each in ((3, -1), (5, 0), (5, 1))]

    def missing(name: str) -> None:
        raise OSError(f"no {name}")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda.stay_on_host(memory)
