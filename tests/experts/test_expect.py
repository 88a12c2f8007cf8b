"""What an expert needs of the disk is asked for at once, and what comes of it is what reading gives otherwise."""

import errno
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from strata_mlx.checkpoint.convert import Conversion, convert
from strata_mlx.errors import Fault
from strata_mlx.experts import DiskSettings, ExpertStore, files, store
from strata_mlx.models.plan import ModelPlan
from tests.errors import refuses
from tests.experts.memory import equal, expert_of, loaded, make_room, plan
from tests.tiny import make_checkpoint

LAYER, EXPERT = 1, 4
AT_ONCE = getattr(os, "RWF_NOWAIT", 0)
pytestmark = pytest.mark.skipif(not AT_ONCE, reason="the page cache cannot be asked here")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelPlan:
    monkeypatch.setattr(store, "_LARGE", 1)
    return plan(make_checkpoint(tmp_path / "model", dtype=mx.bfloat16, shards=1))


class Disk:
    """A page cache that has only the first ``cached`` bytes of what it is asked for. events: what was done, in order:
    "ask" for a read from the page cache alone, "read", and "tell", each with its offset.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cached: int = 0):
        self.events: list[tuple[str, int]] = []
        self.cached = cached
        monkeypatch.setattr(files, "pread_into", self.read)
        monkeypatch.setattr(os, "posix_fadvise", self.tell)

    def read(self, descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        self.events.append(("ask" if flags else "read", offset))
        if flags and not self.cached:
            raise BlockingIOError(errno.EAGAIN, "not now")
        got = os.preadv(descriptor, buffers, offset)
        if flags:
            for buffer in buffers:
                np.asarray(buffer).reshape(-1)[self.cached // buffer.itemsize + 1 :] = 0
            got = min(got, self.cached)
        return got

    def tell(self, _: int, offset: int, nbytes: int, advice: int) -> None:
        assert nbytes == 64 * 64 * 2
        assert advice == os.POSIX_FADV_WILLNEED
        self.events.append(("tell", offset))


def check_read(model: ModelPlan, settings: DiskSettings = DiskSettings()) -> None:  # noqa: B008
    with ExpertStore.open(model, mx.float32, settings) as opened:
        into = make_room(opened, LAYER)
        opened.read(LAYER, EXPERT, into)
        assert all(map(equal, into, expert_of(opened, LAYER, EXPERT, loaded(model, mx.float32))))


def starts(model: ModelPlan) -> list[int]:
    """Of the expert's tensors, in the order of the file."""
    names = (f"model.layers.{LAYER}.mlp.experts.{EXPERT}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return sorted(model.checkpoint.tensors[name].start for name in names)


def test_the_rest_is_asked_for_before_the_first_is_waited_for(
    model: ModelPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = starts(model)
    disk = Disk(monkeypatch)
    check_read(model)
    told = [("ask", first), ("tell", second), ("tell", third)]
    assert disk.events == [*told, ("read", first), ("read", second), ("read", third)]


@pytest.mark.parametrize("cached", [1, 4999])
def test_what_the_page_cache_has_is_not_read_again(
    model: ModelPlan, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = starts(model)
    disk = Disk(monkeypatch, cached)
    check_read(model)
    assert disk.events[-3:] == [("read", first + cached), ("read", second), ("read", third)]


def test_nothing_is_asked_for_that_is_there(model: ModelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = starts(model)
    disk = Disk(monkeypatch, 1 << 20)
    check_read(model)
    assert disk.events == [("ask", first), ("read", second), ("read", third)]


@pytest.mark.parametrize("number", range(4))
def test_an_error_after_asking_is_one_fault(model: ModelPlan, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    read = disk.read

    def broken(*arguments: Any) -> int:
        if sum(kind != "tell" for kind, _ in disk.events) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*arguments)

    monkeypatch.setattr(files, "pread_into", broken)
    with ExpertStore.open(model, mx.float32) as opened, refuses(Fault, "mlp.experts.4.", "Input/output error"):
        opened.read(LAYER, EXPERT, make_room(opened, LAYER))


def test_advice_that_is_refused_changes_nothing(model: ModelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    Disk(monkeypatch)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    check_read(model)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EAGAIN])
def test_a_file_system_is_asked_only_if_it_can_tell(
    model: ModelPlan, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(code, os.strerror(code))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    disk = Disk(monkeypatch)
    check_read(model)
    assert [kind for kind, _ in disk.events].count("ask") == (code == errno.EAGAIN)


@pytest.mark.parametrize("why", ["small", "packed", "direct"])
def test_where_it_would_gain_nothing_nobody_is_asked(
    model: ModelPlan, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "small":
        monkeypatch.undo()
    if why == "packed":
        model = plan(convert(Conversion(model, pack=True), tmp_path / "packed", progress=False))
    disk = Disk(monkeypatch)
    check_read(model, DiskSettings(direct=why == "direct"))
    assert {kind for kind, _ in disk.events} == {"read"}


@pytest.mark.parametrize("settings", [DiskSettings(), DiskSettings(3)], ids=str)
def test_files_that_were_dropped_from_the_page_cache_are_read(model: ModelPlan, settings: DiskSettings) -> None:
    with open(model.checkpoint.path / "model.safetensors", "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    check_read(model, settings)
