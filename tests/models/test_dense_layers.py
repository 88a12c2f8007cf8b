"""Where only some layers have experts, a layer is known by its index among all, and never by its place in a list."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from strata_mlx import InputError, Residency, RetentionPolicy, Routing, RoutingPolicy, load, set_routing
from strata_mlx.checkpoint import Checkpoint
from strata_mlx.experts.needs import needs_of
from strata_mlx.experts.streaming import streaming_of
from strata_mlx.models.moe import blocks, make_routing
from strata_mlx.models.plan import plan_model
from strata_mlx.models.report import describe
from strata_mlx.prefill import make_cache
from strata_mlx.replay.costs import CostModel, Probe
from strata_mlx.replay.recording import Recording, record
from strata_mlx.replay.replayer import replay
from strata_mlx.server.engine import Engine
from tests.errors import refuses
from tests.replay.conftest import COSTS as FITTED
from tests.tiny import make_checkpoint

COSTS = CostModel({}, FITTED, FITTED, read=0.2, expert_bytes=1e6, pair=1e-4)
PROMPTS = ([1, 2, 3, 0, 1], [2, 1, 4])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 0 is dense, 1 and 2 have experts, and so has the MTP head, layer 3."""
    return make_checkpoint(tmp_path_factory.mktemp("dense") / "model", "glm4_moe", "stacked", mtp="stacked")


def test_recordings_have_the_layers_with_experts_by_their_indices(folder: Path, tmp_path: Path) -> None:
    recording = record(load(folder, mtp=True)[0], None, PROMPTS, 8, steps=3)
    assert (recording.header.layers, recording.header.head_layers) == ((1, 2), (3,))
    recording.save(tmp_path / "recording.npz")
    again = Recording.load(tmp_path / "recording.npz")
    streamed = record(load(folder, mtp=True, slots=3)[0], None, PROMPTS, 8, steps=3)
    for one, other, third in zip(recording.documents, again.documents, streamed.documents, strict=True):
        assert np.array_equal(one.experts, other.experts)
        assert np.array_equal(one.experts, third.experts)
        assert np.array_equal(one.head_experts, third.head_experts)
    assert replay(recording, RetentionPolicy(), COSTS, slots=3).misses.shape[1] == 3


def test_a_head_without_experts_is_recorded_and_replayed(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "mimo_v2_flash", "stacked", mtp="stacked")
    recording = record(load(path, mtp=True)[0], None, PROMPTS, 8, steps=4)
    assert recording.header.head_layers == ()
    recording.save(tmp_path / "recording.npz")
    assert replay(Recording.load(tmp_path / "recording.npz"), RetentionPolicy(), COSTS, slots=3).misses.shape[1] == 2


def test_several_heads_with_experts_have_no_room_in_a_recording(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "deepseek_v3", "stacked", mtp="stacked")
    with refuses(InputError, "one MTP head with experts"):
        record(load(path, mtp=True)[0], None, PROMPTS, 8)


def test_a_probe_tells_the_trunks_slots_from_the_heads(folder: Path) -> None:
    model = load(folder, mtp=True, slots=3)[0]
    tables = streaming_of(model).tables  # type: ignore[union-attr]
    probe = Probe(model)
    assert probe._tables == [tables[1], tables[2]]
    assert probe._head_tables == [tables[3]]


def test_residency_maps_pins_and_profiles_name_layers_by_index(folder: Path, tmp_path: Path) -> None:
    named = tmp_path / "experts.json"
    named.write_text(json.dumps({"2": [3, 5]}))
    model = load(folder)[0]
    found = make_routing(model, RoutingPolicy(0.5), named).residency
    assert isinstance(found, Residency)
    assert list(found.layers) == [2]
    profile = tmp_path / "profile.json"
    pinned = load(folder, slots=4, pinned=named, expert_profile=profile)[0]
    tables = streaming_of(pinned).tables  # type: ignore[union-attr]
    assert tables[2].resident.nonzero()[0].tolist() == [3, 5]
    assert not tables[1].resident.any()
    mx.eval(pinned(mx.array([[1, 2, 3]])))
    pinned.expert_profile.save(streaming_of(pinned))
    assert list(json.loads(profile.read_text())["layers"]) == ["1", "2"]


def test_a_residency_map_acts_on_the_layer_that_it_names(folder: Path) -> None:
    model: nn.Module = load(folder)[0]
    chosen: dict[int, list[int]] = {}
    layers = {1: np.isin(np.arange(8), [6]), 2: np.isin(np.arange(8), [1])}

    def watch(layer: int, ids: mx.array) -> None:
        chosen[layer] = np.array(ids)[0, -1].tolist()

    set_routing(model, Routing(RoutingPolicy(30.0), Residency(layers), observer=watch))
    mx.eval(model(mx.array([[1, 2, 3]])))
    assert 6 in chosen[1]
    assert 1 in chosen[2]
    assert sorted(chosen) == [1, 2] == [block.layer for block in blocks(model)]


def test_the_page_is_told_which_layers_it_shows(folder: Path) -> None:
    model, tokenizer = load(folder, mtp=True, slots=3)
    engine = Engine(model, tokenizer)
    try:
        experts = engine.state().experts
        assert (experts.layers, experts.indices) == (3, (1, 2, 3))
        assert [layer.layer for layer in experts.streamed] == [1, 2, 3]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("glm4_moe", {"full_attention": 3}),
        ("deepseek_v3", {"full_attention": 3}),
        ("mimo_v2_flash", {"sliding_window": 2, "full_attention": 1}),
    ],
)
def test_a_report_counts_layers_and_what_their_caches_take(tmp_path: Path, family: str, kinds: dict[str, int]) -> None:
    path = make_checkpoint(tmp_path / "model", family, mtp="separate")
    plan = plan_model(Checkpoint.open(path))
    report = describe(plan, 256)
    assert report["layers"]["kinds"] == kinds
    assert (report["moe_layers"], report["shared_expert"]) == (2, family != "mimo_v2_flash")
    model = load(path)[0]
    cache = make_cache(model)
    for token in range(20):  # a sliding window is as long as it says after single steps
        model(mx.array([[token]]), cache=cache)
    assert report["memory_bytes"]["kv_cache"] == sum(layer.nbytes for layer in cache)
    demand = needs_of(plan)
    heads = {"deepseek_v3": 2, "glm4_moe": 1, "mimo_v2_flash": 0}[family]  # with experts
    assert (demand.layers, demand.experts, demand.least) == (2 + heads, 8, 2)
    assert demand.fixed["kv_cache"] > report["memory_bytes"]["kv_cache"]
