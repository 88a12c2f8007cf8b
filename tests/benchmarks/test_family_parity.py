"""The benchmark of families holds on a small scale, and notices what it is there to notice."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks import family_parity
from benchmarks.families.checkpoints import CASES, Case, shapes, write
from benchmarks.families.reference import Reference, Tensors, rms_norm
from benchmarks.family_parity import (
    TOLERANCE,
    ask_transformers,
    both_ways,
    compare_head,
    largest,
    make_inputs,
    mlx_lm_model,
)
from strata_mlx import load
from strata_mlx.models import supported
from tests.tiny import read, save

WITH_HEADS = [case for case in CASES if case.heads]
OF_ATTENTION = [case for case in CASES if case.family not in ("qwen3_next", "qwen3_5_moe")]
BY_NAME = {case.name: case for case in CASES}
HYBRID, DEEPSEEK, MIMO = (
    BY_NAME[wanted] for wanted in ("qwen3_next", "deepseek_v3, 2 MTP layers", "mimo_v2_flash, 2 MTP layers")
)
HEADS = {
    "mtp.layers.0.mlp.experts.3.down_proj.weight",
    "model.layers.5.eh_proj.weight",
    "model.mtp.layers.1.self_attn.attention_sink_bias",
}
CHANGES = [
    (HYBRID, "model.layers.0.mlp.experts.3.down_proj.weight"),
    (HYBRID, "mtp.layers.0.mlp.experts.3.down_proj.weight"),
    (DEEPSEEK, "model.layers.2.mlp.experts.3.down_proj.weight"),
    (DEEPSEEK, "model.layers.5.eh_proj.weight"),
    (MIMO, "model.layers.1.self_attn.attention_sink_bias"),
    (MIMO, "model.mtp.layers.1.self_attn.attention_sink_bias"),
]
ROWS = 24


def name(value: Case | str) -> str:
    return value.name if isinstance(value, Case) else value


def numbers(rows: int = ROWS) -> Any:
    return np.random.default_rng(5).standard_normal((2, 1, rows, 64))


@pytest.mark.parametrize("case", [HYBRID], ids=name)
def test_a_family_holds(case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_parity, "CASES", [case])
    monkeypatch.setattr(family_parity, "PROMPTS", 1)
    monkeypatch.setattr(sys, "argv", ["family_parity", "--json"])
    assert family_parity.main() == 1  # for the families that are left out
    result = json.loads(capsys.readouterr().out)
    assert result["families_without_a_checkpoint"] == sorted({*supported()} - {case.family})
    (row,) = result["rows"]
    assert family_parity.holds(row)
    assert row["mlx_lm"] <= TOLERANCE["mlx_lm"]
    assert row["transformers"] == "not run"
    assert row["mtp"] <= TOLERANCE["mtp"]
    assert row["speculation"]["mismatches"] == 0 < row["speculation"]["accepted"] < row["speculation"]["drafted"]
    assert row["streaming"]["differences"] == 0 < row["streaming"]["misses"]


@pytest.mark.parametrize("case", OF_ATTENTION, ids=name)
def test_the_layers_of_the_reference_are_those_of_mlx_lm(tmp_path: Path, case: Case) -> None:
    reference = Reference.open(write(case, tmp_path / "model"))
    tokens = make_inputs(case, tmp_path / "model")["tokens"][:, :ROWS]
    x = reference.embed(tokens)
    for i in range(case.config["num_hidden_layers"]):
        sliding = case.config.get("hybrid_layer_pattern", {i: 0})[i] == 1
        x = np.stack([reference.layer(f"model.layers.{i}", row, sliding) for row in x])
    eps = case.config.get("rms_norm_eps") or case.config["layernorm_epsilon"]
    x = rms_norm(x, reference.tensors["model.norm.weight"], eps)
    expected, _ = both_ways(mlx_lm_model(case, tmp_path / "model"), tokens)
    assert largest(reference.logits(99, x), expected) <= 1e-5


@pytest.mark.parametrize("case", WITH_HEADS, ids=name)
def test_every_tensor_of_a_head_counts(tmp_path: Path, case: Case) -> None:
    reference = Reference.open(write(case, tmp_path / "model"))
    inputs = numbers()

    def logits(tensors: dict[str, Any]) -> Any:
        changed = replace(reference, tensors=Tensors(tensors))
        output = inputs[1]
        for number in range(case.heads):
            output = changed.head(number, inputs[0], output)
        return changed.logits(case.heads - 1, output)

    tensors = reference.tensors.by_name
    expected = logits(tensors)
    extra = rf"mtp\.|model\.layers\.{case.config['num_hidden_layers'] + case.heads - 1}\."
    of_head = [tensor for tensor in tensors if re.search(extra, tensor) and "embed_tokens" not in tensor]
    assert len(of_head) > 10
    for kind in {re.sub(r"experts\.\d+", r"experts.N", tensor) for tensor in of_head}:
        same_kind = {tensor for tensor in of_head if re.sub(r"experts\.\d+", r"experts.N", tensor) == kind}
        changed = {tensor: np.flip(array) if tensor in same_kind else array for tensor, array in tensors.items()}
        assert largest(logits(changed), expected) > 10 * TOLERANCE["mtp"], kind


@pytest.mark.parametrize(("case", "tensor"), CHANGES, ids=name)
def test_one_changed_tensor_is_noticed(tmp_path: Path, case: Case, tensor: str) -> None:
    folder = write(case, tmp_path / "model")
    inputs, (model, _) = make_inputs(case, folder), load(folder, mtp=True)
    stored: dict[str, mx.array] = {}
    for file in folder.glob("*.safetensors"):
        tensors = read(file)
        stored |= tensors
        save(file, {key: value * 1.02 if key == tensor else value for key, value in tensors.items()})
    assert tensor in stored
    ours, theirs = (both_ways(which, inputs["tokens"]) for which in (model, mlx_lm_model(case, folder)))
    of_trunk = max(map(largest, ours, theirs)) > TOLERANCE["mlx_lm"]
    of_head = compare_head(case, model, folder, inputs)["mtp"] > TOLERANCE["mtp"]
    assert (of_trunk, of_head) == ((False, True) if tensor in HEADS else (True, False))


def test_a_number_that_is_none_differs_from_everything() -> None:
    assert largest(np.array([1.0, np.nan]), np.array([1.0, np.nan])) == float("inf")


def test_an_environment_without_transformers_is_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 1"):
        ask_transformers("false", tmp_path)


def test_a_result_without_transformers_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["family_parity", "--keep", "family_parity"])
    with pytest.raises(SystemExit, match="2"):
        family_parity.main()


@pytest.mark.parametrize("case", CASES, ids=name)
def test_checkpoints_hold_what_is_written_about_them(tmp_path: Path, case: Case) -> None:
    folder = write(case, tmp_path / "model")
    stored: dict[str, mx.array] = {}
    for file in folder.glob("*.safetensors"):
        stored |= read(file)
    assert {key: tuple(array.shape) for key, array in stored.items()} == shapes(case)
    assert all(np.array(array).std() > 0 for array in stored.values())
