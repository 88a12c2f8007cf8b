"""Compiles kernels for the test host, each text once, into a cache outside the repository."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from strata_mlx.errors import Fault, StrataError

HERE = Path(__file__).parent
DIALECT = HERE.parents[1] / "kernels" / "dialect"

FLAGS = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",  # it takes a jump between fibers for a mistake
]
SANITIZE = [
    "-g1",
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fsanitize-sections=threadgroup",
]


class KernelError(StrataError):
    """A kernel does not compile, or did what none may do; the message names kernel and threads."""


@cache
def load(path: Path, everywhere: bool) -> ctypes.CDLL:
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL if everywhere else ctypes.RTLD_LOCAL)


@cache
def compiler() -> tuple[str, str]:
    """The C++ compiler and what it says about its version."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        if path := shutil.which(name):
            return path, subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    raise Fault("the test host needs a C++ compiler and found none: install g++ or clang++, or set CXX")


@cache
def _build_folder() -> Path:
    folder = Path(os.environ.get("STRATA_HOST_CACHE") or Path(tempfile.gettempdir()) / f"strata-host-{os.getuid()}")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():  # what lies there is loaded as code
        raise Fault(f"{folder} belongs to another user: set STRATA_HOST_CACHE to a folder of your own")
    return folder


@cache
def _fixed_text() -> str:
    return "".join(
        path.read_text() for path in [*sorted(HERE.glob("*.h")), *sorted(HERE.glob("*.cpp")), DIALECT / "host.h"]
    )


@cache
def machine() -> Path:
    return _build("machine", "", [*FLAGS, "-fvisibility=default", "-shared", str(HERE / "machine.cpp")])


@cache
def _sanitized_machine() -> Path:
    sources = [str(HERE / "machine.cpp"), str(HERE / "main.cpp")]
    return _build("machine-sanitized", "", [*FLAGS, *SANITIZE, "-r", "-nostdlib", *sources])


@cache
def compile_kernel(name: str, text: str, sanitize: bool = False) -> Path:
    if sanitize:
        return _build(name, text, [*FLAGS, *SANITIZE, str(_sanitized_machine())])
    return _build(name, text, [*FLAGS, "-shared"])


def _build(name: str, text: str, arguments: list[str]) -> Path:
    """Compiles ``text``, once per text, flags and compiler; builders at the same time agree by renaming."""
    cxx, version = compiler()
    identity = "\0".join([version, *arguments, _fixed_text(), text])
    built = _build_folder() / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"
    if built.exists():
        return built
    with tempfile.TemporaryDirectory(dir=_build_folder()) as scratch:
        source = []
        if text:
            path = Path(scratch, "kernel.cpp")
            path.write_text(text)
            source = [str(path)]
        made = Path(scratch, "built")
        command = [cxx, *arguments, *source, f"-I{HERE}", f"-I{DIALECT}", "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise KernelError(f"kernel {name} does not compile:\n{done.stderr.replace(scratch, '').strip()}")
        made.replace(built)
    return built
