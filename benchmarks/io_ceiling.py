"""How near reading experts into slots comes to the best that raw positional reads of the same files reach.

    python benchmarks/io_ceiling.py [--model FOLDER] [--json] [--keep NAME]

Ours: ExpertStore.start() and wait(), ten random experts at a time, the next ten started before the last are waited for,
into slots as a model has them in memory that host and device share; without a cast, as on Metal and for float32
checkpoints, and with the cast of bfloat16 scales to float32 that the CPU needs. Raw: positional reads of random aligned
blocks, as large as an expert or 8 MiB, by 1 to 8 threads, through the page cache or past it, into as much memory, which
is more than a processor caches. The three fastest kinds are then measured again, taking turns with ours, and the best
median counts. So are bare positional reads of the very ranges that random experts lie in, through the page cache, with
as many threads as ours: what is left for anybody who needs experts from there. Cold, ours may come before these, since
it reads past the page cache or has the disk begin with all ranges of an expert at once. Bytes are those on disk. Cold
means that all pages of the files were dropped from the page cache before each measurement (sync, POSIX_FADV_DONTNEED)
and that nothing is read twice in it; warm means that the files have just been read.

Without --model, a synthetic checkpoint is written to a temporary folder; it is measured as it is and packed.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from mmap import mmap
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from benchmarks.make_synthetic import SHAPES, make_synthetic
from strata_mlx.checkpoint import Checkpoint
from strata_mlx.checkpoint.convert import Conversion, convert
from strata_mlx.experts import ExpertStore, Reads
from strata_mlx.experts.disk import choose, device_of
from strata_mlx.experts.files import PAGE, memory_at
from strata_mlx.experts.probe import measure
from strata_mlx.experts.ranges import Layer, find_layers, workload
from strata_mlx.experts.slots import Targets, UnifiedSlots
from strata_mlx.models.moe import blocks
from strata_mlx.models.plan import ModelPlan, plan_model

AT_A_TIME = 10  # experts: those of a token
ROOM = 256 << 20  # bytes of memory that is read into: a few times what a processor's cache holds
MOST_SLOTS = 2048
LARGE = 8 << 20
Setting = tuple[int, int, bool]  # block size, threads, and whether to read past the page cache
Range = tuple[int, int, NDArray[Any]]  # file, offset, and memory for what lies there
BEST = 3  # kinds of raw reads that are measured again


def compare(plan: ModelPlan, seconds: float, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each of cold and warm, with and without cast."""
    layers, files = find_layers(plan, None)
    job = workload(layers, files)
    os.sync()
    rates = measure(job.files, 5.0)
    # Experts that do not fit in the page cache are read cold, those that fit are read warm.
    cold, warm = (choose(rates, replace(job, total=total))[0] for total in (1 << 60, 1))
    for is_cold, cast in itertools.product((True, False), (None, mx.float32)):
        settings = cold if is_cold else warm
        with ExpertStore.open(plan, cast, settings) as store:
            slots = make_slots(store, plan)
            room = sum(len(of_layer) * store.expert_bytes(layer) for layer, of_layer in enumerate(slots))
            ranges = ranges_of(layers, len(slots[0]))

            def timed(read: Callable[..., float], *given: Any, seed: int = 0, cold: bool = is_cold) -> float:
                if cold:
                    prepare(job.files, cold)
                return read(*given, seconds, seed)

            prepare(job.files, is_cold)
            kinds = [setting for setting in raw_settings(expert_bytes(plan)) if is_cold or not setting[2]]
            screened = {setting: timed(read_raw, job.files, room, setting) for setting in kinds}
            raw: dict[Setting, list[float]] = {
                setting: [] for setting in sorted(screened, key=lambda setting: -screened[setting])[:BEST]
            }
            ours, bare = [], []
            for seed in range(rounds):
                ours.append(timed(read_experts, store, slots, plan.args.num_experts, seed=seed))
                bare.append(timed(read_ranges, job.files, ranges, settings.threads, seed=seed))
                for setting, rates_of in raw.items():
                    rates_of.append(timed(read_raw, job.files, room, setting, seed=seed))
        medians = {setting: median(values) for setting, values in raw.items()}
        best = max(medians, key=medians.__getitem__)
        yield {
            "cache": "cold" if is_cold else "warm",
            "cast": "float32" if cast else "none",
            "settings": asdict(settings),
            "ours": median(ours),
            "raw": medians[best],
            "raw_best": dict(zip(("block", "threads", "direct"), best, strict=True)),
            "ratio": median(ours) / medians[best],
            "ranges": median(bare),
            "ratio_of_ranges": median(bare) / medians[best],
            "ratio_to_ranges": median(ours) / median(bare),
            "ours_all": ours,
            "raw_all": raw[best],
        }


def make_slots(store: ExpertStore, plan: ModelPlan) -> list[list[Targets]]:
    """By layer: each has its own, which begin where its files have them."""
    layers, slots = range(len(store.layers)), []
    count = max(2 * AT_A_TIME, min(MOST_SLOTS, ROOM // sum(map(store.expert_bytes, layers))))
    for layer, block in zip(layers, blocks(plan.model), strict=True):
        slots.append(UnifiedSlots(block.switch_mlp, store.fields(layer), count).write(range(count)))
    return slots


def expert_bytes(plan: ModelPlan) -> int:
    """On disk."""
    layers, _ = find_layers(plan, None)
    return sum(run.nbytes for run in layers[0].runs[0])


def read_experts(
    store: ExpertStore, slots: Sequence[Sequence[Targets]], experts: int, seconds: float, seed: int
) -> float:
    """Bytes per second, of experts in random order."""
    rng, turns, nbytes = random.Random(seed), [itertools.cycle(of_layer) for of_layer in slots], 0
    orders = [rng.sample(range(experts), experts) for _ in store.layers]
    pending: Reads | None = None
    start = time.perf_counter()
    for first in range(0, experts - AT_A_TIME + 1, AT_A_TIME):
        for layer, order in enumerate(orders):
            jobs = [(expert, next(turns[layer])) for expert in order[first : first + AT_A_TIME]]
            started = store.start(layer, jobs)
            if pending:
                pending.wait()
                nbytes += pending.nbytes
                if time.perf_counter() > start + seconds:
                    started.drain()  # as raw reads that have begun are waited for, and count
                    return (nbytes + started.nbytes) / (time.perf_counter() - start)
            pending = started
    assert pending
    pending.wait()
    return (nbytes + pending.nbytes) / (time.perf_counter() - start)


def ranges_of(layers: Sequence[Layer], slots: int) -> list[list[Range]]:
    """By expert of each layer, where its parts lie, and memory for them; of each layer for so many experts."""
    found = []
    for layer in layers:
        memory = []
        for run in layer.runs[0]:
            pool = memory_at(run.offset % PAGE, slots * run.nbytes)
            pool[...] = 0  # pages are there before they are read into, as those of slots
            memory.append(pool.reshape(slots, -1))
        turns = itertools.cycle(zip(*memory, strict=True))
        for expert, runs in enumerate(layer.runs):
            places = zip(runs, next(turns), strict=True)
            found.append([(run.file, run.offset + expert * run.stride, into) for run, into in places])
    return found


def read_ranges(
    files: tuple[Path, ...], experts: Sequence[Sequence[Range]], threads: int, seconds: float, seed: int
) -> float:
    """Bytes per second, of the ranges of experts in random order."""
    with ExitStack() as stack:
        descriptors = [os.open(file, os.O_RDONLY) for file in files]
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        order = random.Random(seed).sample(experts, len(experts))

        def read(expert: Sequence[Range]) -> int:
            return sum([os.preadv(descriptors[file], [into.data], offset) for file, offset, into in expert])

        return in_threads(read, order, threads, seconds)


def in_threads(read: Callable[[Any], int], jobs: Sequence[Any], threads: int, seconds: float) -> float:
    """Bytes per second of ``read``, which returns bytes, on jobs that so many threads share, until the time is up."""
    counts = [0] * threads
    start = time.perf_counter()

    def run(number: int) -> None:
        for turn in range(number, len(jobs), threads):
            counts[number] += read(jobs[turn])
            if time.perf_counter() > start + seconds:
                return

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - start)


def raw_settings(expert: int) -> list[Setting]:
    blocks = (max(4096, expert & -4096), LARGE)
    return list(itertools.product(blocks, (1, 2, 4, 8), (False, True) if hasattr(os, "O_DIRECT") else (False,)))


def read_raw(files: tuple[Path, ...], room: int, setting: Setting, seconds: float, seed: int) -> float:
    """Bytes per second, of blocks in random order, into ``room`` bytes of memory."""
    block, threads, direct = setting
    with ExitStack() as stack:
        rooms = [mmap(-1, block) for _ in range(max(threads, room // block))]
        for memory in rooms:
            memory[:] = bytes(block)
        turns, places = itertools.cycle(rooms), []
        for file in files:
            descriptor = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            stack.callback(os.close, descriptor)
            places += [(descriptor, offset) for offset in range(0, file.stat().st_size - block + 1, block)]
        random.Random(seed).shuffle(places)
        jobs = [(descriptor, [next(turns)], offset) for descriptor, offset in places]
        return in_threads(lambda job: os.preadv(*job), jobs, threads, seconds)


def prepare(files: tuple[Path, ...], cold: bool) -> None:
    """Drop the files, which are on disk, from the page cache, or see that they are in it."""
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            if cold:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                room = bytearray(LARGE)
                while opened.readinto(room):
                    pass


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, help="a folder to measure instead of a synthetic checkpoint")
    parser.add_argument("--layers", type=int, default=4, help="of the synthetic checkpoint")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each measurement")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model or Path(temporary) / "synthetic"
        if not args.model:
            make_synthetic(next(iter(SHAPES)), args.layers, folder, progress=not args.json)
        packed = Path(temporary) / "packed"
        plans = {"as stored": plan_model(Checkpoint.open(folder))}
        convert(Conversion(plans["as stored"], pack=True), packed, progress=not args.json)
        plans["packed"] = plan_model(Checkpoint.open(packed))
        device = device_of(folder)
        for layout, plan in plans.items():
            for row in compare(plan, args.seconds, args.rounds):
                rows.append({"layout": layout, "expert_bytes": expert_bytes(plan), **row})
                if not args.json:
                    print(report.table([_shown(rows[-1])], _COLUMNS), flush=True)
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "device": device.split(" ", 1)[1]}
    result = {**machine, "seconds": args.seconds, "rounds": args.rounds, "rows": rows}
    if not report.publish(result, args):
        print(report.table(map(_shown, rows), _COLUMNS))


_COLUMNS = (
    *("layout", "cache", "cast", "threads", "direct", "ours GB/s", "raw GB/s", "ratio"),
    *("ratio_of_ranges", "ratio_to_ranges"),
)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **row["settings"], "ours GB/s": row["ours"] / 1e9, "raw GB/s": row["raw"] / 1e9}


if __name__ == "__main__":
    main()
