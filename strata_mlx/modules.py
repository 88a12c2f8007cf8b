"""MLX's cache of compiled CUDA modules, and a short text by which it finds one of ours there.

At every launch of a precompiled kernel MLX hashes the code that it was given, 0.18 microseconds per kilobyte, to look
the module up; before it loads that code, it looks in its cache for a file named after the kernel and the hash. So the
code lies there, and what is hashed at every launch is a short key. Whether that works with the MLX in use is tried
once; if not, the code itself is given.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from .folders import write_whole

MLX_FOLDER = "MLX_PTX_CACHE_DIR"  # what MLX reads from the environment when it first compiles
_WORD = (1 << 64) - 1
_FACTOR, _SEED = 0xC6A4A7935BD1E995, 0xC70F6907
_PROBE = 'extern "C" __global__ void strata_probe(const float* x, float* y) { y[0] = x[0] + 1; }'


def shorthand(name: str, code: bytes, folder: Path) -> bytes | None:
    """What stands for ``code``, a kernel's module, once it lies in ``folder``, MLX's cache; None if it cannot be put
    there.
    """
    key = hashlib.sha256(code).hexdigest()[:24].encode()
    path = folder / f"{name}_{std_hash(key):x}.ptx"
    try:
        if not (path.exists() and path.read_bytes() == code):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path.with_suffix(".txt"), f"{name}\t{name}\n".encode())
            write_whole(path, code)
    except OSError:
        return None
    return key


def works(compile_text: Callable[[str, str], bytes], folder: Path) -> bool:
    """Whether MLX runs a kernel that it is given by its shorthand. compile_text: of a name and a text."""
    key = shorthand("strata_probe", compile_text("strata_probe", _PROBE), folder)
    if key is None:
        return False
    try:
        (y,) = mx.fast.precompiled_cuda_kernel(
            name="strata_probe",
            compiled_source=key,
            inputs=[mx.array([1.0])],
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
            scalars=[],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
        return bool(y.item() == 2.0)
    except RuntimeError:  # it looked elsewhere, and took the key for code
        return False


@cache
def mlx_cache() -> Path:
    """Where MLX keeps what it compiles: it looks at the variable once."""
    default = Path(tempfile.gettempdir()) / "mlx" / version("mlx") / "ptx"
    return Path(os.environ.get(MLX_FOLDER) or default)


def std_hash(key: bytes) -> int:
    """``std::hash<std::string>`` of libstdc++, of whole words: MurmurHash64A."""
    assert len(key) % 8 == 0
    value = _SEED ^ len(key) * _FACTOR & _WORD
    for at in range(0, len(key), 8):
        word = int.from_bytes(key[at : at + 8], "little") * _FACTOR & _WORD
        value = (value ^ (_mixed(word) * _FACTOR & _WORD)) * _FACTOR & _WORD
    return _mixed(_mixed(value) * _FACTOR & _WORD)


def _mixed(word: int) -> int:
    return word ^ word >> 47
