"""The MoE layer: the router's choice goes through strata_mlx.routing, and without a policy nothing changes."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_model as load_with_mlx_lm

from strata_mlx import Residency, Routing, RoutingPolicy, load, set_routing
from strata_mlx.models.moe import MoEBlock, blocks, sigmoid_router
from strata_mlx.routing import Router, select_ops
from tests.routing.properties import TOLERANCE
from tests.tiny import FAMILIES, make_checkpoint

TOKENS = mx.array([[1, 5, 9, 30, 7, 7, 100, 2]])
EXPERTS = 8


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("moe") / request.param, request.param, layout="stacked")


@pytest.fixture
def model(folder: Path) -> nn.Module:
    return load(folder)[0]


def residency(*experts: int) -> Residency:
    return Residency({layer: np.isin(np.arange(EXPERTS), experts) for layer in range(8)})


def logits(model: nn.Module, routing: Routing | None = None) -> mx.array:
    if routing:
        set_routing(model, routing)
    return model(TOKENS)


def test_the_layers_come_in_order_and_the_heads_last(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_next", "stacked", mtp="stacked")
    model = load(folder, mtp=True)[0]
    head = model.mtp.layers[0].mlp
    assert blocks(model) == [*(layer.mlp for layer in model.layers), head]


def test_without_a_policy_the_logits_are_mlx_lms_bit_for_bit(folder: Path, model: nn.Module) -> None:
    theirs, _ = load_with_mlx_lm(folder)
    experts = [layer.mlp for layer in model.layers if "switch_mlp" in layer.mlp]
    assert experts == blocks(model)
    assert all(isinstance(block, MoEBlock) for block in experts)
    assert mx.array_equal(logits(model), theirs(TOKENS))


@pytest.mark.parametrize(
    "routing",
    [
        Routing(RoutingPolicy(2.0)),
        Routing(RoutingPolicy(2.0), Residency({})),
        Routing(RoutingPolicy(2.0), residency()),
        Routing(RoutingPolicy(2.0, protect=2), residency(1, 2, 3)),
        Routing(RoutingPolicy(-2.0, -1.0, protect=2), residency(1, 2, 3)),
        Routing(RoutingPolicy(kind="cache_prior"), residency(1, 2, 3)),
    ],
    ids=["no map", "no layers", "nothing resident", "all ranks protected", "bonus below 0", "lambda 0"],
)
def test_a_policy_that_never_fires_changes_no_bit(model: nn.Module, routing: Routing) -> None:
    assert mx.array_equal(logits(model), logits(model, routing))


def test_a_bonus_changes_what_is_chosen_and_says_biased(model: nn.Module) -> None:
    plain, routing = logits(model), Routing(RoutingPolicy(4.0), residency(0, 2, 4, 6))
    assert routing.mode == "biased"
    assert not mx.allclose(plain, logits(model, routing), atol=1e-3)
    assert mx.array_equal(plain, logits(model, Routing()))


def test_when_everything_is_resident_the_text_is_the_plain_one(model: nn.Module) -> None:
    """The bonus then favours nobody, unless a selection bias is added to the scores that it scales; only sums are taken
    in another order.
    """
    if any("e_score_correction_bias" in block.gate for block in blocks(model)):
        return
    everything = Routing(RoutingPolicy(1.0), residency(*range(EXPERTS)))
    assert mx.allclose(logits(model), logits(model, everything), atol=1e-5)


@given(
    policy=st.builds(RoutingPolicy, st.floats(0, 8), st.floats(0, 8), st.integers(0, 2), st.booleans()),
    resident=st.sets(st.integers(0, EXPERTS - 1)),
)
def test_the_mixing_weights_are_the_routers_own(policy: RoutingPolicy, resident: set[int]) -> None:
    rng = np.random.default_rng(len(resident))
    scores = rng.normal(size=(1, 5, EXPERTS)).astype(np.float32)
    routing = Routing(policy, residency(*resident), executor=select_ops)
    ids, weights = (np.array(x) for x in routing.route(0, mx.array(scores), Router(2)))
    p = np.exp(scores.astype(np.float64))
    own = np.take_along_axis(p, ids.astype(np.int64), -1)
    assert np.abs(weights - own / own.sum(-1, keepdims=True)).max() <= TOLERANCE


SIGMOID = Router(2, kind="sigmoid", n_group=4, topk_group=3, scale=2.5, eps=1e-20)


@given(
    policy=st.sampled_from(
        [RoutingPolicy(2.0), RoutingPolicy(8.0, 1.0, 2, True), RoutingPolicy(kind="margin", margin=0.4)]
    ),
    resident=st.sets(st.integers(0, EXPERTS - 1)),
    seed=st.integers(0, 99),
)
def test_a_sigmoid_router_keeps_its_weights_and_chooses_as_without_a_policy_where_none_acts(
    policy: RoutingPolicy, resident: set[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scores, bias = rng.normal(size=(1, 5, EXPERTS)).astype(np.float32), mx.array(rng.random(EXPERTS, np.float32))
    routing = Routing(policy, residency(*resident), executor=select_ops)
    ids, weights = (np.array(x) for x in routing.route(0, mx.array(scores), SIGMOID, bias))
    own = np.take_along_axis(1 / (1 + np.exp(-scores.astype(np.float64))), ids.astype(np.int64), -1)
    assert np.abs(weights - 2.5 * own / own.sum(-1, keepdims=True)).max() <= 2.5 * TOLERANCE
    plain = [np.array(x) for x in Routing().route(0, mx.array(scores), SIGMOID, bias)]
    tables, heads = np.ones((2, 2, 2), np.float32), mx.zeros(5, mx.bool_)
    chosen = select_ops(mx.array(scores[0]), None, tables, heads, selection_bias=bias, **SIGMOID.options())
    picked = [np.array(x) for x in chosen]
    assert (np.sort(plain[0][0]) == np.sort(picked[0])).all()
    assert np.abs(np.sort(plain[1][0]) - np.sort(picked[1])).max() <= 1e-6


@given(
    family=st.sampled_from(["glm4_moe", "deepseek_v3", "glm4_moe_lite", "mimo_v2_flash"]),
    groups=st.sampled_from([(1, 1), (4, 1), (4, 3), (2, 2)]),
    top_k=st.integers(1, 2),
    norm_topk=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_sigmoid_router_is_that_of_mlx_lm_bit_for_bit_whatever_the_bias(
    family: str, groups: tuple[int, int], top_k: int, norm_topk: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scores, bias = (mx.array(rng.normal(size=shape).astype(np.float32)) for shape in ((1, 5, EXPERTS), EXPERTS))
    args = SimpleNamespace(
        tie_word_embeddings=False, scoring_func="sigmoid", num_experts=EXPERTS, num_experts_per_tok=top_k,
        n_group=groups[0], topk_group=groups[1], norm_topk_prob=norm_topk, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = sigmoid_router(args, eps=0.0 if family in ("glm4_moe", "deepseek_v3") else 1e-20)
    found = Routing().route(0, scores, router, bias)
    select = importlib.import_module(f"mlx_lm.models.{family}").group_expert_select
    expected = select(scores, bias, top_k, *groups, 2.5, norm_topk)
    assert all(mx.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_changing_an_expert_that_is_chosen_changes_the_logits(model: nn.Module) -> None:
    routing = Routing(RoutingPolicy(30.0, protect=1), residency(3))
    before = logits(model, routing)
    for block in blocks(model):
        weight = block.switch_mlp.down_proj.weight
        block.switch_mlp.down_proj.weight = mx.concatenate([weight[:3], weight[3:4] * 1.01, weight[4:]])
    assert not mx.array_equal(before, logits(model))


def test_the_mean_range_of_cache_prior_begins_anew_with_a_request(model: nn.Module) -> None:
    routing = Routing(RoutingPolicy(kind="cache_prior", prior_lambda=0.7), residency(0, 1))
    first = logits(model, routing)
    routing.begin()
    assert mx.array_equal(first, logits(model, routing))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "expected an object"),
        ("{", "not valid JSON"),
        ('{"x": [1]}', "no layer 'x'"),
        ('{"2": [1]}', "no layer '2'"),
        ('{"0": 1}', "expected a list of experts"),
        ('{"0": [8]}', "experts 0 to 7"),
        ('{"0": [true]}', "experts 0 to 7"),
    ],
)
def test_a_residency_file_that_does_not_fit_is_one_error(tmp_path: Path, text: str, says: str) -> None:
    from strata_mlx import InputError

    file = tmp_path / "residency.json"
    file.write_text(text)
    with pytest.raises(InputError, match=says) as error:
        Residency.from_json(file, 2, EXPERTS)
    assert str(file) in str(error.value)


def test_a_residency_file_is_read_by_layer(tmp_path: Path) -> None:
    file = tmp_path / "residency.json"
    file.write_text('{"1": [0, 7]}')
    read = Residency.from_json(file, 2, EXPERTS)
    assert read.of(0) is None
    found: Any = read.of(1)
    assert found.nonzero()[0].tolist() == [0, 7]
