"""Which experts a token goes to, and with what weights: policy, selection with recovery, group plan."""

from typing import TYPE_CHECKING

from .._lazy import lazy
from .policy import RoutingPolicy

if TYPE_CHECKING:
    from .additive import LogitRange
    from .group_plan import GroupPlan, plan
    from .ops import Executor, Selection, select_ops
    from .price import Price
    from .residency import LiveResidency, Residency
    from .router import Router
    from .routing import Routing, drafting, verify_window
    from .selection import select

__all__ = [
    "Executor",
    "GroupPlan",
    "LiveResidency",
    "LogitRange",
    "Price",
    "Residency",
    "Router",
    "Routing",
    "RoutingPolicy",
    "Selection",
    "drafting",
    "plan",
    "select",
    "select_ops",
    "verify_window",
]

__getattr__ = lazy(
    __name__,
    {
        "Executor": "ops",
        "GroupPlan": "group_plan",
        "LiveResidency": "residency",
        "LogitRange": "additive",
        "Price": "price",
        "Residency": "residency",
        "Router": "router",
        "Routing": "routing",
        "Selection": "ops",
        "drafting": "routing",
        "plan": "group_plan",
        "select": "selection",
        "select_ops": "ops",
        "verify_window": "routing",
    },
)
