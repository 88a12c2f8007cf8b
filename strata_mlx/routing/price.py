"""What a routing policy costs: how far its selections are from the plain router's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .ops import router_probabilities

SAMPLE_EVERY = 16  # windows of a layer, of which one is sampled
_SAMPLED = SAMPLE_EVERY // 2  # which one: not the first, which fills an empty cache
_TINY = 2.0**-126


@dataclass(frozen=True)
class Price:
    """Of the rows that the MoE layers have routed, a row for each token and layer.

    rows: all of them; drafts that were rejected afterwards count. sampled_rows: those that the other two are means of,
    None where there are none. changed: the share of the selected experts that are less probable than the plain
    router's last choice. extra_kl: nats by which ``KL(weights || router's softmax)`` exceeds that of the plain top-k,
    which is ``log(mass of the plain top-k / mass of the selected)``.
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
        self._totals = mx.zeros(2)  # picks changed and extra KL, of the sampled rows

    def record(self, layer: int, logits: mx.array, ids: mx.array | None, top_k: int) -> None:
        """A window has been routed: ``logits [T, E]`` to ``ids [T, K]``, None for those of the plain router."""
        rows, number = logits.shape[0], self._windows.get(layer, 0)
        self._windows[layer] = number + 1
        self._rows += rows
        if number % SAMPLE_EVERY != _SAMPLED:
            return
        self._sampled += rows
        self._picks += rows * top_k
        if ids is not None:
            self._totals = self._totals + distance(logits, ids, top_k)
            mx.async_eval(self._totals)  # or the logits of every sample would stay in memory

    def price(self) -> Price:
        """Of all windows until now. Waits for the device."""
        if not self._sampled:
            return Price(self._rows)
        changed, extra_kl = (float(total) for total in np.array(self._totals))
        return Price(self._rows, self._sampled, changed / self._picks, extra_kl / self._sampled)


def distance(logits: mx.array, ids: mx.array, top_k: int) -> mx.array:
    """Picks changed and extra KL in nats, float32 ``[2]``, summed over the rows of ``logits [T, E]``, which went to
    ``ids [T, K]``.
    """
    probabilities, _ = router_probabilities(logits, "softmax")
    plain = mx.topk(probabilities, top_k, axis=-1)
    chosen = mx.take_along_axis(probabilities, ids, axis=-1)
    changed = (chosen < plain.min(axis=-1, keepdims=True)).sum()
    mass = [mx.maximum(each.sum(axis=-1), _TINY) for each in (plain, chosen)]
    return mx.stack([changed.astype(mx.float32), mx.log(mass[0] / mass[1]).sum()])
