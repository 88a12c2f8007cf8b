"""strata_mlx warmup, on a tiny model: it runs everything once and says what that compiled."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from strata_mlx import warmup
from strata_mlx.experts import options
from strata_mlx.speculation.decoder import SpeculativeDecoder
from tests.budgets import count_a_small_process, memory_for
from tests.cli.conftest import Run
from tests.tiny import make_checkpoint


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """How many rows the windows have had."""
    seen: set[int] = set()
    launch: Callable[..., Any] = SpeculativeDecoder._launch

    def spy(self: Any, tokens: Any, *rest: Any, **options: Any) -> Any:
        seen.add(tokens.size)
        return launch(self, tokens, *rest, **options)

    monkeypatch.setattr(SpeculativeDecoder, "_launch", spy)
    return seen


def compiling(monkeypatch: pytest.MonkeyPatch, folder: Path, *files: str) -> None:
    """As if a rehearsal left ``files`` in a store."""
    monkeypatch.setattr(warmup, "stores", lambda: {"MLX": (folder, "*.ptx")})
    rehearsal = warmup.rehearsal

    def leave(model: nn.Module) -> list[warmup.Work]:
        return [*rehearsal(model), *((folder / file).touch for file in files)]

    monkeypatch.setattr(warmup, "rehearsal", leave)


def test_a_session_is_rehearsed_with_windows_of_every_size(run: Run, tiny: Path, windows: set[int]) -> None:
    ended = run("warmup", "--model", tiny, "--mtp", "--json")
    assert (ended.code, ended.err) == (0, "")
    report = json.loads(ended.out)
    assert report["device"] == "cpu"
    assert [store["of"] for store in report["kernels"]] == ["MLX"]
    assert windows == set(range(1, 10))
    assert 0 < report["first_token_seconds"]["after"] <= report["seconds"]


def test_without_drafts_there_are_no_windows(run: Run, tiny: Path, windows: set[int]) -> None:
    assert run("warmup", "--model", tiny, "--no-mtp", "--json").code == 0
    assert not windows


def test_experts_may_stay_on_disk_and_routing_may_be_biased(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_a_small_process(monkeypatch)
    monkeypatch.setattr(options, "system_sources", list)
    model = make_checkpoint(tmp_path / "model", num_experts=16)
    memory = str(memory_for(model, 5, context=warmup.CONTEXT))
    ended = run("warmup", "--model", model, "--memory", memory, "--moce-bonus", "0.5")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[1].startswith("Memory: ")
    assert lines[2].startswith("Routing: biased")


def test_what_was_compiled_is_counted(run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "before.ptx").touch()
    compiling(monkeypatch, tmp_path, "one.ptx", "two.ptx", "one.cu", "strata_project_0_1f.ptx")
    ended = run("warmup", "--model", tiny, "--no-mtp")
    assert (ended.code, ended.err) == (0, "")
    first, *lines = ended.out.splitlines()[-3:]
    assert first == f"Compiled: 2 kernels of MLX, kept in {tmp_path}"
    assert [line.partition(":")[0] for line in lines] == ["First token", "Warm-up"]


@pytest.mark.parametrize("stores", [True, False])
def test_where_nothing_was_compiled_one_line_says_so(
    stores: bool, run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling(monkeypatch, tmp_path)
    if not stores:
        monkeypatch.setattr(warmup, "stores", dict)
    ended = run("warmup", "--model", tiny, "--no-mtp")
    assert ended.code == 0
    _, _, said = ended.out.splitlines()  # after model and routing
    nothing = f"Nothing was left to compile (kept: 0 of MLX in {tmp_path})"
    assert said == (
        nothing if stores else "What is compiled on this device is kept by the system, and cannot be counted"
    )


def test_a_model_that_is_not_there_is_one_line_and_code_2(run: Run) -> None:
    ended = run("warmup", "--model", "./nowhere")
    assert (ended.code, ended.out) == (2, "")
    assert "nowhere" in ended.error
