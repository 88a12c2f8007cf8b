"""Sampled text has the law of plain sampling, gates and chains notwithstanding: checked from end to end."""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from strata_mlx import RetentionPolicy, SpeculativeDecoder, load
from strata_mlx.speculation.draft import MTPDrafter, Step
from strata_mlx.speculation.sampling import Sampling
from tests.speculation.reference import chi_square_p
from tests.tiny import make_checkpoint

PROMPT = [0, 1, 2, 1]
SETTINGS = Sampling(0.8)
TEXTS = 1500
Law = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """A model of three tokens."""
    folder: Path = tmp_path_factory.mktemp("law") / "small"
    return load(make_checkpoint(folder, "qwen3_next", "stacked", mtp="stacked", vocab_size=3), mtp=True)[0]


def law(model: nn.Module) -> Law:
    """Of the first three tokens."""
    result = {}
    for text in product(range(3), repeat=3):
        logprobs = SETTINGS.logprobs(model(mx.array([[*PROMPT, *text[:2]]]))[0, 3:])
        result[text] = float(np.exp(np.array(logprobs))[range(3), text].prod())
    return result


def p_value(model: nn.Module, **options: Any) -> float:
    mx.random.seed(11)
    drawn = Counter[tuple[int, ...]]()
    for _ in range(TEXTS):
        decoder = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=3, sampler=SETTINGS, **options)
        drawn[tuple(token.token for token in decoder)] += 1
    return chi_square_p(drawn, law(model))


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 2},
        {"max_steps": 2, "drafting": "stepwise", "retention": RetentionPolicy(0.5)},
        {"max_steps": 2, "retention": RetentionPolicy(schedule=(0.45, 0.5), min_cum_p=0.2)},
    ],
    ids=["chained", "stepwise", "gates"],
)
def test_text_is_distributed_as_in_plain_sampling(small: nn.Module, options: dict[str, Any]) -> None:
    assert p_value(small, **options) > 1e-3


def _gated_by_the_draw(self: MTPDrafter, state: mx.array, head: int) -> Step:
    step = DRAFT(self, state, head)
    assert step.logprobs is not None
    return step._replace(confidence=mx.exp(step.logprobs[step.token]).squeeze())


DRAFT = MTPDrafter._draft


def test_a_gate_on_the_drawn_token_would_be_seen(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MTPDrafter, "_draft", _gated_by_the_draw)
    assert p_value(small, max_steps=2, retention=RetentionPolicy(0.5)) < 1e-4
