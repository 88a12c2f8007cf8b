"""Expert parallelism: several processes run one model together, and each has a share of every layer's experts.

The trunk is replicated. Every process, a *rank*, computes the same tokens with it, and of each MoE layer the outputs of
its own experts; one exchange per layer adds up the parts. What one rank alone can know (the clock, the requests of
clients, a random seed) rank 0 decides, and tells the others.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .placement import Placement, balanced, even
    from .ranks import Ranks, expert_parallel

__all__ = ["Placement", "Ranks", "balanced", "even", "expert_parallel"]

__getattr__ = lazy(
    __name__,
    {
        "Placement": "placement",
        "Ranks": "ranks",
        "balanced": "placement",
        "even": "placement",
        "expert_parallel": "ranks",
    },
)
