"""MLX's cache of CUDA modules, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from strata_mlx import modules


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"0123456789abcdef01234567", 0x562CAFC4A8054C10), (b"f" * 24, 0x4E60BD04A509B31C)],
)
def test_the_hash_is_that_of_libstdcxx(key: bytes, value: int) -> None:
    """What std::hash<std::string> gives, compiled by g++ on x86-64."""
    assert modules.std_hash(key) == value


def test_a_module_lies_under_the_name_that_mlx_looks_for(tmp_path: Path) -> None:
    key = modules.shorthand("kernel", b"code", tmp_path / "cache")
    assert key is not None
    name = f"kernel_{modules.std_hash(key):x}"
    assert (tmp_path / "cache" / f"{name}.ptx").read_bytes() == b"code"
    assert (tmp_path / "cache" / f"{name}.txt").read_text() == "kernel\tkernel\n"
    assert modules.shorthand("kernel", b"other", tmp_path / "cache") != key


def test_a_damaged_module_is_written_again(tmp_path: Path) -> None:
    key = modules.shorthand("kernel", b"code", tmp_path)
    (module,) = tmp_path.glob("*.ptx")
    module.write_bytes(b"co")
    assert modules.shorthand("kernel", b"code", tmp_path) == key
    assert module.read_bytes() == b"code"
    assert len(list(tmp_path.iterdir())) == 2


def test_without_a_folder_to_write_to_there_is_no_shorthand(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert modules.shorthand("kernel", b"code", tmp_path / "file") is None


@pytest.mark.parametrize(("value", "works"), [(2.0, True), (1.0, False), (None, False)])
def test_it_is_tried_whether_mlx_finds_a_module(
    value: float | None, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(**launched: Any) -> list[mx.array]:
        assert len(launched["compiled_source"]) == 24
        if value is None:
            raise RuntimeError("Failed to load compiled strata_probe kernel")
        return [mx.array([value])]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch, raising=False)
    assert modules.works(lambda name, text: f"{name}{text}".encode(), tmp_path) is works
