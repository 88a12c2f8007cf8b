"""Models with an MTP head, tiny ones of the first families that had one and the embedded one; see test_families.py."""

from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from strata_mlx import load
from tests.tiny import make_checkpoint

WITH_HEAD = ("qwen3_next", "qwen3_5_moe")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Model and tokenizer by family."""
    root: Path = tmp_path_factory.mktemp("speculation")
    return {
        family: load(make_checkpoint(root / family, family, "stacked", mtp="stacked"), mtp=True) for family in WITH_HEAD
    }


@pytest.fixture(params=WITH_HEAD)
def model(request: pytest.FixtureRequest, pairs: dict[str, Any]) -> nn.Module:
    result: nn.Module = pairs[request.param][0]
    return result


@pytest.fixture(scope="session")
def embedded() -> Any:
    return load(mtp=True)
