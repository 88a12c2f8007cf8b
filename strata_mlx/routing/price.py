"""What a routing policy costs: how far its selections are from the plain router's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .ops import router_scores
from .router import Router

SAMPLE_EVERY = 16  # windows of a layer, of which one is sampled
_SAMPLED = SAMPLE_EVERY // 2  # which one: not the first, which fills an empty cache
_TINY = 2.0**-126


@dataclass(frozen=True)
class Price:
    """Of the rows that the MoE layers of the trunk have routed, a row for each token and layer.

    rows: all of them; drafts that were rejected afterwards count. sampled_rows: those that the other two are means of,
    None where there are none. changed: the share of the selected experts that the router ranks below its own last
    choice. extra_kl: nats by which ``KL(weights || router's probabilities)`` exceeds that of the plain top-k, which is
    ``log(mass of the plain top-k / mass of the selected)``. A sigmoid router's probabilities are its scores over their
    sum; its selection bias, which only ranks, can make this negative.
    """

    rows: int = 0
    sampled_rows: int = 0
    changed: float | None = None
    extra_kl: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.changed is None or self.extra_kl is None:
            return "not sampled"
        return f"{self.changed:.1%} of the selections changed, {self.extra_kl:.4f} nats from the router's own"


class Meter:
    """Measures a Price on one window in SAMPLE_EVERY of each layer, without a wait for the device."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._windows: dict[int, int] = {}  # by layer
        self._rows = self._sampled = self._picks = 0
        self._latest = -1  # layer of which a window was sampled
        self._totals = mx.zeros(2)  # picks changed and extra KL, of the sampled rows

    def record(
        self, layer: int, logits: mx.array, ids: mx.array | None, router: Router, bias: mx.array | None = None
    ) -> None:
        """A window has been routed: ``logits [T, E]`` to ``ids [T, K]``, None for those of the plain router."""
        rows, number = logits.shape[0], self._windows.get(layer, 0)
        self._windows[layer] = number + 1
        self._rows += rows
        if number % SAMPLE_EVERY != _SAMPLED:
            return
        self._sampled += rows
        self._picks += rows * router.top_k
        if ids is not None:
            if layer <= self._latest:  # another window: or the logits of every sample would stay in memory
                mx.async_eval(self._totals)
            # Those of this window may not be computed yet: the experts of a layer before may be unknown.
            self._latest = layer
            self._totals = self._totals + distance(logits, ids, router, bias)

    def price(self) -> Price:
        """Of all windows until now. Waits for the device."""
        if not self._sampled:
            return Price(self._rows)
        changed, extra_kl = (float(total) for total in np.array(self._totals))
        return Price(self._rows, self._sampled, changed / self._picks, extra_kl / self._sampled)


def distance(logits: mx.array, ids: mx.array, router: Router, bias: mx.array | None = None) -> mx.array:
    """Picks changed and extra KL in nats, float32 ``[2]``, summed over the rows of ``logits [T, E]``, which went to
    ``ids [T, K]``. bias: as in Routing.route().
    """
    probabilities, _, offset = router_scores(logits, router.kind, bias, router.n_group, router.topk_group)
    ranked = probabilities if offset is None else probabilities + offset
    plain = mx.argpartition(-ranked, router.top_k - 1, axis=-1)[:, : router.top_k]
    last = mx.take_along_axis(ranked, plain, axis=-1).min(axis=-1, keepdims=True)
    changed = (mx.take_along_axis(ranked, ids, axis=-1) < last).sum()
    masses = [mx.take_along_axis(probabilities, each, axis=-1).sum(axis=-1) for each in (plain, ids)]
    before, after = (mx.maximum(mass, _TINY) for mass in masses)
    return mx.stack([changed.astype(mx.float32), mx.log(before / after).sum()])
