"""The model that comes with the package."""

from __future__ import annotations

import mlx.core as mx
import pytest

from benchmarks import heldout
from strata_mlx import generate, load
from strata_mlx.checkpoint import Checkpoint
from strata_mlx.hub import EMBEDDED
from strata_mlx.models.plan import plan_model
from strata_mlx.models.report import describe


@pytest.fixture(scope="module")
def report() -> dict[str, object]:
    return describe(plan_model(Checkpoint.open(EMBEDDED)), context=4096)


def test_it_is_what_its_readme_says(report: dict[str, object]) -> None:
    wanted = {
        "family": "qwen3_next",
        "experts": 128,
        "top_k": 10,
        "mtp_layers": 1,
        "moe_layers": 8,
        "shared_expert": True,
    }
    assert {name: report[name] for name in wanted} == wanted
    assert report["layers"] == {"count": 8, "kinds": {"linear_attention": 6, "full_attention": 2}}


def test_its_router_has_at_least_8_bits(report: dict[str, dict[str, dict[str, list[str]]]]) -> None:
    for part in ("router", "mtp.router"):
        assert report["parts"][part]["precision"] == ["8-bit affine"]


def test_it_takes_at_most_30_megabytes() -> None:
    assert sum(file.stat().st_size for file in EMBEDDED.iterdir()) <= 30e6


def test_it_writes_python() -> None:
    model, tokenizer = load()
    text = generate(model, tokenizer, "class Stack:\n    def __init__(self", max_tokens=80)
    assert text.startswith((")", ","))
    assert "\n        self." in text


def test_its_mtp_head_predicts_what_the_trunk_says_next() -> None:
    """A head that is wired wrongly, or whose norms are not shifted, agrees on a few percent of the positions."""
    model, tokenizer = load(mtp=True)
    tokens = mx.array(heldout.windows(tokenizer, 4, 257))
    hidden = model.model(tokens[:, :-1])
    drafts = model.lm_head(model.mtp(model.model.embed_tokens(tokens[:, 1:-1]), hidden[:, :-1])).argmax(-1)
    agreement = (drafts == model.lm_head(hidden[:, 1:]).argmax(-1)).mean().item()
    assert agreement > 0.65
