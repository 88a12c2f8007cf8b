"""Slots as on a CUDA device, with the kernel that fills them on the test host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import mlx.core as mx
import mlx.nn as nn

from strata_mlx.experts.ranges import Field
from strata_mlx.experts.slots import Promise
from strata_mlx.experts.staged import EXPERTS, HEAD, StagedSlots, Staging
from tests.host.host import HostBuild

ON_HOST = HostBuild(in_place="field")

at_once = partial(StagedSlots, build=ON_HOST)


class ToldLater(StagedSlots):
    """The test host runs a kernel at once, and a device when its output is computed: so here an MLX operation looks at
    the orders when it is computed, and the kernel runs when they are given.
    """

    def __init__(self, experts: nn.Module, fields: Sequence[Field], count: int, staging: Staging | None = None):
        super().__init__(experts, fields, count, staging, ON_HOST)
        self.patient = True

    def _launch(self, ticket: int, experts: int, shape: tuple[int, ...]) -> mx.array:
        if len(shape) == 1:  # no promise
            return super()._launch(ticket, experts, shape)
        self._experts = experts
        first = HEAD + EXPERTS
        orders = self._staging.orders.array[first : first + prod(shape)]
        return orders.reshape(shape) + mx.array(0, mx.uint32)

    def _tell(self, ticket: int, indices: mx.array, promise: Promise, slots: Sequence[int]) -> None:
        super()._tell(ticket, indices, promise, slots)
        super()._launch(ticket, self._experts, (len(slots),))


STAGED = (at_once, ToldLater)
