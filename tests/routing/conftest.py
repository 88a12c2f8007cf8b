"""The executors that the properties run on: one line each."""

import pytest
from hypothesis import settings

from strata_mlx.routing import Executor, select_ops

EXECUTORS: dict[str, Executor] = {"ops": select_ops}

settings.register_profile("routing", deadline=None, max_examples=100)
settings.load_profile("routing")


@pytest.fixture(scope="session", params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> Executor:
    return EXECUTORS[request.param]
