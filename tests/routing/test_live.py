"""Routing over what is in memory at the moment."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_mlx import Routing, RoutingPolicy, load, set_routing
from strata_mlx.errors import InputError
from strata_mlx.models.moe import blocks, make_routing
from strata_mlx.routing import LiveResidency, Residency, Router, drafting, select, select_ops, verify_window
from strata_mlx.routing.executors import TOLERANCE
from strata_mlx.speculation.decoder import SpeculativeDecoder
from tests.errors import refuses
from tests.tiny import make_checkpoint

EXPERTS, TOP_K, SLOTS = 8, 2, 4
BONUS = RoutingPolicy(30.0)  # whatever the router says, residents come right after its first choice


@dataclass
class Table:
    """Of one layer, as SlotTable keeps it."""

    slots: int = SLOTS
    version: int = 0
    wanted: Any = None
    resident: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(EXPERTS, np.bool_))

    def hold(self, *experts: int) -> None:
        self.resident[:] = np.isin(np.arange(EXPERTS), experts)
        self.version += 1


def live(table: Table, policy: RoutingPolicy = BONUS) -> Routing:
    return Routing(policy, LiveResidency({0: table}), executor=select_ops)


def logits(rows: int = 1, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=(1, rows, EXPERTS)).astype(np.float32))


def selected(routing: Routing, scores: mx.array) -> list[list[int]]:
    ids, _ = routing.route(0, scores, Router(TOP_K))
    return [sorted(row) for row in np.array(ids)[0].tolist()]


def expected(scores: mx.array, resident: set[int]) -> list[list[int]]:
    """The router's first choice, and then the best resident one, if there is any left, or else the best."""
    result = []
    for row in np.array(scores)[0]:
        order = np.argsort(-row).tolist()
        later = [e for e in order[1:] if e in resident] or order[1:]
        result.append(sorted([order[0], later[0]]))
    return result


RESIDENTS = st.sets(st.integers(0, EXPERTS - 1), min_size=SLOTS, max_size=SLOTS)


@given(st.lists(st.one_of(st.none(), RESIDENTS), min_size=1, max_size=6))
def test_every_window_sees_what_is_in_memory_when_it_begins(changes: list[set[int] | None]) -> None:
    table = Table()
    table.hold(*range(SLOTS))
    routing, held = live(table), set(range(SLOTS))
    for seed, change in enumerate(changes):
        if change is not None:
            table.hold(*change)
            held = change
        assert selected(routing, logits(seed=seed)) == expected(logits(seed=seed), held)


def test_what_is_loaded_after_a_window_has_begun_does_not_reach_it() -> None:
    """The window is computed later than it is built; a copy of the map goes into it."""
    table = Table()
    table.hold(0, 1, 2, 3)
    ids, _ = live(table).route(0, logits(), Router(TOP_K))
    table.hold(4, 5, 6, 7)
    assert [sorted(row) for row in np.array(ids)[0].tolist()] == expected(logits(), {0, 1, 2, 3})


def test_all_rows_of_a_verify_window_see_the_same() -> None:
    table = Table()
    table.hold(0, 1, 2, 3)
    with verify_window():
        assert selected(live(table), logits(3)) == expected(logits(3), {0, 1, 2, 3})


def test_rows_that_a_head_is_sure_of_have_a_margin_of_their_own() -> None:
    """Those of a window that nothing is known of, and those of other forwards, have the usual one."""
    table, scores = Table(), logits(3, seed=15)
    table.hold(0, 1, 2, 3)
    routing = live(table, RoutingPolicy(kind="margin", margin=0.0, sure_margin=1.0))
    plain, biased = selected(Routing(), scores), expected(scores, {0, 1, 2, 3})
    assert all(a != b for a, b in zip(plain, biased, strict=True))
    assert selected(routing, scores) == plain
    for sure in ([], [1.0], [0.0, 1.0], [1.0, 1.0, 1.0]):
        with verify_window([mx.array(each) for each in sure]):
            rows = [biased[i] if i < len(sure) and sure[i] else plain[i] for i in range(3)]
            assert selected(routing, scores) == rows
    priced = routing.price.rows
    with drafting():
        assert selected(routing, scores) == biased
    assert routing.price.rows == priced  # at no price
    assert selected(routing, scores) == plain


SCORES = np.array(
    [
        np.random.default_rng(3).normal(size=EXPERTS),
        np.random.default_rng(4).normal(size=EXPERTS).round(),  # ties
        [np.nan, 1, np.inf, 0.5, -np.inf, 0.4, 0.3, np.nan],
        [np.nan] * EXPERTS,
    ],
    np.float32,
)


@pytest.mark.parametrize("rows", [[0], [2], [3], [0, 1, 2, 3], [0, 1, 2, 3] * 5], ids=len)  # the last is not compiled
@pytest.mark.parametrize("sure", [None, [1.0, 0.5, math.nan]])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("protect", [0, 1, 2])
@pytest.mark.parametrize(
    ("router", "bias"),
    [
        (Router(TOP_K), False),
        (Router(3, norm_topk=False, scale=2.5), False),
        (Router(TOP_K, True, "sigmoid"), True),
        (Router(TOP_K, True, "sigmoid", n_group=2, topk_group=1, scale=1.5), True),
    ],
    ids=str,
)
def test_a_margin_routes_as_select_does(
    router: Router, bias: bool, sure: list[float] | None, rows: list[int], dtype: mx.Dtype, protect: int
) -> None:
    table = Table()
    table.hold(0, 1, 2, 6)
    added = mx.array(np.linspace(-0.3, 0.3, EXPERTS).astype(np.float32)) if bias else None
    scores = mx.array(SCORES[rows])[None].astype(dtype)
    for margin in (0.05, 0.2):
        policy = RoutingPolicy(kind="margin", margin=margin, sure_margin=0.6, protect=protect)
        routing = Routing(policy, Residency({0: table.resident}))
        with verify_window([mx.array(each) for each in (sure or [])[: len(rows)]]):
            ids, weights = routing.route(0, scores, router, added)
        confidence = None if sure is None else mx.array([*sure, *[0.0] * 20][: len(rows)])
        wanted_ids, wanted = select(
            scores[0], mx.array(table.resident), policy, selection_bias=added, confidence=confidence, **router.options()
        )
        assert np.array_equal(ids[0], wanted_ids)
        np.testing.assert_allclose(weights[0], wanted, rtol=0, atol=TOLERANCE * router.scale)


@pytest.mark.parametrize("policy", [RoutingPolicy(1.0, protect=3), RoutingPolicy(kind="margin", margin=0.1, protect=3)])
def test_what_does_not_fit_is_refused(policy: RoutingPolicy) -> None:
    table = Table()
    table.hold(0, 1, 2, 3)
    with refuses(InputError, "protect is 3", "top_k = 2"):
        live(table, policy).route(0, logits(), Router(TOP_K))
    small = Routing(replace(policy, protect=1), Residency({0: np.ones(1, np.bool_)}))
    with refuses(InputError, "resident: expected bool [8]"):
        small.route(0, logits(), Router(TOP_K))


def test_a_routing_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    model, _ = load(make_checkpoint(tmp_path / "model", layout="stacked"))
    before = [block.routing for block in blocks(model)]
    policy = RoutingPolicy(kind="margin", margin=0.1, protect=3)
    with refuses(InputError, "protect is 3"):
        set_routing(model, Routing(policy, Residency({0: np.arange(8) < 2})))
    assert [block.routing for block in blocks(model)] == before


@pytest.mark.parametrize("policy", [BONUS, RoutingPolicy(kind="margin", margin=1.0)], ids=str)
def test_a_table_hears_what_the_router_wants_where_it_may_get_something_else(policy: RoutingPolicy) -> None:
    table = Table()
    routing = live(table, policy)
    for held, rows, told in (((0, 1), 3, False), (range(SLOTS), 3, True), (range(SLOTS), 40, False)):
        table.hold(*held)
        scores = logits(rows, seed=15)
        got = selected(routing, scores)
        assert (table.wanted is not None) == told == (got != selected(Routing(), scores))
        if told:
            assert [sorted(row) for row in np.array(table.wanted)[0].tolist()] == selected(Routing(), scores)


def test_a_cold_start_is_exact_until_the_slots_have_been_full() -> None:
    table = Table()
    routing, plain = live(table), selected(Routing(), logits())
    for held in ((), (0, 1), (0, 1, 2)):
        table.hold(*held)
        assert selected(routing, logits()) == plain
    table.hold(0, 1, 2, 3)
    biased = selected(routing, logits())
    assert biased == expected(logits(), {0, 1, 2, 3}) != plain
    table.hold(0, 1, 2)  # a load failed; the others are as good as before
    assert selected(routing, logits()) == biased


@pytest.mark.parametrize(
    ("policy", "held", "rows"),
    [
        (RoutingPolicy(), range(SLOTS), 1),
        (RoutingPolicy(-1.0), range(SLOTS), 1),
        (RoutingPolicy(2.0, protect=TOP_K), range(SLOTS), 1),
        (BONUS, (), 1),
        (BONUS, range(SLOTS - 1), 1),
        (BONUS, range(EXPERTS), 1),
        (BONUS, range(SLOTS), LiveResidency.PROMPT_ROWS + 1),
    ],
    ids=["no policy", "below 0", "all ranks protected", "nothing held", "not full", "everything held", "a prompt"],
)
def test_what_never_fires_changes_no_bit(policy: RoutingPolicy, held: range, rows: int) -> None:
    table = Table()
    table.hold(*held)
    scores = logits(rows)
    for ours, plain in zip(
        live(table, policy).route(0, scores, Router(TOP_K)), Routing().route(0, scores, Router(TOP_K)), strict=True
    ):
        assert mx.array_equal(ours, plain)


def test_the_mode_says_what_is_on() -> None:
    routing = live(Table())
    assert (routing.mode, str(routing)) == ("biased", f"biased, {BONUS}")
    assert routing.to_dict()["price"]["rows"] == 0
    assert live(Table(), RoutingPolicy()).mode == "exact"
    nothing = Routing(BONUS, LiveResidency({}))
    assert nothing.mode == "exact"
    assert "no residency map" in str(nothing)
    assert "price" not in nothing.to_dict()


# A streaming model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("live") / "model", layout="stacked", mtp="stacked")


def decode(model: Any, count: int = 60) -> mx.array:
    from strata_mlx.prefill import make_cache

    cache = make_cache(model)
    return mx.concatenate([model(mx.array([[7 * i % 250]]), cache=cache) for i in range(count)])


def test_a_streaming_model_prefers_what_its_slots_hold(folder: Path) -> None:
    exact, streamed = load(folder)[0], load(folder, slots=3)[0]
    set_routing(streamed, make_routing(streamed, RoutingPolicy(2.0), None))
    assert not mx.allclose(decode(exact), decode(streamed), atol=1e-3)
    biased = streamed.streaming.traffic()
    set_routing(streamed, Routing())
    assert mx.array_equal(decode(exact), decode(streamed))
    exactly = streamed.streaming.traffic() - biased
    assert biased.misses < 0.75 * exactly.misses


def test_a_file_goes_over_the_slots(folder: Path, tmp_path: Path) -> None:
    model = load(folder, slots=3)[0]
    assert isinstance(make_routing(model, BONUS, None).residency, LiveResidency)
    file = tmp_path / "residency.json"
    file.write_text('{"0": [1]}')
    assert isinstance(make_routing(model, BONUS, file).residency, Residency)


def test_a_model_in_memory_is_exact_whatever_the_policy(folder: Path) -> None:
    assert make_routing(load(folder)[0], BONUS, None).mode == "exact"


def test_speculation_begins_a_request_for_the_price(folder: Path) -> None:
    model = load(folder, slots=3, mtp=True)[0]
    routing = make_routing(model, RoutingPolicy(1.0), None)
    set_routing(model, routing)
    rows = []
    for _ in range(2):
        for _token in SpeculativeDecoder(model, prompt=[1, 2, 3], max_tokens=4, max_steps=1):
            pass
        rows.append(routing.price.rows)
    assert rows[0] == rows[1] > 4 * len(blocks(model))


def _no_copy(self: Any, layer: int, top_k: int, rows: int) -> mx.array | None:  # noqa: ARG001
    if layer not in self._maps:
        self._maps[layer] = 0, mx.array(self.residency.of(layer))
    return self._maps[layer][1]


def _from_the_first_row(self: LiveResidency, layer: int) -> NDArray[np.bool_]:
    return self.layers[layer].resident


def _version_forgotten(self: LiveResidency, layer: int) -> int:  # noqa: ARG001
    return 0


@pytest.mark.parametrize(
    ("target", "name", "broken", "killer"),
    [
        (LiveResidency, "version", _version_forgotten, test_every_window_sees_what_is_in_memory_when_it_begins),
        (Routing, "_resident", _no_copy, test_every_window_sees_what_is_in_memory_when_it_begins),
        (LiveResidency, "of", _from_the_first_row, test_a_cold_start_is_exact_until_the_slots_have_been_full),
    ],
    ids=["version forgotten", "the first map for ever", "biased from the first row on"],
)
def test_the_properties_kill_the_mutant(
    target: type,
    name: str,
    broken: Any,
    killer: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
) -> None:
    monkeypatch.setattr(target, name, broken)
    with pytest.raises(AssertionError):
        killer()
    record_property("killed_by", killer.__name__)
