"""What the operating system says about memory: that of this process, and what is left for it."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # what control groups of version 1 say for no limit is larger
_RUSAGE_INFO_V4 = 4
# Fields of macOS' rusage_info_v4, as 64-bit words after the 16 bytes of the identifier.
_PHYS_FOOTPRINT, _LIFETIME_MAX_PHYS_FOOTPRINT = 7, 28


def footprint() -> int:
    """Bytes of memory that this process has now: resident pages on Linux, the physical footprint on macOS."""
    if sys.platform == "darwin":
        return _rusage_word(_PHYS_FOOTPRINT)
    return int((PROC / "self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """The most bytes that this process has had, of what footprint() counts."""
    if sys.platform == "darwin":
        return _rusage_word(_LIFETIME_MAX_PHYS_FOOTPRINT)
    for line in (PROC / "self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total() -> int:
    """Bytes of memory that the machine has, or that the control group of this process may have."""
    limits = [limit for limit, _ in _cgroup_limits()]
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *limits])


def available() -> int:
    """Bytes that the system can still give without swapping, within the limits of this process' control groups."""
    if sys.platform == "darwin":
        return total() * _sysctl("kern.memorystatus_level") // 100
    fields = dict(line.split(":") for line in (PROC / "meminfo").read_text().splitlines())
    return min([int(fields["MemAvailable"].split()[0]) * 1024, *(limit - used for limit, used in _cgroup_limits())])


def memory_stalls() -> float | None:
    """Percent of the last ten seconds in which some process waited for memory; None where the kernel does not say."""
    try:
        words = (PROC / "pressure/memory").read_text().split()
    except OSError:
        return None
    return next((float(word[6:]) for word in words if word.startswith("avg10=")), None)


def cgroup_high_events() -> int:
    """How often the kernel has throttled this process' control groups for being above their memory.high."""
    count = 0
    for folder, _ in _cgroups():
        try:
            words = (folder / "memory.events").read_text().split()
        except OSError:
            continue
        count += int(words[words.index("high") + 1])
    return count


def vm_pressure_level() -> int:
    """macOS' memory pressure: 1 normal, 2 warning, 4 critical."""
    return _sysctl("kern.memorystatus_vm_pressure_level")


def on_gpu_of_its_own() -> bool:
    """Whether MLX computes in the memory of a GPU, apart from the process' own."""
    return bool(mx.default_device() == mx.gpu) and not mx.metal.is_available()


def trim() -> None:
    """Give memory that is free but still with this process back to the system, where its allocator keeps some."""
    if (release := _malloc_trim()) is not None:
        release(0)


@functools.cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each control group with a limit that this process is in. Files in the page cache
    that can be dropped at once count as free.
    """
    for folder, names in _cgroups():
        try:
            limit, used = (int((folder / name).read_text()) for name in names[:2])
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # the root has no such files, and "max" is no limit
            continue
        if limit < _UNLIMITED:
            yield limit, max(0, used - int(statistics.get(names[2], 0)))


def _cgroups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of this process' control groups and of those around them, with the names of their files."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        # Inside a container the path may be that of the host: then only the root is there.
        yield from ((each, names) for each in (folder, *folder.parents) if each == root or root in each.parents)


def _sysctl(name: str) -> int:
    """A number that macOS' sysctl has under ``name``."""
    value, size = ctypes.c_uint64(), ctypes.c_size_t(8)
    if ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
        raise OSError(f"sysctl has no {name}")
    return value.value


def _rusage_word(index: int) -> int:
    words = (ctypes.c_uint64 * 64)()
    if ctypes.CDLL(None).proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V4, ctypes.byref(words)) != 0:
        raise OSError("proc_pid_rusage failed")
    return words[2 + index]
