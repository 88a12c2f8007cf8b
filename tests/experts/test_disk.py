"""Settings of the disk: measured, remembered, chosen, overridden."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata_mlx.errors import Fault, InputError
from strata_mlx.experts import DiskSettings, disk
from strata_mlx.experts.disk import Workload, choose, device_of, recall, remember, settings_for
from strata_mlx.experts.probe import BLOCKS, THREADS, Rate, cells, measure, passes
from tests.errors import refuses

HUGE = 1 << 50


def rates(disk: list[float], direct: list[float] = [], cached: list[float] = [9, 9, 9, 9]) -> list[Rate]:  # noqa: B006
    """The same for every size of reads, by number of threads."""
    kinds = [(disk, False, False), (direct, True, False), (cached, False, True)]
    return [
        Rate(block, threads, past, kept, rate)
        for row, past, kept in kinds
        for block in BLOCKS
        for threads, rate in zip(THREADS, row, strict=False)
    ]


def workload(request: int = 512 << 10, total: int = HUGE) -> Workload:
    return Workload((Path("/nowhere"),), request, total)


def test_one_thread_more_reads_than_the_fewest_that_are_about_the_fastest() -> None:
    assert choose(rates([1, 2, 3.9, 4]), workload())[0] == DiskSettings(5)
    assert choose(rates([1, 1, 1, 1]), workload())[0] == DiskSettings(4)  # at the least
    assert choose(rates([1, 2, 3, 2]), workload())[0] == DiskSettings(5)


def test_the_page_cache_is_passed_by_only_where_it_cannot_help_and_that_is_faster() -> None:
    table = rates([1, 1, 1, 1], [1, 2, 2, 2])
    assert choose(table, workload())[0] == DiskSettings(4, direct=True)
    assert choose(rates([1, 1, 1, 1], [1, 2, 3, 4]), workload())[0] == DiskSettings(THREADS[3] + 1, direct=True)
    assert choose(rates([1, 1, 1, 1], [1, 1, 1, 1.05]), workload())[0] == DiskSettings(4)
    assert not choose(table, workload(total=1 << 20))[0].direct


def test_the_page_cache_is_read_by_as_many_threads_as_are_fast_and_have_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert choose(rates([1, 2, 4, 8], cached=[1, 2, 4, 8]), workload(total=1 << 20))[0] == DiskSettings(2)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert choose(rates([1, 1, 1, 1], cached=[1, 2, 4, 8]), workload(total=1 << 20))[0] == DiskSettings(8)
    assert choose(rates([1, 1, 1, 1], cached=[1, 2, 2, 2]), workload(total=1 << 20))[0] == DiskSettings(2)


def test_small_reads_from_the_page_cache_stay_in_their_thread() -> None:
    assert choose(rates([1, 2, 4, 8]), workload(request=20_000, total=1 << 20))[0] == DiskSettings(1)


def test_the_row_of_the_nearest_size_counts() -> None:
    table = [replace(rate, bytes_per_second=rate.threads) for rate in rates([1] * 4)]
    table = [rate if rate.block == BLOCKS[2] else replace(rate, bytes_per_second=1) for rate in table]
    assert choose(table, workload(request=BLOCKS[1]))[0].threads == 4
    assert choose(table, workload(request=BLOCKS[2] + 1))[0].threads == THREADS[-1] + 1


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(200_000))
    return path


def test_every_combination_is_measured(file: Path) -> None:
    done: list[int] = []
    table = measure([file], 0.5, lambda: done.append(1))
    assert [(rate.block, rate.threads, rate.direct, rate.cached) for rate in table] == cells([file])
    assert len(done) == passes([file], 0.5) * len(table)
    assert passes([file], 0.01) == 1 < passes([file], 0.5)
    assert all(rate.bytes_per_second > 0 for rate in table)
    assert {rate.block for rate in table} == {BLOCKS[0]}


def test_a_disk_that_fails_while_it_is_measured_is_a_fault(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "broken")

    monkeypatch.setattr(os, "preadv", fail)
    with refuses(Fault, file, "broken"):
        measure([file], 0.01)


def test_what_was_measured_is_remembered_by_device(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, table = tmp_path / "cache" / "disks.json", rates([1, 2, 3, 4], [4, 3, 2, 1])
    assert recall(file, memory) is None
    remember(file, table, memory)
    assert recall(file, memory) == table
    with monkeypatch.context() as patch:
        patch.setattr(disk, "device_of", lambda _: "another")
        assert recall(file, memory) is None
        remember(file, table[:1], memory)
    assert recall(file, memory) == table
    assert [path.name for path in memory.parent.iterdir()] == ["disks.json"]


def test_a_device_has_one_name(file: Path) -> None:
    assert device_of(file) == device_of(file.parent)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "3", '{"DEVICE": 3}', '{"DEVICE": [{"block": 1}]}', '{"DEVICE": [4]}']
)
def test_a_broken_memory_is_one_warning(file: Path, tmp_path: Path, text: str) -> None:
    memory = tmp_path / "disks.json"
    memory.write_text(text.replace("DEVICE", device_of(file)))
    with pytest.warns(RuntimeWarning, match=r"disks\.json: cannot be read") as warned:
        assert recall(file, memory) is None
    assert len(warned) == 1
    remember(file, rates([1, 1, 1, 1]), memory)
    assert recall(file, memory) == rates([1, 1, 1, 1])


def test_a_memory_that_cannot_be_written_is_one_warning(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.warns(RuntimeWarning, match="cannot be written") as warned:
        remember(file, rates([1, 1, 1, 1]), tmp_path / "cache" / "disks.json")
    assert len(warned) == 1


def test_measuring_happens_once(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def measured(*arguments: Any) -> list[Rate]:
        calls.append(arguments)
        return rates([1, 2, 3, 4])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(disk, "measure", measured)
    for _ in range(2):
        assert settings_for(Workload((file,), 1 << 20, HUGE), {}) == DiskSettings(9)
    assert len(calls) == 1
    assert settings_for(Workload((file,), 1 << 20, 1 << 20), {}) == DiskSettings()  # too little to be worth it


def test_the_environment_overrides(file: Path) -> None:
    job = Workload((file,), 1 << 20, HUGE)
    assert settings_for(job, {"STRATA_MLX_READ_THREADS": "5"}) == DiskSettings(5)
    assert settings_for(job, {"STRATA_MLX_READ_DIRECT": "1"}) == DiskSettings(1, direct=True)
    for variable, text in (("THREADS", "0"), ("THREADS", "65"), ("THREADS", "-1"), ("THREADS", ""), ("DIRECT", "yes")):
        with refuses(InputError, text):
            settings_for(job, {f"STRATA_MLX_READ_{variable}": text})
