"""Speculation with the heads of every family: one head or several, experts or none, and windows that slide."""

from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from strata_mlx import SpeculativeDecoder, load
from strata_mlx.engine import generate_step
from strata_mlx.models.mtp import DraftHead
from strata_mlx.models.trunk import Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.speculation.draft import MTPDrafter
from strata_mlx.speculation.window import Window

# The same tests as for Qwen's families, over this module's models.
from tests.speculation.test_window import (  # noqa: F401
    test_a_window_over_the_growth_of_a_cache_is_taken_back,
    test_decoding_goes_on_from_a_committed_window,
    test_every_cache_is_as_after_plain_steps,
    test_less_may_be_kept_later,
    test_the_trunk_computes_the_models_own_logits,
)
from tests.tiny import TINY, make_checkpoint

FAMILIES = tuple(family for family, tiny in TINY.items() if tiny.layer)
TOKENS = mx.array([(i * i * 31 + 7 * i) % 256 for i in range(30)], mx.uint32)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root: Path = tmp_path_factory.mktemp("families")
    return {family: load(make_checkpoint(root / family, family, mtp="separate"), mtp=True) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, pairs: dict[str, Any]) -> nn.Module:
    result: nn.Module = pairs[request.param][0]
    return result


@pytest.mark.parametrize("drafting", ["chained", "stepwise"])
@pytest.mark.parametrize("prompt", [TOKENS[:12], TOKENS[:1], TOKENS[:2]], ids=["long", "one token", "two tokens"])
def test_greedy_speculation_gives_the_text_of_plain_decoding(model: nn.Module, prompt: mx.array, drafting: str) -> None:
    plain = [token for token, _ in generate_step(prompt, model, max_tokens=24)]
    for steps in (3, 8):
        decoder = SpeculativeDecoder(model, prompt=prompt, max_tokens=24, max_steps=steps, drafting=drafting)
        assert [each.token for each in decoder] == plain


def chain_by_definition(model: nn.Module, tokens: mx.array, hidden: mx.array, steps: int) -> list[int]:
    """Drafts after ``tokens`` ``[N + 1]``, of which ``hidden`` ``[1, N, D]`` are the first N, without any cache."""
    head: DraftHead = model.mtp
    trunk, known, rows = Trunk(model), tokens.tolist(), hidden.shape[1]
    assert isinstance(known, list)
    last, drafts = head.heads - 1, list[int]()

    def run(which: int, states: mx.array) -> mx.array:
        following = mx.array([known[1 + which : 1 + which + states.shape[1]]])
        return head(head.embed(trunk, following, which), states, None, which)

    outputs = states = hidden
    for step in range(steps):
        if step <= last:
            states = outputs if step and model.model_type != "mimo_v2_flash" else hidden
        else:
            states = mx.concatenate([states, outputs[:, -1:]], axis=1)
        outputs = run(min(step, last), states)
        assert step > last or outputs.shape[1] == rows
        drafts.append(int(mx.argmax(head.logits(trunk, outputs, min(step, last))[0, -1]).item()))  # type: ignore[arg-type]
        known.append(drafts[-1])
    return drafts


def test_each_draft_is_that_of_its_head_on_all_that_came_before(model: nn.Module) -> None:
    """Whatever was read at a time, and whatever was drafted and thrown away meanwhile."""
    cache, drafter, trunk = make_cache(model), MTPDrafter(model), Trunk(model)
    states, start = list[mx.array](), 0
    for rows in (1, 12, 1, 3, 1, 2):
        hidden = trunk(TOKENS[None, start : start + rows], cache)
        states.append(hidden.after)
        drafter.observe(TOKENS[start + 1 : start + rows + 1], hidden)
        start += rows
        drafts = [int(step.token.item()) for step in islice(drafter.steps(), 6)]  # type: ignore[arg-type]
        assert drafts == chain_by_definition(model, TOKENS[: start + 1], mx.concatenate(states, axis=1), 6)


def test_a_gap_in_what_is_read_leaves_no_head_with_another_tokens_state(model: nn.Module) -> None:
    drafter, hidden = MTPDrafter(model), Trunk(model)(TOKENS[None, :1], make_cache(model))
    drafter.observe(TOKENS[:1], hidden)
    drafter.catch_up()
    for _ in range(100):
        drafter.observe(TOKENS[:1], hidden)
    drafter.catch_up()
    heads = model.mtp.heads
    assert [layer.offset for layer in drafter.cache] == [33, *(32 - lag for lag in range(1, heads))][:heads]


def test_without_its_embedding_and_output_head_a_head_takes_the_trunks(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "glm4_moe", mtp="separate", shards=1)
    shared = load(folder, mtp=True)[0]
    copies = make_checkpoint(tmp_path / "copies", "glm4_moe", mtp="separate", shards=1, own_parts="copies")
    own = make_checkpoint(tmp_path / "own", "glm4_moe", mtp="separate", shards=1, own_parts="own")
    assert _drafts(load(copies, mtp=True)[0]) == _drafts(shared)
    layer = load(own, mtp=True)[0].mtp.layers[0]
    assert "embed_tokens" in layer
    assert "head" in layer.shared_head
    assert "embed_tokens" not in load(copies, mtp=True)[0].mtp.layers[0]
    assert _drafts(load(own, mtp=True)[0]) != _drafts(shared)


def _drafts(model: nn.Module) -> list[Any]:
    drafter = MTPDrafter(model)
    drafter.observe(TOKENS[1:10], Trunk(model)(TOKENS[None, :9], make_cache(model)))
    return [step.token.item() for step in islice(drafter.steps(), 5)]


def _kept_where_it_was(self: Window, kept: int) -> None:
    COMMIT(self, max(kept, 1))


def _of_the_first_head(self: MTPDrafter, tokens: mx.array, hidden: mx.array) -> mx.array:
    self._waiting = [None] * len(self._waiting)
    return READ(self, tokens, hidden)


COMMIT, READ = Window.commit, MTPDrafter._read


@pytest.mark.parametrize(
    ("place", "name", "mutant"),
    [(Window, "commit", _kept_where_it_was), (MTPDrafter, "_read", _of_the_first_head)],
    ids=["guesses stay", "waiting states are forgotten"],
)
def test_a_head_that_is_wrong_would_be_seen(
    pairs: dict[str, Any], place: Any, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises((AssertionError, ValueError)):
        test_each_draft_is_that_of_its_head_on_all_that_came_before(pairs["mimo_v2_flash"][0])
