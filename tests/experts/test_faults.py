"""Whatever happens to a read: a clear error or the right bytes, and never a thread that hangs."""

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from strata_mlx.errors import CheckpointError, Fault
from strata_mlx.experts import DiskSettings, ExpertStore, Reads, files
from strata_mlx.models.plan import ModelPlan
from tests.errors import refuses
from tests.experts.memory import equal, expert_of, loaded, make_room, plan
from tests.tiny import make_checkpoint

SETTINGS = [DiskSettings(1), DiskSettings(3), DiskSettings(2, direct=True)]
EXPERTS = (6, 1, 4)
READS = 3 * len(EXPERTS)  # an expert has three tensors
Read = Callable[..., int]


@pytest.fixture
def model(tmp_path: Path) -> ModelPlan:
    folder = make_checkpoint(tmp_path / "model", dtype=mx.bfloat16, shards=1)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    return plan(folder)


@pytest.fixture(params=SETTINGS, ids=str)
def store(model: ModelPlan, request: pytest.FixtureRequest) -> Any:
    with ExpertStore.open(model, mx.float32, request.param) as store:
        yield store


def weights(model: ModelPlan) -> Path:
    return model.checkpoint.path / "model.safetensors"


def start(store: ExpertStore) -> tuple[Reads, list[tuple[int, list[NDArray[Any]]]]]:
    jobs = [(expert, make_room(store, 1)) for expert in EXPERTS]
    return store.start(1, jobs), jobs


def check(store: ExpertStore, model: ModelPlan, jobs: list[tuple[int, list[NDArray[Any]]]], failed: list[int]) -> None:
    """Everything that is not said to have failed is there."""
    parameters = loaded(model, mx.float32)
    for expert, into in jobs:
        if expert not in failed:
            assert all(map(equal, into, expert_of(store, 1, expert, parameters)))


def on_read(monkeypatch: pytest.MonkeyPatch, number: int, act: Read) -> None:
    """Let ``act`` take the place of read ``number``, which is counted from 0 over all threads; None: of each."""
    lock, count, original = threading.Lock(), iter(range(10**9)), os.preadv

    def pread_into(*arguments: Any) -> int:
        with lock:
            mine = next(count)
        return (act if mine == number else original)(*arguments)

    monkeypatch.setattr(files, "pread_into", pread_into)


def fail(code: int) -> Read:
    def act(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    return act


@pytest.mark.parametrize("number", range(READS))
def test_an_error_at_any_read_is_one_fault(
    model: ModelPlan, store: ExpertStore, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_read(monkeypatch, number, fail(errno.EIO))
    reads, jobs = start(store)
    with refuses(Fault, weights(model), "layers.1.mlp.experts.", "byte ", "Input/output error"):
        reads.wait()
    assert len(reads.failed) == 1
    reads.drain()
    check(store, model, jobs, reads.failed)
    again, jobs = start(store)
    again.wait()
    assert again.failed == []
    check(store, model, jobs, [])


def test_the_fault_names_tensor_expert_and_byte(model: ModelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    entry = model.checkpoint.tensors[name]
    original = os.preadv

    def pread_into(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if offset <= entry.start < offset + sum(buffer.nbytes for buffer in buffers):
            raise OSError(errno.EIO, "broken")
        return original(descriptor, buffers, offset, flags)

    monkeypatch.setattr(files, "pread_into", pread_into)
    with ExpertStore.open(model, mx.float32) as store:
        with refuses(Fault, repr(name), "expert 4", f"byte {entry.start}", "broken"):
            store.read(1, 4, make_room(store, 1))
        store.read(1, 5, make_room(store, 1))


@pytest.mark.parametrize("number", range(READS))
@pytest.mark.parametrize("kind", ["interrupted", "nothing", "one byte", "some bytes"])
def test_a_read_that_ends_early_goes_on(
    model: ModelPlan, store: ExpertStore, number: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = {"nothing": 0, "one byte": 1, "some bytes": 5001}.get(kind, 0)

    def less(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if kind == "interrupted":
            raise InterruptedError(errno.EINTR, "interrupted")
        got = os.preadv(descriptor, buffers, offset, flags)
        for buffer in buffers:
            np.asarray(buffer).reshape(-1)[most // buffer.itemsize + 1 :] = 0
        return min(most, got)

    on_read(monkeypatch, number, less)
    reads, jobs = start(store)
    reads.wait()
    assert reads.failed == []
    check(store, model, jobs, [])


def test_every_read_may_be_short(model: ModelPlan, store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def pread_into(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        got, rest = os.preadv(descriptor, buffers, offset, flags), 999
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            view[rest:] = bytes(max(0, len(view) - rest))
            rest = max(0, rest - len(view))
        return min(got, 999)

    monkeypatch.setattr(files, "pread_into", pread_into)
    reads, jobs = start(store)
    reads.wait()
    check(store, model, jobs, [])


def test_a_file_cut_short_while_in_use_is_one_fault(model: ModelPlan, store: ExpertStore) -> None:
    entry = model.checkpoint.tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    os.truncate(weights(model), entry.start + 100)
    with refuses(Fault, weights(model), entry.name, f"byte {entry.start + 100}", "cut short while in use"):
        store.read(1, 4, make_room(store, 1))
    reads, _ = start(store)
    with refuses(Fault, weights(model)):
        reads.wait()
    assert 4 in reads.failed


def test_an_intact_part_of_a_file_that_was_cut_short_is_not_trusted(model: ModelPlan, store: ExpertStore) -> None:
    os.truncate(weights(model), weights(model).stat().st_size - 1)
    reads, _ = start(store)
    with refuses(Fault, weights(model), "changed while in use"):
        reads.wait()
    assert sorted(reads.failed) == sorted(EXPERTS)
    with refuses(Fault, weights(model), "changed while in use"):
        store.read(0, 0, make_room(store, 0))


def test_a_file_overwritten_in_place_is_not_trusted(model: ModelPlan, store: ExpertStore) -> None:
    start(store)[0].wait()
    with open(weights(model), "r+b") as file:
        file.seek(model.checkpoint.tensors["model.layers.1.mlp.experts.4.up_proj.weight"].start)
        file.write(b"other")
    reads, _ = start(store)
    with refuses(Fault, weights(model), "changed while in use"):
        reads.wait()
    assert sorted(reads.failed) == sorted(EXPERTS)


def test_a_file_replaced_in_its_folder_is_still_the_old_one(model: ModelPlan, store: ExpertStore) -> None:
    parameters = loaded(model, mx.float32)
    mx.eval(list(parameters.values()))
    other = weights(model).with_name("other")
    other.write_bytes(bytes(weights(model).stat().st_size))
    os.replace(other, weights(model))
    reads, jobs = start(store)
    reads.wait()
    for expert, into in jobs:
        assert all(map(equal, into, expert_of(store, 1, expert, parameters)))
    weights(model).unlink()
    store.read(1, 2, make_room(store, 1))


def test_a_file_that_became_shorter_than_its_header_says_is_refused(model: ModelPlan) -> None:
    os.truncate(weights(model), weights(model).stat().st_size // 2)
    with refuses(CheckpointError, weights(model), "cut short"):
        ExpertStore.open(model, mx.float32)


def test_a_file_that_cannot_be_opened_is_a_fault(model: ModelPlan) -> None:
    weights(model).unlink()
    with refuses(Fault, weights(model), "No such file"):
        ExpertStore.open(model, mx.float32)


@pytest.mark.parametrize("at", ["open", "read"])
def test_where_direct_reads_do_not_work_the_page_cache_does(
    model: ModelPlan, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    originals = os.open, os.preadv
    direct = set()

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if at == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads here")
        descriptor = originals[0](path, flags, *rest)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def pread_into(descriptor: int, *rest: Any) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "larger blocks, please")
        return originals[1](descriptor, *rest)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(files, "pread_into", pread_into)
    with ExpertStore.open(model, mx.float32, DiskSettings(direct=True)) as store:
        reads, jobs = start(store)
        reads.wait()
        check(store, model, jobs, [])


# Interruption, and what is in flight


class Gate:
    """Holds up the first read of a pool thread until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any] = lambda: None):
        self.reached, self.opened = threading.Event(), threading.Event()
        self.ended: list[str] = []
        original, main = os.preadv, threading.current_thread()

        def pread_into(*arguments: Any) -> int:
            if threading.current_thread() is main or self.reached.is_set():
                return original(*arguments)
            self.reached.set()
            act()
            self.opened.wait()
            got = original(*arguments)
            self.ended.append("read")
            return got

        monkeypatch.setattr(files, "pread_into", pread_into)

    def end_after(self, call: Callable[[], Any]) -> None:
        """Open the gate while another thread is in ``call``, which must end after the read."""

        def run() -> None:
            call()
            self.ended.append("call")

        thread = threading.Thread(target=run)
        thread.start()
        assert self.ended == []
        self.opened.set()
        thread.join()
        assert self.ended == ["read", "call"]


@contextmanager
def handled(number: int, by: Callable[..., None]) -> Iterator[None]:
    """Have a signal handled ``by`` something else."""
    before = signal.signal(number, by)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_ctrl_c_while_waiting_leaves_reads_to_drain(model: ModelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, taken = threading.Event(), threading.Event()

    def interrupt() -> None:
        waiting.wait()
        while not taken.wait(0.1):  # a signal between Python's last look for one and the system's wait wakes nobody
            os.kill(os.getpid(), signal.SIGINT)

    def take(*_: Any) -> None:
        if not taken.is_set():
            taken.set()
            raise KeyboardInterrupt

    def wait(reads: Reads) -> None:
        waiting.set()
        reads.wait()

    gate = Gate(monkeypatch, interrupt)
    with handled(signal.SIGINT, take), ExpertStore.open(model, mx.float32, DiskSettings(2)) as store:
        reads = store.start(1, [(3, make_room(store, 1))])
        gate.reached.wait()
        with pytest.raises(KeyboardInterrupt):
            wait(reads)
        gate.end_after(reads.drain)
        jobs = [(4, make_room(store, 1))]
        store.start(1, jobs).wait()
        check(store, model, jobs, [])


def test_ctrl_c_in_the_middle_of_a_read_is_a_failed_read(model: ModelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> int:
        raise KeyboardInterrupt

    with ExpertStore.open(model, mx.float32, DiskSettings(1)) as store:
        on_read(monkeypatch, 4, interrupt)
        reads, jobs = start(store)
        with pytest.raises(KeyboardInterrupt):
            reads.wait()
        reads.drain()
        assert reads.failed == list(EXPERTS[1:])
        check(store, model, jobs, reads.failed)


def test_ctrl_c_does_not_cut_draining_short(model: ModelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with ExpertStore.open(model, mx.float32, DiskSettings(2)) as store:
        reads = store.start(1, [(3, make_room(store, 1))])
        gate.reached.wait()
        wait = threading.Condition.wait

        def interrupted_once(_: threading.Condition) -> bool:
            monkeypatch.setattr(threading.Condition, "wait", wait)
            gate.opened.set()
            raise KeyboardInterrupt

        monkeypatch.setattr(threading.Condition, "wait", interrupted_once)
        with pytest.raises(KeyboardInterrupt):
            reads.drain()
        assert gate.ended == ["read"]
        assert reads.failed == []


def test_closing_waits_for_reads_in_flight(model: ModelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    store = ExpertStore.open(model, mx.float32, DiskSettings(2))
    reads = store.start(1, [(3, make_room(store, 1))])
    gate.reached.wait()
    gate.end_after(store.close)
    assert reads.failed == []
    with pytest.raises(ValueError, match="closed"):
        store.read(1, 3, make_room(store, 1))


def test_one_thread_reads_when_it_is_waited_for(model: ModelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = []
    original = os.preadv

    def pread_into(*arguments: Any) -> int:
        readers.append(threading.current_thread())
        return original(*arguments)

    monkeypatch.setattr(files, "pread_into", pread_into)
    with ExpertStore.open(model, mx.float32, DiskSettings(1)) as store:
        reads, _ = start(store)
        assert readers == []
        assert sorted(reads.failed) == sorted(EXPERTS)
        reads.wait()
        assert set(readers) == {threading.current_thread()}
        assert reads.seconds > 0
        assert reads.nbytes == 3 * 3 * 64 * 64 * 2


def test_as_many_threads_read_as_were_asked_for(model: ModelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    together, readers, original = threading.Barrier(3, timeout=60), set(), os.preadv

    def pread_into(*arguments: Any) -> int:
        readers.add(threading.current_thread())
        together.wait()
        return original(*arguments)

    monkeypatch.setattr(files, "pread_into", pread_into)
    with ExpertStore.open(model, mx.float32, DiskSettings(3)) as store:
        store.start(1, [(expert, make_room(store, 1)) for expert in range(6)]).wait()
    assert len(readers) == 3
    assert threading.current_thread() in readers


def test_for_one_expert_no_other_thread_is_woken(model: ModelPlan) -> None:
    with ExpertStore.open(model, mx.float32, DiskSettings(3)) as store:
        threads, jobs = set(threading.enumerate()), [(4, make_room(store, 1))]
        assert store.fetch(1, jobs)[0] == 3 * 64 * 64 * 2
        assert set(threading.enumerate()) == threads
        check(store, model, jobs, [])
