"""What the system says about memory: of this process, and of made-up systems and containers."""

import sys
from pathlib import Path

import pytest

from strata_mlx.experts import pressure, system

MiB = 1 << 20


def test_the_footprint_grows_with_what_is_held_and_the_peak_stays() -> None:
    before = system.footprint()
    ballast = bytearray(b"x") * (50 * MiB)
    held = system.footprint()
    assert held - before > 0.9 * len(ballast)
    del ballast
    system.trim()
    assert system.footprint() < held - 25 * MiB
    assert system.peak() >= held - MiB


def test_there_is_some_memory_and_not_more_than_all() -> None:
    assert 0 < system.available() <= system.total()


class Machine:
    """A made-up Linux: its /proc and its control groups."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self.proc, self.groups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "pressure").mkdir()
        self.groups.mkdir()
        (self.proc / "meminfo").write_text(f"MemTotal: {4 * 1024} kB\nMemAvailable: {1024} kB\n")
        (self.proc / "self/cgroup").write_text("0::/\n")
        monkeypatch.setattr(system, "PROC", self.proc)
        monkeypatch.setattr(system, "CGROUPS", self.groups)
        monkeypatch.setattr(sys, "platform", "linux")

    def group(self, path: str, limit: object, used: int, cached: int = 0, events: int = 0) -> None:
        folder = self.groups / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")
        (folder / "memory.events").write_text(f"low 0\nhigh {events}\nmax 0\noom 0\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_without_limits_the_kernels_figure_counts(machine: Machine) -> None:
    assert system.available() == MiB
    machine.group("", "max", 10)
    assert system.available() == MiB


def test_a_containers_limit_counts_and_its_page_cache_is_free(machine: Machine) -> None:
    machine.group("", 700_000, used=500_000, cached=100_000)
    assert (system.total(), system.available()) == (700_000, 300_000)


def test_the_tightest_group_on_the_way_up_counts(machine: Machine) -> None:
    (machine.proc / "self/cgroup").write_text("0::/user/app\n")
    machine.group("user/app", "max", used=100)
    machine.group("user", 900_000, used=600_000)
    assert system.available() == 300_000
    machine.group("user/app", 200_000, used=150_000)
    assert system.available() == 50_000


def test_groups_of_version_1_count_too(machine: Machine) -> None:
    (machine.proc / "self/cgroup").write_text("3:cpu:/x\n4:memory:/x\n0::/\n")
    folder = machine.groups / "memory/x"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("400000")
    (folder / "memory.usage_in_bytes").write_text("250000")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 50000\n")
    assert system.available() == 200_000
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert system.available() == MiB


def test_a_path_that_only_the_host_has_leads_to_the_root(machine: Machine) -> None:
    (machine.proc / "self/cgroup").write_text("0::/../../docker/123\n")
    machine.group("", 600_000, used=0)
    assert system.available() <= 600_000


def test_stalls_are_those_of_the_last_ten_seconds(machine: Machine) -> None:
    assert system.memory_stalls() is None
    assert pressure.stalls() is None
    file = machine.proc / "pressure/memory"
    file.write_text("some avg10=12.50 avg60=1.00 avg300=0.10 total=5\nfull avg10=3.00 avg60=0.00 avg300=0.00 total=1\n")
    assert system.memory_stalls() == 12.5
    wish = pressure.stalls()
    assert wish is not None
    assert wish.share > 0
    assert "12 %" in wish.reason
    file.write_text("some avg10=9.99 avg60=90.00 avg300=0.10 total=5\n")
    assert pressure.stalls() is None


def test_a_group_that_was_throttled_since_the_last_look_wants_memory_once(machine: Machine) -> None:
    machine.group("", "max", used=10, events=3)
    events = pressure.CgroupEvents()
    assert events() is None
    machine.group("", "max", used=10, events=4)
    wish = events()
    assert wish is not None
    assert wish.share > 0
    assert events() is None


def test_a_system_with_little_left_wants_what_it_lacks(machine: Machine) -> None:
    machine.group("", 1000, used=900)
    assert pressure.scarce() is None
    machine.group("", 1000, used=970)
    wish = pressure.scarce()
    assert wish is not None
    assert wish.nbytes == 20


@pytest.mark.parametrize(("level", "wants"), [(1, False), (2, True), (4, True)])
def test_macos_says_it_in_levels(monkeypatch: pytest.MonkeyPatch, level: int, wants: bool) -> None:
    monkeypatch.setattr(system, "vm_pressure_level", lambda: level)
    wish = pressure.vm_pressure()
    assert (wish is not None) is wants
    if wish:
        assert str(level) in wish.reason
