"""load(): what a caller can ask for, and what it never does."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from strata_mlx import load, loading
from strata_mlx.checkpoint import Checkpoint
from strata_mlx.checkpoint.convert import Conversion, convert
from strata_mlx.checkpoint.precision import Precision, PrecisionPlan
from strata_mlx.device import on_cpu
from strata_mlx.errors import CheckpointError, InputError
from strata_mlx.models.plan import plan_model
from tests.errors import refuses
from tests.tiny import EOS, make_checkpoint

TOKENS = mx.array([[1, 2, 3]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


@pytest.fixture
def quantised(folder: Path) -> Path:
    precision = PrecisionPlan(Precision(4, 32))
    return convert(Conversion(plan_model(Checkpoint.open(folder)), precision), folder.with_name("q4"), progress=False)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_gives_a_model_and_its_tokenizer(folder: Path, kind: type) -> None:
    model, tokenizer = load(kind(folder))
    assert model(TOKENS).shape == (1, 3, 259)
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"
    assert tokenizer.eos_token_ids == {EOS}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_quantised_model_computes_in_the_type_that_is_asked_for(quantised: Path, dtype: str) -> None:
    logits = load(quantised, dtype=dtype)[0](TOKENS)
    assert str(logits.dtype) == f"mlx.core.{dtype}"
    assert np.isfinite(np.array(logits.astype(mx.float32))).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_unquantised_experts_in_half_precision_work_or_are_refused_at_once(folder: Path, dtype: str) -> None:
    if on_cpu():
        with refuses(InputError, dtype, "float32"):
            load(folder, dtype=dtype)
    else:
        mx.eval(load(folder, dtype=dtype)[0](TOKENS))


@pytest.mark.parametrize("dtype", ["int8", "", "FLOAT32"])
def test_an_unknown_type_gives_those_that_are_known(folder: Path, dtype: str) -> None:
    with refuses(InputError, repr(dtype), "auto, float32, bfloat16, float16"):
        load(folder, dtype=dtype)


def test_the_head_comes_when_it_is_asked_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", mtp="separate")
    assert "mtp" not in load(folder)[0]
    assert len(load(folder, mtp=True)[0].mtp.layers) == 1


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
def test_a_head_that_is_not_there_is_no_silent_nothing(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family)
    with refuses(CheckpointError, folder, "no MTP head"):
        load(folder, mtp=True)


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": True}], ids=str)
def test_code_in_the_folder_never_runs(folder: Path, options: dict[str, Any]) -> None:
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: pass\n")
    for name, key in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        config = json.loads((folder / name).read_text())
        config |= {"auto_map": {key: "evil.Evil"}, "tokenizer_class": "Evil", "model_file": "evil.py"}
        (folder / name).write_text(json.dumps(config))
    load(folder, tokenizer_config=options)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (None, None),
        ("{", b""),
        ("{}", b""),
        ('{"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 1, "dropout": 0}}', b""),
    ],
)
def test_broken_adapters_are_named(folder: Path, config: str | None, weights: bytes | None) -> None:
    adapters = folder.with_name("adapters")
    adapters.mkdir()
    if config is not None and weights is not None:
        (adapters / "adapter_config.json").write_text(config)
        (adapters / "adapters.safetensors").write_bytes(weights)
    with refuses(InputError, adapters):
        load(folder, adapter_path=adapters)


def test_a_gpu_keeps_the_types_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "model", dtype=mx.bfloat16)
    monkeypatch.setattr(loading, "compute_dtype", lambda _: None)
    monkeypatch.setattr(loading, "on_cpu", lambda: False)
    monkeypatch.setattr(loading, "fuse", lambda _: None)
    model = loading.load_model(plan_model(Checkpoint.open(folder)))
    assert model.model.norm.weight.dtype == mx.bfloat16
