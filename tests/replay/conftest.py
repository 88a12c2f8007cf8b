"""A tiny model whose head is sometimes right, what was recorded of it, and costs that tell every part of a round."""

from pathlib import Path

import mlx.nn as nn
import pytest

from strata_mlx import load
from strata_mlx.replay.costs import CostModel, Costs
from strata_mlx.replay.recording import Recording, record
from tests.experts.streamed import checkpoint

VOCABULARY = 5
PROMPTS = ([1, 2, 3, 0, 1], [i * i * 7 % VOCABULARY for i in range(21)], [2, 1])
TOKENS = 24
COSTS = Costs(0.8, (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), 0.03, 0.05, 0.5)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "model"
    return checkpoint(path, layout="stacked", vocab_size=VOCABULARY, seed=5, eos_token_id=None)


@pytest.fixture(scope="session")
def model(folder: Path) -> nn.Module:
    return load(folder, mtp=True)[0]


@pytest.fixture(scope="session")
def recording(model: nn.Module) -> Recording:
    return record(model, None, PROMPTS, TOKENS)


@pytest.fixture(scope="session")
def costs() -> CostModel:
    return CostModel({}, COSTS, COSTS, read=0.2, expert_bytes=1e6, pair=1e-4)
