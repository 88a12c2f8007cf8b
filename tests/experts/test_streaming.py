"""Loading with slots: what is read, what is refused, and that nothing is left of streaming when everything fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from strata_mlx import InputError, load
from strata_mlx.checkpoint.checkpoint import TensorReader
from strata_mlx.experts.streaming import streaming_of
from strata_mlx.loading import apply_adapters
from strata_mlx.models.moe import blocks
from tests.experts.streamed import EXPERTS, TOP_K, checkpoint, logits, same


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("streaming") / "model", layout="stacked")


def test_experts_that_stream_are_never_loaded(folder: Path) -> None:
    asked: list[str] = []
    original = TensorReader.__call__

    def read(self: TensorReader, name: str) -> mx.array:
        asked.append(name)
        return original(self, name)

    with patch.object(TensorReader, "__call__", read):
        model, _ = load(folder, slots=[EXPERTS, TOP_K, TOP_K], mtp=True)
    experts = [name for name in asked if ".switch_mlp." in name]
    assert {name.partition(".mlp.")[0] for name in experts} == {"model.layers.0"}
    assert not any("switch_mlp" in name for name, _ in model.model.layers[1].named_modules() if "_proj" in name)


@pytest.mark.parametrize("slots", [None, EXPERTS, EXPERTS + 5, [EXPERTS] * 3])
def test_when_everything_fits_nothing_streams_and_no_layer_waits(folder: Path, slots: Any) -> None:
    model, _ = load(folder, slots=slots, mtp=True)
    assert streaming_of(model) is None
    assert all(isinstance(block.switch_mlp, SwitchGLU) for block in blocks(model))
    with patch.object(mx, "eval") as evaluate, patch.object(mx, "async_eval") as begin:
        y = model(mx.array([[1, 2, 3]]))
    assert not evaluate.called
    assert not begin.called
    assert same([np.array(y)], [np.array(load(folder)[0](mx.array([[1, 2, 3]])))])


@pytest.mark.parametrize(
    ("slots", "says"),
    [
        (TOP_K - 1, f"slots is {TOP_K - 1}, but a token needs {TOP_K} experts of a layer: give at least {TOP_K}"),
        (0, "slots is 0"),
        (-1, "slots is -1"),
        ([TOP_K, TOP_K - 1, TOP_K], f"slots is {TOP_K - 1}"),
        ([TOP_K], "for 1 layers, but the model has 3 MoE layers"),
        ([], "for 0 layers"),
        ([TOP_K, 5.0, TOP_K], "slots is 5.0"),
        (True, "slots is True"),
    ],
)
def test_slots_that_cannot_be_used_are_refused(folder: Path, slots: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        load(folder, slots=slots, mtp=True)


def test_an_unknown_eviction_policy_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="eviction is 'fifo'"):
        load(folder, slots=TOP_K, eviction="fifo")


@pytest.mark.parametrize("adapted", ["mlp.switch_mlp.gate_proj", "self_attn.q_proj"])
def test_adapters_of_experts_that_stream_are_refused(folder: Path, tmp_path: Path, adapted: str) -> None:
    model, _ = load(folder, slots=TOP_K)
    rows = {"lora_a": (4, 2), "lora_b": (2, 4)}
    tensors = {f"model.layers.1.{adapted}.{name}": mx.zeros(shape) for name, shape in rows.items()}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), tensors)
    config = {"num_layers": 1, "lora_parameters": {"rank": 2, "scale": 1, "dropout": 0, "keys": ["self_attn.q_proj"]}}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", **config}))
    with pytest.raises(InputError) as error:
        apply_adapters(model, tmp_path)
    assert ("adapts experts" in str(error.value)) is ("switch_mlp" in adapted)


def test_closing_ends_the_use_of_the_files(folder: Path) -> None:
    model, _ = load(folder, slots=TOP_K)
    found = streaming_of(model)
    assert found is not None
    logits(model)
    found.close()
    found.close()
    with pytest.raises(ValueError, match="closed"):
        logits(model)
