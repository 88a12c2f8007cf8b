"""The properties of selection on the Metal kernel: on the GPU where MLX has one, and else on the test host.

One shape, since every shape, type and router is compiled anew; tests/kernels sweeps those.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_mlx import kernels
from strata_mlx.errors import Fault
from strata_mlx.routing import Executor, RoutingPolicy
from strata_mlx.routing.executors import kernel_executor
from tests.routing.properties import PROPERTIES
from tests.routing.test_select import assert_recovered
from tests.strategies import RoutingCase, policies, routing_cases

SHAPE = {"experts": 200, "top_k": 10, "norm_topk": True, "grouped": False}


@pytest.fixture(scope="module")
def executor() -> Executor:
    try:
        return kernel_executor(kernels.default_build())
    except Fault:
        from tests.host.host import HostBuild

        return kernel_executor(HostBuild(seed=1))


@pytest.mark.parametrize("name", PROPERTIES)
@settings(max_examples=40)
@given(data=st.data())
def test_property(executor: Executor, name: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    case: RoutingCase = data.draw(routing_cases(dtype=dtype, **SHAPE))
    PROPERTIES[name](executor, case)


@pytest.mark.parametrize("rank", range(10))
@settings(max_examples=40)
@given(policy=policies(), data=st.data())
def test_the_weight_of_a_resident_is_recovered_at_rank(
    executor: Executor, rank: int, policy: RoutingPolicy, data: st.DataObject
) -> None:
    case = data.draw(routing_cases(policy=policy, router="softmax", residency="all", dtype="float32", **SHAPE))
    assert_recovered(executor, case, rank)
