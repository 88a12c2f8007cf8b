"""How a device is read best: measured at first use, remembered by device, chosen by what a model asks for."""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import InputError
from ..folders import cache_folder, write_whole
from .probe import BLOCKS, Rate, cells, measure, passes

THREADS_VARIABLE = "STRATA_MLX_READ_THREADS"
DIRECT_VARIABLE = "STRATA_MLX_READ_DIRECT"
_QUICK = 1.5  # seconds that measuring takes when a model is loaded for the first time
_LONG = 10.0  # and when somebody asks for it
_MAX_THREADS = 64
_WORTH_MEASURING = 64 << 20  # bytes of experts: less is in the page cache at once
_SMALL = 128 << 10  # bytes of one read: below, handing it to a thread costs more than a cached one
_ENOUGH = 0.9  # of the best rate: more threads than that takes only keep cores busy
# Of those that read experts, one copies or casts what it has read, and those that wait for the disk cost little: packed
# experts came a third faster with four than with two, tried by hand on one disk.
_MORE, _LEAST = 1, 4  # threads than a disk needs, and at the least
_DIRECT_GAIN = 1.1  # of direct reads, which give up the page cache


@dataclass(frozen=True)
class DiskSettings:
    """threads: that read at a time, the one that waits among them. direct: past the page cache, where possible."""

    threads: int = 1
    direct: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= _MAX_THREADS:
            raise InputError(f"{self.threads} threads to read with: choose from 1 to {_MAX_THREADS}")


@dataclass(frozen=True)
class Workload:
    """What a model asks of a disk: files to read from, bytes of a typical read, and bytes of all experts."""

    files: tuple[Path, ...]
    request: int
    total: int

    @property
    def cached(self) -> bool:
        """Whether the experts are small enough to stay in the page cache: half of the machine's memory."""
        return self.total <= _memory() // 2


def settings_for(workload: Workload, environ: Mapping[str, str] = os.environ) -> DiskSettings:
    """The settings for a model: the environment's, else by what was measured on this device, now or earlier.

    Raises InputError for a wrong variable.
    """
    if DIRECT_VARIABLE in environ or THREADS_VARIABLE in environ:
        return _from_environment(environ)
    if workload.total < _WORTH_MEASURING:
        return DiskSettings()
    rates = recall(workload.files[0])
    if rates is None:
        rates = measure(workload.files, _QUICK)
        remember(workload.files[0], rates)
    return choose(rates, workload)[0]


def inspect_disk(workload: Workload, progress: bool = True) -> dict[str, Any]:
    """Measure the disk with a model's files at length and remember the result; a JSON-ready report."""
    number = passes(workload.files, _LONG) * len(cells(workload.files))
    with tqdm(total=number, unit="measurement", desc="Reading", disable=not progress, leave=False) as bar:
        rates = measure(workload.files, _LONG, bar.update)
    remember(workload.files[0], rates)
    settings, reason = choose(rates, workload)
    return {
        "device": device_of(workload.files[0]),
        "request": workload.request,
        "rates": [asdict(rate) for rate in rates],
        "chosen": asdict(settings),
        "reason": reason,
    }


def choose(rates: Sequence[Rate], workload: Workload) -> tuple[DiskSettings, str]:
    """The settings that ``rates`` speak for, and why."""
    block = min(BLOCKS, key=lambda size: max(size, workload.request) / min(size, workload.request))
    table = {(r.cached, r.direct, r.threads): r.bytes_per_second for r in rates if r.block == block}

    def best(cached: bool, direct: bool, most: int = _MAX_THREADS) -> tuple[int, float]:
        """The fewest threads that reach nearly the highest rate, and theirs."""
        row = {n: rate for (*kind, n), rate in table.items() if kind == [cached, direct] and n <= most}
        enough = min(n for n, rate in row.items() if rate >= _ENOUGH * max(row.values()))
        return enough, row[enough]

    if workload.cached:
        if workload.request < _SMALL:
            return DiskSettings(), "the experts fit in the page cache, and handing over such small reads costs more"
        cores = os.cpu_count() or 1  # copying is work for them
        threads = max(best(True, False, cores)[0], best(False, False, cores)[0])
        return DiskSettings(threads), "the experts fit in the page cache; threads for the first time that they are read"
    threads, rate = best(False, False)
    if any(direct for _, direct, _ in table):
        direct_threads, direct_rate = best(False, True)
        if direct_rate > _DIRECT_GAIN * rate:
            reason = "the experts do not fit in the page cache, and reading past it is faster"
            return DiskSettings(max(_LEAST, direct_threads + _MORE), True), reason
    reason = "the experts do not fit in the page cache, and still more threads would gain nothing"
    return DiskSettings(max(_LEAST, threads + _MORE)), reason


def recall(file: Path, memory: Path | None = None) -> list[Rate] | None:
    """What was measured on the device that holds ``file``; None if nothing was."""
    path = memory or _memory_file()
    try:
        rates = json.loads(path.read_text(encoding="utf-8"))[device_of(file)]
        return [Rate(**rate) for rate in rates] or None
    except (FileNotFoundError, KeyError):
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _warn(f"{path}: cannot be read ({error}); the disk is measured again")
        return None


def remember(file: Path, rates: Sequence[Rate], memory: Path | None = None) -> None:
    """Keep ``rates`` for the device that holds ``file``; only a warning where that is not possible."""
    path = memory or _memory_file()
    known: Any = {}
    with suppress(OSError, ValueError):  # there is none, or recall() has said what is wrong with it
        known = json.loads(path.read_text(encoding="utf-8"))
    known = {**known} if isinstance(known, dict) else {}
    known[device_of(file)] = [asdict(rate) for rate in rates]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(known, indent=1).encode())
    except OSError as error:
        _warn(f"{path}: cannot be written ({error.strerror}); the disk is measured again at the next start")


def device_of(file: Path) -> str:
    """A name for the device that holds ``file`` which lasts: host, device number and, on Linux, what is mounted."""
    number = os.stat(file).st_dev
    name = f"{platform.node()} {os.major(number)}:{os.minor(number)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return name
    for mount in mounts:
        fields, _, source = mount.partition(" - ")
        if fields.split()[2] == f"{os.major(number)}:{os.minor(number)}":
            return f"{name} {' '.join(source.split()[:2])}"
    return name


def _from_environment(environ: Mapping[str, str]) -> DiskSettings:
    settings = DiskSettings()
    if (threads := environ.get(THREADS_VARIABLE)) is not None:
        if not threads.isdecimal():
            raise InputError(f"{THREADS_VARIABLE}={threads!r}: expected a whole number from 1 to {_MAX_THREADS}")
        settings = replace(settings, threads=int(threads))
    if (direct := environ.get(DIRECT_VARIABLE)) is not None:
        if direct not in ("0", "1"):
            raise InputError(f"{DIRECT_VARIABLE}={direct!r}: expected 0 or 1")
        settings = replace(settings, direct=direct == "1")
    return settings


def _memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_file() -> Path:
    return cache_folder() / "disks.json"


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
