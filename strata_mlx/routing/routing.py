"""How the MoE layers of a model choose experts: policy, residency and executor in one value."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import mlx.core as mx

from strata_mlx.routing.additive import LogitRange, margins, select_margin
from strata_mlx.routing.executors import default_executor
from strata_mlx.routing.ops import Executor, Selection, plain_router
from strata_mlx.routing.policy import FACTOR, RoutingPolicy
from strata_mlx.routing.price import Meter, Price
from strata_mlx.routing.residency import LiveResidency, ResidencyMap
from strata_mlx.routing.router import Router
from strata_mlx.routing.selection import check_arguments, select

Margins = tuple[mx.array, mx.array, mx.array]  # as from select_margin()


class _Window:
    """A verify window, with what a draft head has said of its first rows."""

    def __init__(self, confidences: Sequence[mx.array]):
        self._confidences = confidences

    @cached_property
    def confidence(self) -> mx.array | None:
        """Float32 ``[N]``, put together for the first layer that asks; None of no row."""
        return mx.stack(list(self._confidences)).astype(mx.float32) if self._confidences else None


_verifying: ContextVar[_Window | None] = ContextVar("verifying", default=None)
_drafting: ContextVar[bool] = ContextVar("drafting", default=False)


@contextmanager
def verify_window(confidences: Sequence[mx.array] = ()) -> Iterator[None]:
    """The forwards in this block are of verify windows: their first row is the head, the later ones are drafts.

    All rows of other forwards, of a prompt or of plain decoding, are heads.
    confidences: float scalars, how sure a draft head is of the token after each of the first rows.
    """
    token = _verifying.set(_Window(confidences))
    try:
        yield
    finally:
        _verifying.reset(token)


@contextmanager
def drafting() -> Iterator[None]:
    """The forwards in this block are of a draft head. What its rows are routed to costs the text nothing, so that they
    have the margin of rows that are sure.
    """
    token = _drafting.set(True)
    try:
        yield
    finally:
        _drafting.reset(token)


@dataclass(frozen=True, eq=False)
class Routing:
    """policy: how residents are preferred. residency: what is in memory, None where that is not known. One that
    changes is asked for every window, whose rows all see what was in memory when it began.

    executor: what computes the selection; by default, and where a policy can act, the kernel on a GPU, and MLX ops
    elsewhere. Exact routing needs none: it builds and checks no kernel.
    observer: is told the layer and the ids ``[..., T, K]`` of every selection, which may not have been computed yet.
    """

    policy: RoutingPolicy = field(default_factory=RoutingPolicy)
    residency: ResidencyMap | None = None
    executor: Executor | None = None
    observer: Callable[[int, mx.array], object] | None = None
    _ranges: dict[int, LogitRange] = field(default_factory=dict)  # by layer, for cache_prior
    _maps: dict[int, tuple[int, mx.array | None]] = field(default_factory=dict)  # by layer: version, on the device
    _meter: Meter = field(default_factory=Meter)
    mode: str = field(init=False)
    """Is "exact" if the model's own experts are always chosen, "biased" if residents may be preferred."""

    def __post_init__(self) -> None:
        biased = self.policy.active and self.residency and self.residency.layers
        object.__setattr__(self, "mode", "biased" if biased else "exact")
        if self.executor is None and biased:
            object.__setattr__(self, "executor", default_executor())

    def __str__(self) -> str:
        if self.mode == "biased":
            return f"biased, {self.policy}"
        idle = self.policy.active and " (the policy has no residency map to act on)"
        return f"exact{idle or ''}"

    def to_dict(self) -> dict[str, Any]:
        """Mode and policy, and in biased mode the price of the latest request until now, ready for JSON."""
        result = {"mode": self.mode, "policy": json.loads(self.policy.to_json())}
        return {**result, "price": self.price.to_dict()} if self.mode == "biased" else result

    @property
    def lazy(self) -> bool:
        """Whether a selection has nothing of its own window computed at once."""
        return self.observer is None

    @property
    def price(self) -> Price:
        """What the policy has cost the latest request until now. Waits for the device."""
        return self._meter.price()

    def begin(self) -> None:
        """Forget what a request has taught a cache_prior policy, and its price; called when another one begins."""
        self._ranges.clear()
        self._meter.clear()

    def route(
        self,
        layer: int,
        logits: mx.array,
        router: Router,
        bias: mx.array | None = None,
        plain: Callable[[mx.array, Router, mx.array | None], Selection] = plain_router,
    ) -> Selection:
        """Experts and weights for router logits ``[..., T, E]``: ids uint32 and weights float, both ``[..., T, K]``.

        Where no score would be scaled, this is what ``plain`` gives: mlx-lm's own chain of operations, bit for bit.
        bias: of a sigmoid router, float ``[E]``, for selection only.
        """
        selection = self._select(layer, logits, router, bias, plain)
        if self.observer is not None:
            self.observer(layer, selection[0])
        return selection

    def _select(
        self,
        layer: int,
        logits: mx.array,
        router: Router,
        bias: mx.array | None,
        plain: Callable[[mx.array, Router, mx.array | None], Selection],
    ) -> Selection:
        if self.mode == "exact":
            return plain(logits, router, bias)
        shape, rows = logits.shape, logits.reshape(-1, logits.shape[-1])
        resident = self._resident(layer, router.top_k, rows.shape[0])
        assert self.residency is not None, "the mode is biased"
        if resident is None:
            self.residency.wants(layer, None)
            self._record(layer, rows, None, router, bias)
            return plain(logits, router, bias)
        if self.policy.kind == "margin":
            ids, weights, own = self._by_margin(rows, resident, router, bias)
            self.residency.wants(layer, lambda: own.reshape(*shape[:-1], -1))
        else:
            window = shape[-2] if _verifying.get() else 0
            ids, weights = self._by_score(layer, rows, resident, router, bias, _draft_rows(rows.shape[0], window))
            self.residency.wants(layer, lambda: plain(logits, router, bias)[0])
        self._record(layer, rows, ids, router, bias)
        return ids.reshape(*shape[:-1], -1), weights.reshape(*shape[:-1], -1)

    def _by_score(
        self,
        layer: int,
        rows: mx.array,
        resident: mx.array,
        router: Router,
        bias: mx.array | None,
        draft_rows: mx.array,
    ) -> Selection:
        assert self.executor is not None, "the mode is biased"
        known = self._ranges.get(layer) if self.policy.kind == "cache_prior" else None
        ids, weights = select(
            rows,
            resident,
            self.policy,
            draft_rows=draft_rows,
            selection_bias=bias,
            logit_range=known,
            executor=self.executor,
            layer=layer,
            **router.options(),
        )
        if self.policy.kind == "cache_prior":
            # The rows of a window may be rejected, all but the first.
            learned = 1 if _verifying.get() else rows.shape[0]
            self._ranges[layer] = (known or LogitRange()).after(rows, learned)
        return ids, weights

    def prepare(self, router: Router, experts: int, bias: mx.array | None = None) -> None:
        """Have compiled what would be compiled in the middle of a text: on a CPU that takes seconds, until it is kept
        on disk. experts: of a layer with this ``router`` and ``bias``.
        """
        if self.mode == "biased" and self.policy.kind == "margin":
            resident = mx.zeros(experts, mx.bool_)
            for rows in (1, 2):  # two kinds of kernels
                mx.eval(self._by_margin(mx.zeros((rows, experts)), resident, router, bias))

    def _by_margin(self, rows: mx.array, resident: mx.array, router: Router, bias: mx.array | None) -> Margins:
        confidence = self._confidence(rows.shape[0])
        sure = mx.zeros(rows.shape[0]) if confidence is None else confidence
        arrays = (rows.astype(mx.float32), resident, self._margins, sure, *(() if bias is None else (bias,)))
        # A compiled graph is kept for each number of rows, of which prompts have many.
        few = rows.shape[0] <= LiveResidency.PROMPT_ROWS
        return _margin_selection(router, self.policy.protect, compiled=few)(*arrays)

    @cached_property
    def _margins(self) -> mx.array:
        return margins(self.policy)

    def _record(self, layer: int, rows: mx.array, ids: mx.array | None, router: Router, bias: mx.array | None) -> None:
        """Rows of a draft head are at no price."""
        if not _drafting.get():
            self._meter.record(layer, rows, ids, router, bias)

    def _confidence(self, rows: int) -> mx.array | None:
        """How sure a draft head is of the token after each of so many rows, 0 where it has not said; None where that
        does not matter.
        """
        window = _verifying.get()
        if self.policy.sure_margin is None:
            return None
        if _drafting.get():
            return mx.ones(rows)
        if window is None or window.confidence is None:
            return None
        return mx.pad(window.confidence, (0, rows - window.confidence.size))

    def _resident(self, layer: int, top_k: int, rows: int) -> mx.array | None:
        """The map of a layer for a window of so many rows, None where no score would be scaled: then the run is the
        plain one to the last bit.
        """
        assert self.residency is not None, "the mode is biased"
        if not self.residency.acts_on(rows):
            return None
        version = self.residency.version(layer)
        known = self._maps.get(layer)
        if known is None or known[0] != version:
            resident = self.residency.of(layer)
            if resident is not None and self._has_no_factor(top_k):
                resident = None
            known = version, None if resident is None else mx.array(resident)  # a copy
            self._maps[layer] = known
        return known[1]

    def _has_no_factor(self, top_k: int) -> bool:
        return self.policy.kind == "moce" and bool((self.policy.tables(top_k)[:, FACTOR] == 1).all())


@cache
def _margin_selection(router: Router, protect: int, compiled: bool) -> Callable[..., Margins]:
    """select_margin(), ``compiled`` into fewer launches. Whatever windows or policies may have another of is an
    argument: a constant would be compiled in. Arguments are checked where they are seen for the first time.
    """

    def choose(
        logits: mx.array, resident: mx.array, margins: mx.array, confidence: mx.array, bias: mx.array | None = None
    ) -> Margins:
        options: dict[str, Any] = {"selection_bias": bias, **router.options()}
        check_arguments(logits, resident, RoutingPolicy(kind="margin", protect=protect), None, confidence, **options)
        return select_margin(logits, resident, margins, confidence, protect=protect, **options)

    return mx.compile(choose) if compiled else choose


@cache
def _draft_rows(rows: int, window: int) -> mx.array:
    """Which of ``rows`` are drafts, bool: all but the first of each ``window`` rows, and without windows (0) none."""
    return mx.array([bool(window and row % window) for row in range(rows)])
