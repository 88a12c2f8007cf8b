"""The arithmetic of a budget: its laws, on made-up needs."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx.errors import InputError
from strata_mlx.experts import budget, system
from strata_mlx.experts.budget import Activations, Fit, Needs, budget_bytes
from strata_mlx.experts.sizes import parse_size
from strata_mlx.models.dequantised import Growth, room_for
from tests.errors import refuses

amounts = st.integers(0, 10**10)


@st.composite
def any_needs(draw: st.DrawFn) -> Needs:
    experts = draw(st.integers(1, 512))
    growths = st.lists(st.builds(Growth, amounts, amounts), max_size=3).map(tuple)
    return Needs(
        scope="process memory",
        fixed={"process": 1 + draw(amounts), "weights": draw(amounts), "kv_cache": draw(amounts)},
        loading=draw(amounts),
        loading_resident=draw(amounts),
        activations=Activations(
            draw(st.integers(1, 10**7)), draw(st.integers(0, 10**4)), draw(st.integers(1, 10**5)), draw(amounts)
        ),
        resident_nodes=draw(st.integers(0, 10**6)),
        window=draw(amounts),
        per_slot=draw(st.integers(1, 10**9)),
        layers=draw(st.integers(1, 100)),
        experts=experts,
        least=draw(st.integers(1, experts)),
        step_size=draw(st.integers(1, 4096)),
        float32=draw(growths),
        float32_experts=draw(growths),
    )


def between(demand: Needs, share: float) -> int:
    """A budget from the smallest one (0) to that in which everything fits (1), and beyond."""
    return demand.smallest + round(share * max(demand.resident - demand.smallest, 1))


shares = st.floats(0, 1.2)


@given(any_needs(), shares, st.one_of(shares, st.floats(0, 1e-3)))
def test_more_memory_never_gives_fewer_slots(demand: Needs, share: float, more: float) -> None:
    never_fewer(demand, [between(demand, share), between(demand, share + more)])


def never_fewer(demand: Needs, budgets: list[int]) -> None:
    fits = [demand.fit(each) for each in budgets]
    for low, high in pairwise(fits):
        assert low.slots <= high.slots
        assert low.streams >= high.streams


@given(any_needs(), shares)
def test_the_parts_never_exceed_the_budget(demand: Needs, share: float) -> None:
    fit = demand.fit(between(demand, share))
    assert sum(fit.parts.values()) <= fit.budget
    assert demand.least <= fit.slots <= demand.experts
    assert 1 <= fit.chunk <= demand.step_size


@given(any_needs(), shares)
def test_a_chunk_fits_into_what_is_set_aside_for_it(demand: Needs, share: float) -> None:
    fit = demand.fit(between(demand, share))
    rows = min(fit.chunk, demand.activations.context)
    nodes = 0 if fit.streams else rows * demand.resident_nodes
    assert max(demand.activations.of(rows) + nodes, demand.window, demand.loading) <= fit.parts["work"]


@given(any_needs(), shares)
def test_no_memory_is_left_over_that_could_hold_experts_or_rows(demand: Needs, share: float) -> None:
    fit = demand.fit(between(demand, share))
    spare = fit.budget - sum(fit.parts.values())
    all_rows = fit.chunk == demand.step_size
    assert spare < demand.per_slot or (fit.slots >= demand.experts - 1 and all_rows)


@given(any_needs(), shares)
def test_float32_weights_come_after_the_first_half_of_the_experts(demand: Needs, share: float) -> None:
    fit = demand.fit(between(demand, share))
    dense = room_for(demand.float32, fit.parts["work"])
    if fit.streams:
        assert fit.slots >= demand.experts / 2 or not fit.parts["float32"]
        # and before the second: until all are there, what is left is theirs
        assert fit.parts["float32"] >= dense or fit.slots <= max(demand.least, (demand.experts + 1) // 2)


@given(any_needs(), shares)
def test_float32_weights_have_nobody_read_experts_who_need_not(demand: Needs, share: float) -> None:
    budget = between(demand, share)
    assert demand.fit(budget).streams == replace(demand, float32=(), float32_experts=()).fit(budget).streams


@given(any_needs())
def test_float32_weights_need_no_larger_budget_to_begin_with(demand: Needs) -> None:
    assert demand.smallest == replace(demand, float32=(), float32_experts=()).smallest


@given(any_needs())
def test_the_smallest_budget_is_exactly_the_edge(demand: Needs) -> None:
    assert demand.fit(demand.smallest).slots >= demand.least
    with refuses(InputError, "too small", "the smallest that works is "):
        demand.fit(demand.smallest - 1)


@given(any_needs())
def test_everything_fits_exactly_from_the_resident_budget_on(demand: Needs) -> None:
    edge = max(demand.resident, demand.smallest)
    assert not demand.fit(edge).streams
    if demand.resident > demand.smallest:
        assert demand.fit(demand.resident - 1).streams


@given(any_needs())
def test_the_budget_that_a_refusal_names_works(demand: Needs) -> None:
    with pytest.raises(InputError) as refusal:
        demand.fit(demand.smallest - 1)
    named = str(refusal.value).partition("smallest that works is ")[2].partition(" (")[0]
    grown = replace(demand, fixed=demand.fixed | {"process": demand.fixed["process"] + budget._JITTER})
    assert demand.fit(parse_size(named)).slots >= demand.least
    assert grown.fit(parse_size(named)).slots >= demand.least


def greedy_work(fit: Callable[[Needs, int], Fit]) -> Callable[[Needs, int], Fit]:
    """A budget that gives activations whole powers of two: each time they double, slots are lost."""

    def mutant(self: Needs, size: int) -> Fit:
        made = fit(self, size)
        work = 1 << made.parts["work"].bit_length()
        left = size - sum(self.fixed.values()) - work
        return replace(made, slots=max(self.least, min(left // self.per_slot, self.experts)))

    return mutant


def test_the_law_of_more_memory_finds_activations_in_steps(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setattr(Needs, "fit", greedy_work(Needs.fit))
    demand = Needs("memory", {"process": 1}, 0, 0, Activations(100, 0, 4096), 0, 0, 1000, 1, 512, 2, 2048)
    budgets = [between(demand, share / 1000) for share in range(1000)]
    with pytest.raises(AssertionError):
        never_fewer(demand, budgets)
    record_property("killed_by", "never_fewer")


# auto


def test_auto_is_what_the_system_has_less_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "on_gpu_of_its_own", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(system, "footprint", lambda: 3)
    monkeypatch.setattr(system, "available", lambda: 500)
    monkeypatch.setattr(system, "total", lambda: 1000)
    assert budget_bytes("auto") == budget_bytes(" AUTO ") == 403
    monkeypatch.setattr(system, "available", lambda: 50)
    with refuses(InputError, "auto", "name an amount"):
        budget_bytes("auto")


def test_auto_stays_within_what_metal_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "on_gpu_of_its_own", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda _: {"max_recommended_working_set_size": 1000})
    assert budget_bytes("auto") == 1000


def test_auto_on_a_gpu_of_its_own_is_about_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "on_gpu_of_its_own", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda _: {"total_memory": 1000, "free_memory": 500})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 200)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 100)
    assert budget_bytes("auto") == 700


@pytest.mark.parametrize("memory", [12_000_000_000, "12GB", "12 gb", "12000000000"])
def test_an_amount_is_that_many_bytes(memory: int | str) -> None:
    assert budget_bytes(memory) == 12_000_000_000


@pytest.mark.parametrize("memory", [0, -1, "0", "much"])
def test_what_is_no_amount_is_refused(memory: int | str) -> None:
    with refuses(InputError, "memory", str(memory)):
        budget_bytes(memory)
