"""Which experts a token goes to, and with what weights: policy, selection with recovery, group plan."""

from strata_mlx.routing.additive import LogitRange
from strata_mlx.routing.ops import Executor, Selection, select_ops
from strata_mlx.routing.plan import GroupPlan, plan
from strata_mlx.routing.policy import RoutingPolicy
from strata_mlx.routing.residency import Residency
from strata_mlx.routing.routing import Routing, verify_window
from strata_mlx.routing.select import select

__all__ = [
    "Executor",
    "GroupPlan",
    "LogitRange",
    "Residency",
    "Routing",
    "RoutingPolicy",
    "Selection",
    "plan",
    "select",
    "select_ops",
    "verify_window",
]
