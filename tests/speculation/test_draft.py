"""The MTP head's drafts are those of a float64 forward pass over prompt, text and chain."""

from itertools import islice
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from strata_mlx import CheckpointError, load
from strata_mlx.models.trunk import Hidden, Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.speculation.draft import MTPDrafter, Step
from strata_mlx.speculation.sampling import Sampling
from tests.errors import refuses
from tests.reference import Weights, mtp_head
from tests.speculation.conftest import WITH_HEAD
from tests.tiny import make_checkpoint

TOKENS = mx.array([72, 3, 200, 3, 15, 99, 0, 31, 72, 3])


def read(model: nn.Module, drafter: MTPDrafter, tokens: mx.array = TOKENS) -> None:
    """Show ``tokens`` to the drafter, all but the first as committed ones."""
    drafter.observe(tokens[1:], Trunk(model)(tokens[None, :-1], make_cache(model)))


def values(steps: list[Step]) -> tuple[list[int], list[float]]:
    return [int(np.array(step.token)[0]) for step in steps], [float(np.array(step.confidence)) for step in steps]


def chain_of_reference(model: nn.Module, family: str, hidden: mx.array, steps: int) -> tuple[list[int], list[float]]:
    """Drafts and their probabilities after TOKENS, each computed from the beginning."""
    trunk, weights = Trunk(model), Weights.of_tiny(family)
    text, states = np.array(TOKENS[1:]).tolist(), np.array(hidden[0])
    drafts, probabilities = [], []
    for _ in range(steps):
        embedding = np.array(trunk.embed(mx.array(text)))
        last = mtp_head(weights, embedding[None], states[None])[0, -1:]
        logits = np.array(trunk.logits(mx.array(last)[None]))[0, 0].astype(np.float64)
        probability = np.exp(logits - logits.max())
        drafts.append(int(logits.argmax()))
        probabilities.append(float((probability / probability.sum()).max()))
        text, states = [*text, drafts[-1]], np.concatenate([states, last])
    return drafts, probabilities


@pytest.mark.parametrize("takes", Hidden._fields)
@pytest.mark.parametrize("family", WITH_HEAD)
def test_the_chain_is_that_of_a_float64_forward_pass(tmp_path: Path, family: str, takes: str) -> None:
    model, _ = load(make_checkpoint(tmp_path / "model", family, "stacked", mtp="stacked", mtp_hidden=takes), mtp=True)
    hidden = Trunk(model)(TOKENS[None, :-1], make_cache(model))
    drafter = MTPDrafter(model)
    read(model, drafter)
    drafts, probabilities = values(list(islice(drafter.steps(), 8)))
    expected, expected_probabilities = chain_of_reference(model, family, getattr(hidden, takes), 8)
    assert drafts == expected
    np.testing.assert_allclose(probabilities, expected_probabilities, atol=1e-5)


def test_a_chain_leaves_no_trace(model: nn.Module) -> None:
    once, twice = MTPDrafter(model), MTPDrafter(model)
    read(model, once)
    read(model, twice)
    list(islice(twice.steps(), 8))
    assert values(list(islice(twice.steps(), 5))) == values(list(islice(once.steps(), 5)))


def test_nothing_is_drafted_before_anything_was_read(model: nn.Module) -> None:
    assert list(MTPDrafter(model).steps()) == []


def test_drafts_are_drawn_from_what_they_say(model: nn.Module) -> None:
    drafter = MTPDrafter(model, Sampling(1.0, top_k=3))
    read(model, drafter)
    mx.random.seed(0)
    first = [next(drafter.steps()) for _ in range(200)]
    logprobs = first[0].logprobs
    assert logprobs is not None
    probabilities = np.exp(np.array(logprobs))
    counts = np.bincount(values(first)[0], minlength=probabilities.size) / 200
    assert (counts[probabilities == 0] == 0).all()
    np.testing.assert_allclose(counts, probabilities, atol=0.12)
    assert len(set(values(first)[1])) == 1  # what the gates look at does not depend on the draw


def test_a_head_that_was_not_asked_for_long_reads_the_latest_tokens_only(model: nn.Module) -> None:
    drafter, hidden = MTPDrafter(model), Trunk(model)(TOKENS[None, :1], make_cache(model))
    for _ in range(100):
        drafter.observe(TOKENS[:1], hidden)
    drafter.catch_up()
    assert drafter.cache[0].offset == 32


@pytest.mark.parametrize("family", WITH_HEAD)
def test_an_unknown_kind_of_hidden_state_is_refused(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family, "stacked", mtp="stacked", mtp_hidden="both")
    with refuses(CheckpointError, folder, "'both'", "before, after"):
        load(folder, mtp=True)
