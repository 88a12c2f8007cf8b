"""The routing kernels, run by the test host, against float64 NumPy that knows nothing of them.

The checks have names and take a builder, so that each mutant of the kernel text can say which check kills it.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from strata_mlx import kernels
from strata_mlx.errors import Fault, InputError
from tests.host.compiler import KernelError
from tests.host.host import HostBuild, together

PLAIN = HostBuild()
TOLERANCE = 2e-7
INF, NAN = np.inf, np.nan


@dataclass(frozen=True)
class Case:
    """Arguments of a routing kernel. ``factors`` [2, K] are any: the kernels know tables and no policy."""

    logits: NDArray[Any]
    top_k: int
    resident: NDArray[np.bool_] | None = None
    factors: NDArray[np.float32] | None = None
    row_kind: NDArray[np.uint8] | None = None
    router: kernels.Router = "softmax"
    norm_topk: bool = True
    bias: NDArray[np.float32] | None = None
    n_group: int = 1
    topk_group: int = 1
    scale: float = 1.0
    dtype: str = "float32"

    def arguments(self) -> dict[str, Any]:
        tables = None
        if self.factors is not None:
            tables = np.stack([self.factors, (1 / self.factors).astype(np.float32)], axis=1)
        logits: Any = np.asarray(self.logits, np.float32)
        if self.dtype != "float32":
            logits = mx.array(logits).astype(getattr(mx, self.dtype))
        return {
            "logits": logits,
            "resident": self.resident,
            "tables": tables,
            "row_kind": self.row_kind,
            "top_k": self.top_k,
            "router": self.router,
            "norm_topk": self.norm_topk,
            "bias": self.bias,
            "n_group": self.n_group,
            "topk_group": self.topk_group,
            "scale": self.scale,
        }


def random_case(seed: int, rows: int, experts: int, top_k: int, **settings: Any) -> Case:
    """A case with residency; tables as a policy might make them: 1 at rank 0, then two steps."""
    rng = np.random.default_rng(seed)
    factors = np.ones((2, top_k), np.float32)
    factors[0, 1:3], factors[0, 3:], factors[1, 1:] = 1.7, 3.3, 30
    return Case(
        logits=(rng.normal(size=(rows, experts)) * 2).astype(np.float32),
        top_k=top_k,
        resident=rng.random(experts) < 0.3,
        factors=factors,
        row_kind=(np.arange(rows) % 2).astype(np.uint8),
        **settings,
    )


def select(case: Case, build: kernels.Build = PLAIN) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    ids, weights = kernels.route_select(**case.arguments(), build=build)
    return np.array(ids), np.array(weights)


def group_plan(ids: Any, resident: Any, **options: Any) -> list[Any]:
    packed = kernels.group_plan(ids, resident, **options)
    return kernels.unpack_plan(packed, options["expert_count"], ids.size)


def probabilities(case: Case) -> NDArray[np.float64]:
    rounded = mx.array(np.asarray(case.logits, np.float32)).astype(getattr(mx, case.dtype)).astype(mx.float32)
    z = np.array(rounded).astype(np.float64)
    if case.router == "sigmoid":
        return 1 / (1 + np.exp(-z))
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


def group_mask(scores: NDArray[np.float64], n_group: int, topk_group: int) -> NDArray[np.float64]:
    """-inf for the experts of groups that are left out, else 0. A group counts by the sum of its two best."""
    groups = np.sort(scores.reshape(n_group, -1), axis=1)[:, -2:].sum(axis=1)
    kept = np.argsort(-groups, kind="stable")[:topk_group]
    return np.where(np.isin(np.arange(n_group), kept), 0, -INF).repeat(len(scores) // n_group)


def assert_routed(case: Case, ids: NDArray[np.uint32], weights: NDArray[np.float32]) -> None:
    """Every pick has the best score that was left, and every weight is the router's own."""
    p = probabilities(case)
    bias = np.zeros(p.shape[1]) if case.bias is None else case.bias.astype(np.float64)
    assert ids.shape == weights.shape == (len(p), case.top_k)
    assert ids.dtype == np.uint32
    assert weights.dtype == np.float32
    assert (ids < p.shape[1]).all()
    for row, (own, picked) in enumerate(zip(p, ids, strict=True)):
        assert len(set(picked.tolist())) == case.top_k
        mask = group_mask(own + bias, case.n_group, case.topk_group)
        left = np.ones(own.shape, bool)
        for rank, expert in enumerate(picked):
            scores = own.copy()
            if case.resident is not None and case.factors is not None and case.row_kind is not None:
                scores[case.resident] *= np.float64(case.factors[case.row_kind[row], rank])
            scores += bias + mask
            best = scores[left].max()
            assert scores[expert] >= best - 1e-6 * abs(best) - 1e-37, (
                f"row {row} rank {rank}: not the best that was left"
            )
            left[expert] = False
        expected = own[picked]
        if case.norm_topk:
            expected = expected / max(expected.sum(), 2.0**-14)
        error = np.abs(weights[row] - expected * case.scale).max()
        assert error <= TOLERANCE * max(1, case.scale), f"row {row}: weight error {error:.3g}"


def assert_planned(
    ids: NDArray[np.uint32],
    resident: NDArray[np.bool_] | None,
    experts: int,
    plan: list[Any],
    split: bool = True,
) -> None:
    """The plan is the stable sort's, its unused places are empty groups."""
    got_experts, offsets, counts, entries, group_count = (np.array(x) for x in plan)
    flat = ids.reshape(-1).astype(np.int64)
    key = flat if resident is None or not split else flat + experts * ~resident[flat]
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    groups = len(first)
    assert group_count == groups
    np.testing.assert_array_equal(entries, order)
    np.testing.assert_array_equal(got_experts[:groups], flat[order][first])
    np.testing.assert_array_equal(offsets[:groups], first)
    np.testing.assert_array_equal(counts[:groups], np.diff(first, append=flat.size))
    assert len(got_experts) == min(experts, flat.size)
    assert (got_experts[groups:] == 0).all()
    assert (offsets[groups:] == flat.size).all()
    assert (counts[groups:] == 0).all()


# Checks. Few shapes, since each one is compiled anew for each mutant.

SOFTMAX = random_case(1, 6, 40, 6)
SIGMOID = random_case(2, 6, 40, 6, router="sigmoid", bias=np.linspace(-0.3, 0.3, 40).astype(np.float32))


def picks_and_weights(build: kernels.Build) -> None:
    assert_routed(SOFTMAX, *select(SOFTMAX, build))


def weights_of_residents_at_every_rank(build: kernels.Build) -> None:
    """All resident: the plain router's ids, whatever the factors; only recovery can differ."""
    case = replace(SOFTMAX, resident=np.ones(40, bool))
    ids, weights = select(case, build)
    np.testing.assert_array_equal(ids, np.argsort(-probabilities(case), axis=1)[:, :6])
    own = np.take_along_axis(probabilities(case), ids.astype(int), axis=1)
    np.testing.assert_allclose(weights, own / own.sum(axis=1, keepdims=True), atol=TOLERANCE, rtol=0)


def nothing_resident_is_the_plain_router(build: kernels.Build) -> None:
    plain = replace(SOFTMAX, resident=None, factors=None, row_kind=None)
    for got, expected in zip(
        select(replace(SOFTMAX, resident=np.zeros(40, bool)), build), select(plain, build), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def ties_go_to_the_lowest_id(build: kernels.Build) -> None:
    # Equal logits in one lane (8 and 8 + 32 = 40 is out, so 1 and 33) and in different lanes.
    logits = np.full((6, 40), -3.0, np.float32)
    logits[:, [33, 1, 5, 39, 7]] = 1.0
    ids, _ = select(replace(SOFTMAX, logits=logits, resident=np.zeros(40, bool)), build)
    np.testing.assert_array_equal(ids, [[1, 5, 7, 33, 39, 0]] * 6)


def what_underflows_is_tied_at_zero(build: kernels.Build) -> None:
    logits = np.full((6, 40), -500.0, np.float32)
    logits[:, 30], logits[:, 20], logits[:, 35] = 0, -1, -90  # exp(-90) is subnormal
    ids, weights = select(replace(SOFTMAX, logits=logits, resident=np.zeros(40, bool)), build)
    np.testing.assert_array_equal(ids, [[30, 20, 0, 1, 2, 3]] * 6)
    assert (weights[:, 2:] == 0).all()


def rows_that_are_not_finite(build: kernels.Build) -> None:
    logits = np.tile(np.linspace(-1, 1, 40, dtype=np.float32), (6, 1))
    logits[0] = NAN  # says nothing
    logits[1] = -INF
    logits[2, [3, 33]] = INF  # share the row
    logits[3, :35] = NAN
    logits[4, 35:] = -INF
    logits[5, [0, 39]] = NAN, INF
    for case in (SOFTMAX, SIGMOID):
        ids, weights = select(replace(case, logits=logits), build)
        assert np.isfinite(weights).all()
        assert all(len(set(row)) == 6 and max(row) < 40 for row in ids.tolist())
        np.testing.assert_array_equal(ids[:2], [range(6)] * 2)
        np.testing.assert_allclose(weights[:2], 1 / 6, atol=TOLERANCE)
    ids, weights = select(replace(SOFTMAX, logits=logits, resident=np.zeros(40, bool)), build)
    expected = [
        [3, 33, 0, 1, 2, 4],
        [39, 38, 37, 36, 35, 0],
        [34, 33, 32, 31, 30, 29],
        [39, 0, 1, 2, 3, 4],
    ]
    np.testing.assert_array_equal(ids[2:], expected)
    np.testing.assert_allclose(weights[2], [0.5, 0.5, 0, 0, 0, 0])


def a_bias_takes_part_in_the_choice_only(build: kernels.Build) -> None:
    strong = np.linspace(-16, -4, 40).astype(np.float32)
    for case in (SIGMOID, replace(SIGMOID, bias=strong)):
        assert_routed(case, *select(case, build))


GROUP_BIAS = np.linspace(-0.1, 0.1, 40).astype(np.float32)
GROUPED = random_case(4, 40, 40, 6, router="sigmoid", bias=GROUP_BIAS, n_group=5, topk_group=2)


def groups_left_out_come_last(build: kernels.Build) -> None:
    assert_routed(GROUPED, *select(GROUPED, build))
    # Only 8 experts are in: the 9th and 10th picks are the lowest ids outside.
    few = replace(GROUPED, topk_group=1, top_k=10, resident=None, factors=None, row_kind=None)
    ids, weights = select(few, build)
    for own, row in zip(probabilities(few) + GROUP_BIAS, ids, strict=True):
        inside = np.flatnonzero(group_mask(own, 5, 1) == 0)
        assert set(row[:8]) == set(inside)
        np.testing.assert_array_equal(row[8:], np.setdiff1d(np.arange(40), inside)[:2])
    assert np.isfinite(weights).all()


def a_small_sum_is_divided_by_the_floor(build: kernels.Build) -> None:
    logits = SIGMOID.logits - 18
    assert_routed(replace(SIGMOID, logits=logits), *select(replace(SIGMOID, logits=logits), build))


def sums_lose_no_digits(build: kernels.Build) -> None:
    """Rows that are hard to add up in float32: one large term and many small ones, or a few large ones."""
    rng = np.random.default_rng(5)
    expert = np.arange(512)
    logits = np.concatenate(
        [
            np.where(expert == 77, 0, -16.7) + rng.normal(size=(40, 512)) * 0.1,
            np.where(expert < 3, 0, -17) + rng.normal(size=(40, 512)) * 0.01,
            rng.normal(size=(200, 512)) * rng.choice([0.1, 1, 10, 40], (200, 1)),
        ]
    ).astype(np.float32)
    case = Case(logits, top_k=10, norm_topk=False)
    assert_routed(case, *select(case, build))


def the_scale_comes_last(build: kernels.Build) -> None:
    assert_routed(replace(SOFTMAX, scale=2.5), *select(replace(SOFTMAX, scale=2.5), build))


def fused_is_select_then_plan(build: kernels.Build) -> None:
    """The two kernels are the originals: the builder under test runs the fused one."""
    case = replace(SOFTMAX, logits=SOFTMAX.logits[:4], row_kind=np.array([0, 1, 1, 1], np.uint8))
    got_ids, got_weights, packed = kernels.route_fused(**case.arguments(), build=build)
    ids, weights = select(case)
    np.testing.assert_array_equal(np.array(got_ids), ids)
    np.testing.assert_array_equal(np.array(got_weights), weights)
    assert_planned(ids, case.resident, 40, kernels.unpack_plan(packed, 40, ids.size))


def fused_does_not_depend_on_the_order_of_threads(build: HostBuild) -> None:
    for seed in range(1, 6):
        fused_is_select_then_plan(replace(build, seed=seed))


def the_plan_is_the_stable_sort(build: kernels.Build) -> None:
    rng = np.random.default_rng(3)
    resident = rng.random(40) < 0.5
    for rows in (1, 3, 9):
        ids = np.stack([rng.permutation(40)[:6] for _ in range(rows)]).astype(np.uint32)
        assert_planned(ids, resident, 40, group_plan(ids, resident, expert_count=40, build=build))


def the_plan_does_not_depend_on_the_order_of_threads(build: HostBuild) -> None:
    for seed in range(1, 6):
        the_plan_is_the_stable_sort(replace(build, seed=seed))


CHECKS: list[Callable[[HostBuild], None]] = [
    picks_and_weights,
    weights_of_residents_at_every_rank,
    nothing_resident_is_the_plain_router,
    ties_go_to_the_lowest_id,
    what_underflows_is_tied_at_zero,
    rows_that_are_not_finite,
    a_bias_takes_part_in_the_choice_only,
    groups_left_out_come_last,
    a_small_sum_is_divided_by_the_floor,
    sums_lose_no_digits,
    the_scale_comes_last,
    fused_is_select_then_plan,
    fused_does_not_depend_on_the_order_of_threads,
    the_plan_is_the_stable_sort,
    the_plan_does_not_depend_on_the_order_of_threads,
]

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

# what goes wrong, the text that makes it so, and the check that must see it
MUTANTS: list[tuple[str, str, str, Callable[[HostBuild], None]]] = [
    ("weights of the biased scores", "? score * inverse : score", "? score : score", picks_and_weights),
    (
        "bonus for non-residents",
        "favoured >> i & 1 ? p[i] * factor : p[i]",
        "p[i] * factor",
        nothing_resident_is_the_plain_router,
    ),
    ("bonus twice", "? p[i] * factor :", "? p[i] * factor * factor :", weights_of_residents_at_every_rank),
    (
        "factor one rank late",
        "simd_shuffle(entry, rank)",
        "simd_shuffle(entry, max(rank - 1, 0))",
        picks_and_weights,
    ),
    (
        "factor one rank early",
        "simd_shuffle(entry, rank)",
        "simd_shuffle(entry, min(rank + 1, K - 1))",
        picks_and_weights,
    ),
    ("bonus at rank 0", "simd_shuffle(entry, rank)", "simd_shuffle(entry, max(rank, 1))", picks_and_weights),
    (
        "inverse one rank late",
        "simd_shuffle(entry, K + rank)",
        "simd_shuffle(entry, K + max(rank - 1, 0))",
        weights_of_residents_at_every_rank,
    ),
    (
        "inverse one rank early",
        "simd_shuffle(entry, K + rank)",
        "simd_shuffle(entry, K + min(rank + 1, K - 1))",
        weights_of_residents_at_every_rank,
    ),
    ("head tables for every row", "tables + row_kind[row] * 2 * K", "tables", picks_and_weights),
    ("tie to the highest id of a lane", "&& key > best", "&& key >= best", ties_go_to_the_lowest_id),
    (
        "tie to the highest id across lanes",
        "simd_min(best == winner ? slot * 32 + lane : 0xffffffffu)",
        "simd_max(best == winner ? slot * 32 + lane : 0u)",
        ties_go_to_the_lowest_id,
    ),
    (
        "a picked expert stays",
        "? ~(1u << id / 32) : 0xffffffffu",
        "? 0xffffffffu : 0xffffffffu",
        picks_and_weights,
    ),
    (
        "sum without the floor",
        "max(simd_sum(pick.weight), LEAST_SUM)",
        "simd_sum(pick.weight)",
        a_small_sum_is_divided_by_the_floor,
    ),
    (
        "softmax without its largest term",
        "simd_sum(part[0]) + simd_sum(ones)",
        "simd_sum(part[0])",
        rows_that_are_not_finite,
    ),
    (
        "one sum for large and small terms",
        "p[i] < 1 ? p[i] : 0;",
        "p[i]; ones -= p[i] == 1;",
        sums_lose_no_digits,
    ),
    ("NaN wins", "isnan(x) ? LOWEST :", "isnan(x) ? FLT_MAX :", rows_that_are_not_finite),
    ("inf - inf", ": max(LOWEST, min(x, FLT_MAX));", ": x;", rows_that_are_not_finite),
    (
        "residents on a silent row",
        "favoured = silent ? 0 : favoured;",
        "",
        rows_that_are_not_finite,
    ),
    ("bias on a silent row", "added[i] = silent ? 0 : added[i];", "", rows_that_are_not_finite),
    ("subnormal numbers count", ": p[i] < FLT_MIN ? 0 : p[i];", ": p[i];", what_underflows_is_tied_at_zero),
    (
        "bias in the weights",
        "score = candidate;",
        "score = candidate + added[i];",
        a_bias_takes_part_in_the_choice_only,
    ),
    (
        "bonus on score plus bias",
        "? p[i] * factor :",
        "? (p[i] + added[i]) * factor - added[i] :",
        a_bias_takes_part_in_the_choice_only,
    ),
    ("groups count by their best alone", "best + (SIZE > 1 ? next : 0)", "best", groups_left_out_come_last),
    ("the same group again", "!(kept >> lane & 1) ?", "true ?", groups_left_out_come_last),
    ("no scale", "pick.weight *= scale;", "", the_scale_comes_last),
    ("missing groups first", "(part == 0)", "(part == 1)", the_plan_is_the_stable_sort),
    ("inclusive sums", "uint(g) < simdgroup ?", "uint(g) <= simdgroup ?", the_plan_is_the_stable_sort),
    ("entries on one place", "next[i] += 1;", "", the_plan_is_the_stable_sort),
    ("unused groups left unwritten", "counts[g] = 0;", "", the_plan_is_the_stable_sort),
    (
        "no barrier in the sums",
        BARRIER + "\n  Scan",
        "Scan",
        the_plan_does_not_depend_on_the_order_of_threads,
    ),
    (
        "no barrier before the plan",
        BARRIER + "\n\nplan_groups",
        "plan_groups",
        fused_does_not_depend_on_the_order_of_threads,
    ),
]


# Shapes: (E, K, T, the rest). Every E here and every remainder of E by 32 goes through the same text.
SHAPES: list[tuple[int, int, int, dict[str, Any]]] = [
    (1, 1, 1, {}),
    (2, 2, 3, {"router": "sigmoid"}),
    (7, 1, 1, {"norm_topk": False}),
    (31, 10, 5, {"scale": 2.5}),
    (32, 8, 7, {"norm_topk": False, "dtype": "bfloat16"}),
    (33, 16, 2, {"router": "sigmoid", "norm_topk": False}),
    (64, 6, 9, {"router": "sigmoid", "dtype": "float16"}),
    (100, 10, 4, {"dtype": "float16"}),
    (128, 8, 6, {"dtype": "bfloat16", "norm_topk": False}),
    (255, 3, 3, {"router": "sigmoid", "dtype": "bfloat16", "scale": 2.5}),
    (256, 8, 8, {"router": "sigmoid", "n_group": 8, "topk_group": 4}),
    (512, 10, 8, {"norm_topk": False}),
    (777, 16, 5, {}),
    (1023, 4, 3, {"norm_topk": False}),
    (1024, 16, 8, {}),
]


def shaped(index: int) -> Case:
    experts, top_k, rows, settings = SHAPES[index]
    if settings.get("router") == "sigmoid":
        bias = np.random.default_rng(index).normal(size=experts) * 0.2
        settings = settings | {"bias": bias.astype(np.float32)}
    return random_case(index, rows, experts, top_k, **settings)


def run_all(case: Case, build: kernels.Build = PLAIN) -> list[NDArray[Any]]:
    """The outputs of select, plan, and where the window allows it of the fused kernel."""
    selected = kernels.route_select(**case.arguments(), build=build)
    planned = group_plan(selected[0], case.resident, expert_count=case.logits.shape[1], build=build)
    outputs = [*selected, *planned]
    if len(case.logits) <= kernels.MAX_FUSED_ROWS:
        *chosen, packed = kernels.route_fused(**case.arguments(), build=build)
        outputs += [*chosen, *kernels.unpack_plan(packed, case.logits.shape[1], selected[0].size)]
    return [np.array(x) for x in outputs]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compiles everything side by side, whatever its outcome."""

    def attempt(check: Callable[[HostBuild], None], build: HostBuild) -> None:
        with suppress(AssertionError, KernelError):
            check(build)

    together(
        [partial(attempt, check, PLAIN) for check in CHECKS]
        + [partial(run_all, replace(shaped(i), dtype="float32")) for i in range(len(SHAPES))]
        + [partial(attempt, check, HostBuild(edits=((old, new),))) for _, old, new, check in MUTANTS]
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_kernels_pass(check: Callable[[HostBuild], None]) -> None:
    for seed in (0, 1):
        check(HostBuild(seed))


@pytest.mark.parametrize(("name", "old", "new", "check"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_killed(
    name: str,
    old: str,
    new: str,
    check: Callable[[HostBuild], None],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("killed_by", check.__name__)
    with pytest.raises((AssertionError, KernelError)) as death:
        check(HostBuild(edits=((old, new),)))
    assert "does not compile" not in str(death.value), f"{name}: {death.value}"


@pytest.mark.parametrize("index", range(len(SHAPES)), ids=lambda i: "-".join(map(str, SHAPES[i][:3])))
def test_any_shape_router_and_type(index: int) -> None:
    case = shaped(index)
    outputs = run_all(case)
    ids, weights = outputs[:2]
    assert_routed(case, ids, weights)
    assert_planned(ids, case.resident, case.logits.shape[1], outputs[2:7])
    for fused, apart in zip(outputs[7:], outputs[:7], strict=False):
        np.testing.assert_array_equal(fused, apart)
    for again, first in zip(run_all(case, HostBuild(seed=index + 1)), outputs, strict=True):
        np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("index", [5, 6])
def test_the_sanitisers_find_nothing(index: int) -> None:
    for sanitized, plain in zip(
        run_all(shaped(index), HostBuild(3, sanitize=True)), run_all(shaped(index)), strict=True
    ):
        np.testing.assert_array_equal(sanitized, plain)


@pytest.mark.parametrize(
    ("rows", "split", "known"), [(1, True, True), (300, True, True), (70, False, True), (70, True, False)]
)
def test_the_plan_takes_any_window(rows: int, split: bool, known: bool) -> None:
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, 40, (rows, 6)).astype(np.uint32)  # an expert may even come twice in a row
    resident = rng.random(40) < 0.5 if known else None
    plan = group_plan(ids, resident, expert_count=40, split=split, build=PLAIN)
    assert_planned(ids, resident, 40, plan, split)


def test_an_empty_window_has_an_empty_plan() -> None:
    ids, weights = kernels.route_select(mx.zeros((0, 40)), None, None, None, top_k=6, build=PLAIN)
    assert ids.shape == weights.shape == (0, 6)
    plan = group_plan(ids, None, expert_count=40, build=PLAIN)
    assert [x.size for x in plan] == [0, 0, 0, 0, 1]
    assert plan[4].item() == 0


def test_each_specialisation_has_a_name_of_its_own() -> None:
    names: list[str] = []

    def build(**kernel: Any) -> Any:
        names.append(kernel["name"])
        return lambda **launch: [np.zeros(shape) for shape in launch["output_shapes"]]

    for case in (
        SOFTMAX,
        replace(SOFTMAX, dtype="float16"),
        replace(SOFTMAX, norm_topk=False),
        SIGMOID,
        shaped(2),
    ):
        for _ in range(2):
            kernels.route_select(**case.arguments(), build=build)
    assert len(names) == len(set(names)) == 5


def test_without_a_gpu_the_default_builder_says_so() -> None:
    if mx.metal.is_available() or mx.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Fault, match="no GPU backend"):
        kernels.route_select(**SOFTMAX.arguments())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 17}, "top_k is 17, expected 1..16"),
        ({"top_k": 0}, "top_k is 0"),
        ({"router": "relu"}, "router is 'relu', expected one of softmax, sigmoid"),
        ({"tables": None}, "a residency map needs tables"),
        ({"tables": np.ones((2, 2, 5), np.float32)}, "expected \\(2, 2, 6\\)"),
        ({"resident": np.ones(41, bool)}, "residency map has shape"),
        ({"n_group": 3}, "n_group is 3"),
        ({"bias": np.ones(41, np.float32)}, "bias has shape"),
        ({"logits": np.zeros((6, 1025), np.float32)}, "1025 experts, the kernels take 1..1024"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kernels.route_select(**{**SOFTMAX.arguments(), **change}, build=PLAIN)


def test_the_fused_kernel_is_for_decode_windows() -> None:
    case = random_case(0, 9, 40, 6)
    with pytest.raises(InputError, match="9 rows, expected at most 8"):
        kernels.route_fused(**case.arguments(), build=PLAIN)
