"""How the MoE layers of a model choose experts: policy, residency and executor in one value."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import mlx.core as mx

from strata_mlx.routing.additive import LogitRange
from strata_mlx.routing.executors import default_executor
from strata_mlx.routing.ops import Executor, Selection, plain_router, select_ops
from strata_mlx.routing.policy import FACTOR, RoutingPolicy
from strata_mlx.routing.residency import Residency
from strata_mlx.routing.select import select

_verifying: ContextVar[bool] = ContextVar("verifying", default=False)


@contextmanager
def verify_window() -> Iterator[None]:
    """The forwards in this block are of verify windows: their first row is the head, the later ones are drafts.

    All rows of other forwards, of a prompt or of plain decoding, are heads.
    """
    token = _verifying.set(True)
    try:
        yield
    finally:
        _verifying.reset(token)


@dataclass(frozen=True, eq=False)
class Routing:
    """policy: how residents are preferred. residency: what is in memory, None where that is not known.

    executor: what computes the selection; by default the kernel on a GPU, and MLX ops elsewhere.
    """

    policy: RoutingPolicy = field(default_factory=RoutingPolicy)
    residency: Residency | None = None
    executor: Executor = field(default_factory=default_executor)
    _ranges: dict[int, LogitRange] = field(default_factory=dict)  # by layer, for cache_prior

    @property
    def mode(self) -> str:
        """Is "exact" if the model's own experts are always chosen, "biased" if residents may be preferred."""
        return "biased" if self.policy.active and self.residency and self.residency.layers else "exact"

    def begin(self) -> None:
        """Forget what a request has taught a cache_prior policy; called when another one begins."""
        self._ranges.clear()

    def route(self, layer: int, logits: mx.array, top_k: int, norm_topk: bool) -> Selection:
        """Experts and weights for router logits ``[..., T, E]``: ids uint32 and weights float, both ``[..., T, K]``.

        Where the policy cannot fire and no kernel runs, this is mlx-lm's own chain of operations, bit for bit.
        """
        resident = self._resident(layer, top_k)
        if resident is None and self.executor is select_ops:
            return plain_router(logits, top_k, norm_topk)
        shape, rows = logits.shape, logits.reshape(-1, logits.shape[-1])
        drafts = mx.arange(rows.shape[0]) % shape[-2] > 0 if _verifying.get() else mx.zeros(rows.shape[0], mx.bool_)
        known = self._ranges.get(layer, LogitRange())
        ids, weights = select(
            rows,
            resident,
            self.policy,
            top_k=top_k,
            draft_rows=drafts,
            norm_topk=norm_topk,
            logit_range=known,
            executor=self.executor,
            layer=layer,
        )
        if resident is not None and self.policy.kind == "cache_prior":
            self._ranges[layer] = known.after(rows, rows.shape[0])
        return ids.reshape(*shape[:-1], top_k), weights.reshape(*shape[:-1], top_k)

    def _resident(self, layer: int, top_k: int) -> mx.array | None:
        """The map of a layer, None where no score would be scaled: then the run is the plain router's to the last
        bit.
        """
        resident = self.residency.of(layer) if self.residency else None
        if resident is None or not self.policy.active:
            return None
        if self.policy.kind == "moce" and (self.policy.tables(top_k)[:, FACTOR] == 1).all():
            return None
        return mx.array(resident)
