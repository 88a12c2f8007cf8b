"""What rounds cost is found again, whatever the machine did meanwhile, and is told from what it does not hold for."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest

from strata_mlx import Fault, InputError
from strata_mlx.experts.stream import SPLIT_SECONDS
from strata_mlx.experts.streaming import streaming_of
from strata_mlx.replay.costs import (
    CostModel,
    Costs,
    Probe,
    Sample,
    Storage,
    fit,
    fit_costs,
    held_out_error,
    measured_on,
    predict,
)
from tests.errors import refuses
from tests.experts.streamed import TOP_K, streamed
from tests.replay.conftest import PROMPTS

STEPS = 3
TRUTH = Costs(0.010, (0.012, 0.014, 0.018, 0.023), (0.002, 0.003, 0.004), 0.0005, 0.001, 0.0001, 0.0002)


def samples(count: int = 600, outliers: float = 0.05, seed: int = 0) -> list[Sample]:
    """Rounds that cost what TRUTH says, within 2 %, and a few of them ten times as much."""
    rng = np.random.default_rng(seed)
    result = []
    for i in range(count):
        plain, drafts = i % 10 == 0, int(rng.integers(0, STEPS + 1))
        drafts = 0 if plain else drafts
        rows = 1 + int(rng.integers(0, drafts + 1))
        sample = Sample(
            document=i // 20,
            plain=plain,
            rows=rows,
            drafts=drafts,
            committed=int(rng.integers(1, STEPS + 2)),
            replayed=bool(rng.random() < 0.3),
            misses=int(rng.integers(0, 60)),
            head_misses=int(rng.integers(0, 5)) if drafts else 0,
            verify_seconds=0.0,
            before_seconds=0.0,
        )
        window = replace(sample, drafts=0, head_misses=0)
        verify = predict(TRUTH, window)
        before = predict(TRUTH, sample) - verify
        noise = rng.uniform(0.98, 1.02) * (10 if rng.random() < outliers else 1)
        result.append(replace(sample, verify_seconds=verify * noise, before_seconds=before * noise))
    return result


def test_costs_are_found_again_among_outliers() -> None:
    found = fit_costs(samples(), STEPS)
    np.testing.assert_allclose(found.verify, TRUTH.verify, rtol=0.03)
    np.testing.assert_allclose(found.draft, TRUTH.draft, rtol=0.05)
    for name in ("plain", "miss", "head_miss", "catch_up", "rollback"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.15)


def test_the_error_is_that_of_documents_that_were_not_seen() -> None:
    assert held_out_error(samples(outliers=0), STEPS) < 0.01
    assert np.isnan(held_out_error(samples(20), STEPS))


def test_nothing_costs_less_than_nothing() -> None:
    cheap = [replace(each, verify_seconds=0.01 - 1e-5 * each.misses) for each in samples(outliers=0)]
    found = fit_costs(cheap, STEPS)
    assert found.miss == 0
    assert min(*found.verify, *found.draft, found.rollback, found.catch_up) >= 0


def test_too_few_rounds_are_refused() -> None:
    rounds = samples()
    with refuses(InputError, "no round of 3 more rows"):
        fit_costs([each for each in rounds if each.rows < 4], STEPS)
    with refuses(InputError, "no round of 2 more drafts"):
        fit_costs([each for each in rounds if each.drafts != 2], STEPS)
    with refuses(InputError, "no plain step"):
        fit_costs([each for each in rounds if not each.plain], STEPS)
    with refuses(InputError, "nothing to fit"):
        fit(None, None)


@pytest.fixture(scope="module")
def measured(model: nn.Module, folder: Path) -> CostModel:
    probes = [Probe(model, STEPS), Probe(streamed(folder, TOP_K, mtp=True), STEPS)]
    for probe in probes:
        for _ in range(2):
            for depth in range(STEPS + 1):
                probe.run(PROMPTS[0], 32, depth)
    return fit(*probes)


def test_the_real_decoder_is_measured(measured: CostModel, model: nn.Module) -> None:
    assert measured.resident
    assert measured.streamed
    for costs in (measured.resident, measured.streamed):
        assert (len(costs.verify), len(costs.draft)) == (STEPS + 1, STEPS)
        assert min(costs.plain, *costs.verify, *costs.draft) > 0
    assert measured.resident.miss == 0
    assert measured.expert_bytes > 0
    assert measured.read > 0
    assert measured.pair > 0
    assert measured.error
    assert set(measured.error) == {"resident", "streamed"}
    measured.check_model(model)
    assert "us a miss" in str(measured)


def test_a_probe_counts_every_miss(folder: Path) -> None:
    model = streamed(folder, TOP_K, mtp=True)
    streaming = streaming_of(model)
    assert streaming
    probe = Probe(model, STEPS)
    probe.run(PROMPTS[0], 24, 2)
    rounds = sum(each.misses + each.head_misses for each in probe.samples)
    assert 0 < rounds < streaming.traffic().misses == sum(table.filled for table in streaming.tables.values())
    assert all(each.drafts <= 2 and each.rows <= each.drafts + 1 for each in probe.samples)
    assert {each.rows for each in probe.samples} == {1, 2, 3}


def test_another_machine_or_model_is_told(measured: CostModel, model: nn.Module) -> None:
    for name in measured_on(model):
        with refuses(InputError, f"measured with {name}", "measure it again"):
            replace(measured, measured_on={**measured.measured_on, name: "other"}).check_model(model)


def test_a_file_gives_back_what_was_saved(measured: CostModel, tmp_path: Path) -> None:
    for each in (measured, replace(measured, streamed=None)):
        each.save(tmp_path / "costs.json")
        assert CostModel.load(tmp_path / "costs.json") == each
    with refuses(Fault, "cannot be written"):
        measured.save(tmp_path / "missing" / "costs.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 1"),
        ({"resident": {"plain": 1}}, "broken"),
        ({"resident": {**asdict(TRUTH), "miss": -1}}, "broken"),
        ({"resident": {**asdict(TRUTH), "verify": "x"}}, "broken"),
        ({"resident": 7}, "broken"),
    ],
)
def test_a_broken_file_is_found_out(change: dict[str, Any], message: str, measured: CostModel, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    measured.save(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with refuses(InputError, file, message):
        CostModel.load(file)


def test_what_is_no_cost_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    for content in ("[", "[]", "{}", '{"version": 1}'):
        file.write_text(content)
        with refuses(InputError, file):
            CostModel.load(file)
    with refuses(InputError, "missing", "cannot be read"):
        CostModel.load(tmp_path / "missing")


def test_storage_takes_the_place_of_what_reading_took() -> None:
    model = CostModel({}, None, TRUTH, read=0.00006, expert_bytes=1e6, pair=1e-4)
    counts = np.array([[10, 10, 10], [0, 2, 10]], np.int32)
    storage = Storage("drive", 0.001, 1e9)

    def verify(each: CostModel, storage: Storage | None, rows: int = 1) -> float:
        return each.clock(True, storage).verify(rows, counts, ahead=False, replayed=False)

    assert verify(model, None) == pytest.approx(0.012 + 12 * TRUTH.miss)
    overhead = 12 * (TRUTH.miss - 0.00006)
    assert SPLIT_SECONDS < 0.003
    # 8 experts of the second layer are computed meanwhile; of the third, none is in memory.
    assert verify(model, storage) == pytest.approx(0.012 + overhead + (0.003 - 8 * 1e-4) + 0.011)
    quick = Storage("memory", 0.0, 1e12)  # reads so short that nothing is computed apart
    assert verify(model, quick) == pytest.approx(0.012 + overhead + 12 * 1e-6)
    with refuses(InputError, "storage broken"):
        Storage("broken", 0.0, 0.0)
