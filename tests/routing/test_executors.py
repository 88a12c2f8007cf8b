"""Which executor is used on a device, and what happens when a kernel does not agree with the op path."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from strata_mlx.errors import Fault
from strata_mlx.routing import Residency, Routing, RoutingPolicy, executors, select_ops
from strata_mlx.routing import routing as routing_module
from strata_mlx.routing.executors import default_executor, disagreement, select_kernel


def wrong_weights(*args: Any, **options: Any) -> Any:
    ids, weights = select_ops(*args, **options)
    return ids, weights * 1.001


def wrong_ids(*args: Any, **options: Any) -> Any:
    ids, weights = select_ops(*args, **options)
    return ids[:, ::-1], weights


def nan_weights(*args: Any, **options: Any) -> Any:
    ids, weights = select_ops(*args, **options)
    return ids, weights * np.nan


def broken(*_args: Any, **_options: Any) -> Any:
    raise Fault("no such kernel")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU, which is not asked to compute anything."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    default_executor.cache_clear()


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    default_executor.cache_clear()


def test_the_cpu_computes_with_ops() -> None:
    if mx.default_device() == mx.cpu:
        assert default_executor() is select_ops


def test_an_executor_that_agrees_has_no_disagreement() -> None:
    assert disagreement(select_ops) is None


@pytest.mark.parametrize(
    ("executor", "says"),
    [(wrong_weights, "weights are off"), (nan_weights, "weights are off"), (wrong_ids, "other experts")],
)
def test_a_difference_is_found_and_told(executor: Any, says: str) -> None:
    assert says in str(disagreement(executor))


@pytest.mark.parametrize("executor", [wrong_weights, wrong_ids, broken])
@pytest.mark.usefixtures("gpu")
def test_a_kernel_that_differs_or_fails_is_not_used_and_that_is_said(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "select_kernel", executor)
    with pytest.warns(RuntimeWarning, match="the routing kernel is not used on this device"):
        assert default_executor() is select_ops


@pytest.mark.usefixtures("gpu")
def test_a_kernel_that_agrees_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "disagreement", lambda _: None)
    assert default_executor() is select_kernel


def test_exact_routing_builds_and_checks_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask() -> Any:
        asked.append("asked")
        return select_ops

    monkeypatch.setattr(routing_module, "default_executor", ask)
    Routing()
    Routing(RoutingPolicy(1.0))
    assert not asked
    biased = Routing(RoutingPolicy(1.0), Residency({0: np.ones(4, bool)}))
    assert asked == ["asked"]
    assert biased.executor is select_ops
