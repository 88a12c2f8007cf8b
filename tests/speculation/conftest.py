"""Tiny models with an MTP head, of every family that has one."""

from pathlib import Path

import mlx.nn as nn
import pytest

from strata_mlx import load
from tests.tiny import make_checkpoint

WITH_HEAD = ("qwen3_next", "qwen3_5_moe")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, nn.Module]:
    root: Path = tmp_path_factory.mktemp("speculation")
    return {
        family: load(make_checkpoint(root / family, family, "stacked", mtp="stacked"), mtp=True)[0]
        for family in WITH_HEAD
    }


@pytest.fixture(params=WITH_HEAD)
def model(request: pytest.FixtureRequest, models: dict[str, nn.Module]) -> nn.Module:
    return models[request.param]
