"""The price of biased routing: exact is free, what is counted is what streaming would read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from strata_mlx import RoutingPolicy, load
from strata_mlx.errors import Fault, InputError
from strata_mlx.evaluation import evaluate, name_of, steps
from strata_mlx.models.moe import blocks
from strata_mlx.texts import Tokens
from tests.errors import refuses
from tests.tiny import make_checkpoint

STRONG = RoutingPolicy(moce_bonus=6.0)
SLOTS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("evaluation") / "model", layout="stacked", mtp="stacked")


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return load(path)[0]


@pytest.fixture(scope="module")
def documents() -> list[Tokens]:
    rng = np.random.default_rng(0)
    return [Tokens(str(i), rng.integers(0, 256, 24).tolist()) for i in range(3)]


def test_exact_routing_has_the_models_own_perplexity(model: Any, documents: list[Tokens]) -> None:
    nats = []
    for document in documents:
        logits = model(mx.array([document.ids]))[0].astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        nats.append(-logprobs[np.arange(23), document.ids[1:]])
    exact = evaluate(model, documents, [], slots=[SLOTS])[0]
    assert exact["perplexity"] == pytest.approx(math.exp(np.concatenate(nats).mean()), rel=1e-4)
    assert exact["name"] == "exact"
    assert (exact["tokens"], exact["documents"]) == (69, 3)


def test_a_policy_that_never_fires_costs_nothing(model: Any, documents: list[Tokens]) -> None:
    exact, idle = evaluate(model, documents, [RoutingPolicy(r1_bonus=0.5)], slots=[SLOTS])
    assert idle["price"] == idle["kl"] == idle["misses_saved"] == 0
    assert idle["agreement"] == 1
    assert idle["misses"] == exact["misses"] > 0


def test_a_strong_preference_reads_less_and_costs_something(model: Any, documents: list[Tokens]) -> None:
    exact, biased = evaluate(model, documents, [STRONG], slots=[SLOTS])
    assert biased["misses"] < exact["misses"]
    assert biased["kl"] > 0
    assert biased["agreement"] < 1
    assert biased["misses_saved"] == pytest.approx(1 - biased["misses"] / exact["misses"])
    assert biased["price"] == pytest.approx(biased["perplexity"] / exact["perplexity"] - 1)
    for name in ("perplexity", "price", "agreement", "kl", "misses", "misses_saved"):
        low, high = biased[f"{name}_interval"]
        assert low <= biased[name] <= high


def test_tables_are_driven_as_streaming_drives_them(path: Path, model: Any, documents: list[Tokens]) -> None:
    for policy in ([], [STRONG]):
        # One document: slots that stream go on from one to the next.
        virtual = evaluate(model, documents[:1], policy, slots=[SLOTS])
        streamed = evaluate(load(path, slots=SLOTS)[0], documents[:1], policy)
        assert streamed[0]["misses"] == virtual[0]["misses"]
        assert streamed[0]["perplexity"] == pytest.approx(virtual[0]["perplexity"], rel=1e-5)
        assert streamed[-1]["slots"] is None


def test_an_mtp_head_takes_no_part(path: Path, documents: list[Tokens], model: Any) -> None:
    with_head = load(path, mtp=True)[0]
    assert evaluate(with_head, documents, [STRONG], slots=[SLOTS]) == evaluate(
        model, documents, [STRONG], slots=[SLOTS]
    )


def test_routing_is_put_back_and_progress_adds_up(model: Any, documents: list[Tokens]) -> None:
    before, seen = [block.routing for block in blocks(model)], list[int]()
    rows = evaluate(model, documents, [STRONG], slots=[SLOTS, 5], report=seen.append)
    assert sum(seen) == steps(documents, [STRONG], [SLOTS, 5])
    assert [(row["slots"], row["name"] == "exact") for row in rows] == [(3, True), (3, False), (5, True), (5, False)]
    assert [block.routing for block in blocks(model)] == before


def test_what_cannot_be_evaluated_is_refused(path: Path, model: Any, documents: list[Tokens]) -> None:
    with refuses(InputError, "two tokens"):
        evaluate(model, [Tokens("short", [1])], [], slots=[SLOTS])
    for slots in (None, 1, 8):
        with refuses(InputError, "slots"):
            evaluate(model, documents, [], slots=[slots])
    with refuses(InputError, "slots of its own"):
        evaluate(load(path, slots=SLOTS)[0], documents, [], slots=[SLOTS])
    with refuses(InputError, "protect"):
        evaluate(model, documents, [RoutingPolicy(moce_bonus=1.0, protect=5)], slots=[SLOTS])
    with refuses(InputError, "no MTP head takes part"):
        evaluate(model, documents, [RoutingPolicy(kind="margin", sure_margin=0.1)], slots=[SLOTS])


def test_a_full_disk_is_one_fault(model: Any, documents: list[Tokens], monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strata_mlx.evaluation.tempfile.TemporaryFile", full)
    with refuses(Fault, "No space left"):
        evaluate(model, documents, [], slots=[SLOTS])


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (RoutingPolicy(), "exact"),
        (RoutingPolicy(moce_bonus=0.85), "moce bonus 0.85"),
        (RoutingPolicy(moce_bonus=0.85, protect=2), "moce protect 2 bonus 0.85"),
        (RoutingPolicy(kind="margin", margin=0.02), "margin 0.02"),
        (RoutingPolicy(kind="max_rank", max_rank=14), "max_rank 14"),
    ],
    ids=str,
)
def test_names_are_short(policy: RoutingPolicy, name: str) -> None:
    assert name_of(policy) == name
