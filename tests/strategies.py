"""All Hypothesis strategies, and the cases that they draw."""

from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_mlx.routing import RoutingPolicy
from strata_mlx.speculation.calibration import Calibration, Curve
from strata_mlx.speculation.economic import EconomicPolicy
from strata_mlx.speculation.retention import RetentionPolicy

# Logits are multiples of this. It is no difference of round bonuses, so that scores which are not equal by
# construction are well apart: a pick can then be compared exactly.
STEP = 0.1371
EXTREMES = [
    np.nan,
    np.inf,
    -np.inf,
    0.0,
    -0.0,
    1e-40,
    -1e-40,
    3.4028235e38,
    -3.4028235e38,
    1e30,
    88.0,
    -104.0,
]
LOGIT_TYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True)
class RoutingCase:
    """The arguments of one ``select``, as NumPy arrays; the logits are exact in ``dtype``."""

    logits: NDArray[np.float32]  # [T, E]
    resident: NDArray[np.bool_] | None  # [E]
    policy: RoutingPolicy
    top_k: int
    dtype: str = "float32"
    draft_rows: NDArray[np.bool_] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # norm_topk, router, scale, groups
    bias: NDArray[np.float32] | None = None
    tie_free: bool = False

    def with_policy(self, **changes: Any) -> "RoutingCase":
        return replace(self, policy=replace(self.policy, **changes))

    @property
    def drafts(self) -> NDArray[np.bool_]:
        return np.arange(len(self.logits)) > 0 if self.draft_rows is None else self.draft_rows

    @property
    def router(self) -> str:
        return str(self.options.get("router", "softmax"))


def as_dtype(logits: NDArray[np.float64], dtype: str) -> NDArray[np.float32]:
    """The nearest numbers that ``dtype`` holds, as float32."""
    return np.array(mx.array(logits.astype(np.float32)).astype(LOGIT_TYPES[dtype]).astype(mx.float32))


def draw_case(rng: np.random.Generator, policy: RoutingPolicy, **fixed: Any) -> RoutingCase:
    """A case of the given policy, random in everything that ``fixed`` does not say."""

    def pick(name: str, choices: list[Any]) -> Any:
        return fixed[name] if name in fixed else choices[rng.integers(len(choices))]

    experts = pick("experts", [16, 24, 32, 128, 200])
    top_k = pick("top_k", [k for k in (1, 2, 4, 8, 10, 16) if k >= policy.protect])
    rows = pick("rows", [1, 2, 4])
    dtype = pick("dtype", ["float32", "float32", "bfloat16", "float16"])
    tie_free = pick("tie_free", [True, False]) and dtype == "float32"
    order = np.array([rng.permutation(experts) for _ in range(rows)])
    logits = STEP * (order if tie_free else order // pick("repeats", [2, 4, experts]))
    logits = logits * pick("peak", [0.1, 0.5, 1.0] if experts > 32 else [1.0])
    router = pick("router", ["softmax", "softmax", "sigmoid"])
    options: dict[str, Any] = {"norm_topk": pick("norm_topk", [True, True, False]), "router": router}
    options["scale"] = pick("scale", [1.0, 2.5])
    bias = None
    if router == "sigmoid":
        logits = 0.2 * logits - 2.0
        bias = rng.normal(scale=0.3, size=experts).astype(np.float32) if pick("biased", [True, False]) else None
        if pick("grouped", [True, False]):
            options |= {"n_group": 8 if experts % 16 else 4, "topk_group": 8 if experts < 32 else 3}
            options["topk_group"] = max(-(-top_k // (experts // options["n_group"])), min(3, options["n_group"]))
    residency = pick("residency", ["some", "some", "all", "none", "few", "unknown"])
    share = {"some": 0.5, "all": 1.0, "none": 0.0, "few": 0.1}.get(residency)
    return RoutingCase(
        logits=as_dtype(logits, dtype),
        resident=None if share is None else rng.random(experts) < share,
        policy=policy,
        top_k=top_k,
        dtype=dtype,
        draft_rows=rng.random(rows) < 0.5 if pick("mixed_rows", [True, False]) else None,
        options=options,
        bias=bias,
        tie_free=bool(tie_free and bias is None),
    )


bonuses = st.one_of(
    st.sampled_from([0.0, -1.0, 1e-9, 0.4, 0.85, float(np.log(2)), float(np.log(4)), 20.0, 43.6]),
    st.floats(-20, 40),
)


@st.composite
def policies(draw: st.DrawFn) -> RoutingPolicy:
    """Policies of kind "moce"; ``protect`` is at most 16."""
    return RoutingPolicy(
        moce_bonus=draw(bonuses),
        r1_bonus=draw(bonuses),
        protect=draw(st.integers(0, 10)),
        draft_moce=draw(st.booleans()),
    )


@st.composite
def additive_policies(draw: st.DrawFn) -> RoutingPolicy:
    """Policies of the other kinds, for a top_k of 8."""
    kind = draw(st.sampled_from(["cache_prior", "max_rank", "mass", "margin"]))
    parameters: dict[str, dict[str, Any]] = {
        "cache_prior": {"prior_lambda": draw(st.floats(0, 4))},
        "max_rank": {"max_rank": draw(st.integers(8, 40))},
        "mass": {"mass": draw(st.floats(0, 1))},
        "margin": {"margin": draw(st.floats(0, 1)), "sure_margin": draw(st.none() | st.floats(0, 1))},
    }
    return RoutingPolicy(kind=kind, protect=draw(st.integers(0, 8)), **parameters[kind])


@st.composite
def routing_cases(draw: st.DrawFn, /, **fixed: Any) -> RoutingCase:
    """Any policy of kind "moce" on any router, with logits that are far apart or exactly equal."""
    policy = fixed.pop("policy", None) or draw(policies())
    return draw_case(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), policy, **fixed)


@st.composite
def extreme_cases(draw: st.DrawFn) -> RoutingCase:
    """NaN, infinities, huge and denormal logits, rows of one value among them."""
    case = draw(routing_cases(dtype="float32", tie_free=False))
    rows, experts = case.logits.shape
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = draw(st.lists(st.sampled_from(EXTREMES), min_size=1, max_size=4))
    logits = np.where(
        rng.random((rows, experts)) < draw(st.sampled_from([0.05, 0.5, 1.0])),
        rng.choice(np.array(values, np.float32), (rows, experts)),
        case.logits,
    )
    return replace(case, logits=logits.astype(np.float32))


@st.composite
def windows(draw: st.DrawFn) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Selected ids ``[T, K]``, distinct within a row, and a residency map ``[E]``."""
    experts = draw(st.sampled_from([1, 2, 5, 32, 256, 1024]))
    rows, top_k = draw(st.integers(0, 9)), draw(st.integers(1, min(16, experts)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = np.array([rng.permutation(experts)[:top_k] for _ in range(rows)], np.uint32).reshape(rows, top_k)
    return ids, rng.random(experts) < draw(st.sampled_from([0.0, 0.5, 1.0]))


# Round numbers meet each other exactly, also as products; the rest is anything.
likelihoods = st.sampled_from([0.0, 0.1, 0.25, 0.35, 0.5, 0.7, 0.9, 1.0]) | st.floats(0, 1)
observations = likelihoods | st.sampled_from([np.nan, np.inf, -np.inf, -0.1, -5e-324, float(np.nextafter(1, 2)), 2.0])
schedules = st.lists(likelihoods, min_size=1, max_size=8).map(tuple)


@st.composite
def retention_policies(draw: st.DrawFn) -> RetentionPolicy:
    """Neither gate, either, or both."""
    schedule = draw(st.none() | schedules)
    return RetentionPolicy(draw(likelihoods), schedule, draw(st.just(0.0) | likelihoods.map(lambda p: p**2)))


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Logistic or with knots."""
    slopes = st.sampled_from([0.0, 1.0]) | st.floats(0, 20)
    knots = sorted(draw(st.sets(st.floats(-30, 30), max_size=6)))
    values = sorted(draw(st.lists(likelihoods, min_size=len(knots), max_size=len(knots))))
    return Curve(draw(st.floats(-50, 50)), draw(slopes), draw(slopes), tuple(knots), tuple(values))


def calibrations() -> st.SearchStrategy[Calibration]:
    return st.lists(curves(), min_size=1, max_size=8).map(tuple).map(Calibration)


@st.composite
def economic_policies(draw: st.DrawFn, most: int = 4) -> EconomicPolicy:
    """Any costs, and a few chains."""
    n = draw(st.integers(1, most))
    seconds = st.floats(2**-6, 8)
    chains = st.lists(likelihoods, min_size=n, max_size=n).map(tuple)
    return EconomicPolicy(
        draw(calibrations()),
        draw(seconds),
        tuple(draw(st.lists(st.just(0.0) | st.floats(0, 4), min_size=n, max_size=n))),
        tuple(draw(st.lists(seconds, min_size=n + 1, max_size=n + 1))),
        tuple(draw(st.lists(chains, min_size=1, max_size=3))),
        draw(st.sampled_from([1.0, 0.75, 1.5])),
        draw(st.sampled_from([0.0, 0.01])),
    )
