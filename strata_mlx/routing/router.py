"""The router of a MoE layer as a value: what decides the experts of a token and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Router:
    """How logits ``[E]`` become ``top_k`` experts and their weights.

    kind: "softmax" over all experts, or "sigmoid" of each (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), which takes a
    selection bias: it is a parameter of the layer, and given with the logits. norm_topk: the weights are divided by
    their sum, to which ``eps`` is added. n_group, topk_group: a sigmoid router chooses from the best ``topk_group`` of
    ``n_group`` equal groups of experts. scale: multiplies the weights last.
    """

    top_k: int
    norm_topk: bool = True
    kind: Literal["softmax", "sigmoid"] = "softmax"
    n_group: int = 1
    topk_group: int = 1
    scale: float = 1.0
    eps: float = 0.0

    def options(self) -> dict[str, Any]:
        """As select() takes them. It has no eps: its own floor for the sum is far above."""
        return {
            "top_k": self.top_k,
            "norm_topk": self.norm_topk,
            "router": self.kind,
            "n_group": self.n_group,
            "topk_group": self.topk_group,
            "scale": self.scale,
        }
