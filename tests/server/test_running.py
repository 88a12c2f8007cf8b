"""What a server asks of its process."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys

import pytest

# Threads that all have memory of the C library at the same time, and its own account of its heaps.
HEAPS = """
import ctypes, sys, threading
from strata_mlx.server.running import share_heaps
if sys.argv[1] == "share":
    share_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = ctypes.c_int, ctypes.c_void_p
libc.fclose.argtypes = (ctypes.c_void_p,)
together = threading.Barrier(8)
def work():
    together.wait(60)
    assert libc.malloc(ctypes.c_size_t(100_000))
    together.wait(60)
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
out = libc.fopen(b"/dev/stdout", b"w")
libc.malloc_info(0, out)
libc.fclose(out)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="the C library is not glibc")
@pytest.mark.parametrize(("asked", "shared"), [("share", True), ("not", False)])
def test_threads_share_heaps(asked: str, shared: bool) -> None:
    command = [sys.executable, "-c", HEAPS, asked]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert (len(re.findall("<heap nr=", told)) <= 2) == shared
