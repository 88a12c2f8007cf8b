"""load() within a memory budget."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from strata_mlx import load, loading, stream_generate
from strata_mlx.errors import InputError
from strata_mlx.experts import options, pressure, system
from strata_mlx.experts.pressure import Wish
from tests.budgets import CONTEXT, count_a_small_process, memory_for
from tests.errors import refuses
from tests.tiny import make_checkpoint

PROMPT = [1 + token % 250 for token in range(50)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("options") / "model"
    return make_checkpoint(path, "qwen3_next", "stacked", mtp="stacked", num_experts=16)


@pytest.fixture(autouse=True)
def small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    count_a_small_process(monkeypatch)
    monkeypatch.setattr(pressure, "system_sources", list)


def text(model: Any, tokenizer: Any, **options: Any) -> list[tuple[int, bytes]]:
    responses = stream_generate(model, tokenizer, PROMPT, 8, **options)
    return [(response.token, np.array(response.logprobs).tobytes()) for response in responses]


@pytest.mark.parametrize("slots", [2, 5, 15, 16])
def test_a_budget_gives_its_slots_and_the_same_text(folder: Path, slots: int) -> None:
    model, tokenizer = load(folder, memory=memory_for(folder, slots), context=CONTEXT)
    assert model.fit.slots == slots
    assert model.fit.streams is (slots < 16)
    assert (model.streaming.slots if model.streaming else 16) == slots
    assert (model.guard is None) is (slots == 16)
    plain, _ = load(folder)
    rows = min(model.fit.chunk, len(PROMPT))
    assert text(model, tokenizer) == text(plain, tokenizer, prefill_step_size=rows)


def test_the_smallest_budget_runs_and_one_byte_less_is_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = memory_for(folder, 2)
    model, tokenizer = load(folder, memory=smallest, context=CONTEXT)
    assert len(text(model, tokenizer)) == 8
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("weights were read"))
    with refuses(InputError, "too small", "smallest that works"):
        load(folder, memory=smallest - 1, context=CONTEXT)


def test_the_head_takes_slots_of_its_own(folder: Path) -> None:
    model, tokenizer = load(folder, memory=memory_for(folder, 4, mtp=True), context=CONTEXT, mtp=True)
    assert (model.fit.slots, model.fit.layers) == (4, 3)
    plain, _ = load(folder, mtp=True)
    drafted = [token for token, _ in text(model, tokenizer, mtp=True)]
    assert drafted == [token for token, _ in text(plain, tokenizer, mtp=True)]


def test_the_context_may_depend_on_the_tokenizer(folder: Path) -> None:
    memory = memory_for(folder, 4, context=CONTEXT)
    model, _ = load(folder, memory=memory, context=lambda tokenizer: len(tokenizer.encode("x" * CONTEXT)))
    assert model.fit.slots == 4
    with refuses(InputError, "too small"):
        load(folder, memory=memory, context=100_000)


def test_a_prompt_goes_through_the_layers_in_chunks_that_have_room(folder: Path) -> None:
    model, tokenizer = load(folder, memory=memory_for(folder, 2), context=CONTEXT)
    seen: list[int] = []
    text(model, tokenizer, mtp=False, prompt_progress_callback=lambda read, _: seen.append(read))
    assert seen[:2] == [0, model.fit.chunk]
    assert model.fit.chunk < 49
    assert seen[-2:] == [49, 50]


def test_mlx_keeps_no_more_for_reuse_than_the_budget_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    model, _ = load(folder, memory=memory_for(folder, 4), context=CONTEXT)
    assert limits == [model.fit.parts["buffers"]]


@pytest.mark.parametrize("mtp", [True, False])
def test_pressure_takes_slots_between_rounds_and_the_text_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], mtp: bool
) -> None:
    monkeypatch.setattr(options, "system_sources", lambda: [lambda: Wish("the test wants memory", nbytes=1)])
    monkeypatch.setattr(pressure, "_EVERY", 0.0)
    model, tokenizer = load(folder, memory=memory_for(folder, 12, mtp=True), context=CONTEXT, mtp=True)
    plain, _ = load(folder, mtp=True)
    rows = model.fit.chunk
    assert [token for token, _ in text(model, tokenizer, mtp=mtp)] == [
        token for token, _ in text(plain, tokenizer, mtp=mtp, prefill_step_size=rows)
    ]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 12 - model.streaming.slots
    assert 2 <= model.streaming.slots < 9
    assert lines[0].startswith("memory: the test wants memory")


def test_a_process_that_outgrows_its_budget_gives_slots_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    memory = memory_for(folder, 12)
    model, tokenizer = load(folder, memory=memory, context=CONTEXT)
    monkeypatch.setattr(pressure, "_EVERY", 0.0)
    monkeypatch.setattr(system, "footprint", lambda: memory * 2)
    model.guard._next = 0
    text(model, tokenizer)
    assert model.streaming.slots == 2
    assert capfd.readouterr().err.count("more than the budget") == 1


def test_options_that_would_do_nothing_are_refused(folder: Path, tmp_path: Path) -> None:
    idle: list[dict[str, Any]] = [{"expert_profile": tmp_path / "p"}, {"pinned": tmp_path / "p"}, {"io_threads": 2}]
    for option in idle:
        with refuses(InputError, *option, "memory budget"):
            load(folder, **option)
    with refuses(InputError, "slots and memory"):
        load(folder, slots=3, memory="1GB")


@pytest.mark.parametrize(("option", "value"), [("io_threads", 0), ("io_threads", 1000), ("eviction", "random")])
def test_an_option_out_of_range_is_named(folder: Path, option: str, value: Any) -> None:
    with refuses(InputError, str(value)):
        load(folder, memory=memory_for(folder, 4), context=CONTEXT, **{option: value})


def test_adapters_count(folder: Path, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    with refuses(InputError, adapters):
        load(folder, memory="1GB", adapter_path=adapters)
