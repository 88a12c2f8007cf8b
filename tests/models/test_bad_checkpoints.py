"""Files that cannot be used: one clear error each, before anything is computed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx.checkpoint import Checkpoint
from strata_mlx.checkpoint.convert import Conversion, convert
from strata_mlx.checkpoint.precision import Precision, PrecisionPlan
from strata_mlx.errors import CheckpointError
from strata_mlx.loading import load, load_model, load_tokenizer
from strata_mlx.models.plan import plan_model
from tests.errors import may_refuse, refuses
from tests.tiny import FAMILIES, make_checkpoint, own_keys, read, save

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
EXPERT = "model.layers.0.mlp.experts.5.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", shards=1)


@pytest.fixture
def quantised(one_file: Path) -> Path:
    conversion = Conversion(plan_model(Checkpoint.open(one_file)), PrecisionPlan(Precision(4, 32)))
    target = convert(conversion, one_file.with_name("quantised"), progress=False)
    tensors = {name: array for file in target.glob("model*.safetensors") for name, array in read(file).items()}
    for file in (*target.glob("model*.safetensors"), target / INDEX):
        file.unlink()
    mx.save_safetensors(str(target / "model.safetensors"), tensors)
    return target


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config).update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, mx.array]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = read(file)
    change(tensors)
    mx.save_safetensors(str(folder / "changed.safetensors"), tensors)
    (folder / "changed.safetensors").replace(file)


# Files


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / SHARD).unlink()
    with refuses(CheckpointError, folder / SHARD, "missing"):
        load(folder)


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.9999])
def test_a_truncated_shard_is_named(folder: Path, share: float) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[: int(share * len(data))])
    with refuses(CheckpointError, folder / SHARD):
        load(folder)


def test_a_folder_without_weights_is_no_model(one_file: Path) -> None:
    (one_file / "model.safetensors").unlink()
    with refuses(CheckpointError, one_file, "no model*.safetensors"):
        load(one_file)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    save(folder / "mtp.safetensors", {EXPERT: mx.zeros((64, 64))})
    with refuses(CheckpointError, "mtp.safetensors", EXPERT, "is also in"):
        load(folder)


def test_a_tensor_that_the_index_places_elsewhere_is_named(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = next(
        file for file in set(index["weight_map"].values()) if file != index["weight_map"]["model.norm.weight"]
    )
    (folder / INDEX).write_text(json.dumps(index))
    with refuses(CheckpointError, "model.norm.weight", INDEX):
        load(folder)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/hostname", "..", ".", "", "a/b", 5, None, ["x"]])
def test_an_index_cannot_lead_out_of_the_folder(folder: Path, place: Any) -> None:
    save(folder.parent / "model.safetensors", {"model.norm.weight": mx.zeros(64)})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = place
    (folder / INDEX).write_text(json.dumps(index))
    with refuses(CheckpointError, folder / INDEX, "weight_map"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe{}", b"[" * 100_000], ids=lambda c: repr(c[:8])
)
def test_a_broken_json_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with refuses(CheckpointError, folder / name):
        load(folder)


def test_a_folder_where_a_file_should_be_is_named(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").mkdir()
    with refuses(CheckpointError, folder / "generation_config.json", "Is a directory"):
        load(folder)


def test_a_missing_tokenizer_is_told_before_the_weights_are_read(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with refuses(CheckpointError, folder, "no tokenizer"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"version": "1.0", "model": {"type": "Magic"}}'])
def test_a_broken_tokenizer_gives_one_line(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with refuses(CheckpointError, folder, "tokenizer cannot be loaded"):
        load(folder)


@pytest.mark.parametrize("ids", ["<|end|>", True, -1, 2.5, [1, None], {"a": 1}, 2**40])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_end_of_sequence_ids_must_be_token_ids(folder: Path, name: str, ids: Any) -> None:
    (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), "eos_token_id": ids}))
    with refuses(CheckpointError, folder / name, "eos_token_id"):
        load(folder)


# Tensors


@pytest.mark.parametrize(
    ("change", "says"),
    {
        "a norm missing": (lambda t: t.pop("model.norm.weight"), "'model.norm.weight' is missing"),
        "expert 5 of 8 missing": (lambda t: t.pop(EXPERT), f"'{EXPERT}' is missing"),
        "expert 0 missing": (lambda t: t.pop(EXPERT.replace("5", "0")), "is missing"),
        "one expert of another shape": (lambda t: t.update({EXPERT: mx.zeros((64, 32))}), "experts' shapes differ"),
        "one expert of another type": (lambda t: t.update({EXPERT: mx.zeros((64, 64), mx.int8)}), f"'{EXPERT}' has"),
        "an expert too many": (lambda t: t.update({EXPERT.replace("5", "8"): mx.zeros((64, 64))}), "has no place"),
        "a surplus tensor": (lambda t: t.update({"model.extra": mx.zeros(1)}), "'model.extra' has no place"),
        "a wrong shape": (lambda t: t.update({"lm_head.weight": mx.zeros((9, 64))}), "'lm_head.weight' [9, 64]"),
        "a scalar": (lambda t: t.update({"lm_head.weight": mx.array(0.0)}), "'lm_head.weight' []"),
        "a wrong dtype": (lambda t: t.update({"lm_head.weight": mx.zeros((259, 64), mx.int32)}), "has dtype I32"),
        "half an MTP head": (lambda t: t.update({"mtp.fc.weight": mx.zeros((64, 128))}), "'mtp.fc.weight'"),
    }.values(),
)
def test_a_tensor_that_does_not_fit_is_named(
    one_file: Path, change: Callable[[dict[str, mx.array]], Any], says: str
) -> None:
    change_tensors(one_file, change)
    with refuses(CheckpointError, one_file, says):
        plan_model(Checkpoint.open(one_file))


def test_a_head_with_a_missing_tensor_is_not_taken_for_no_head(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", mtp="separate", shards=1)
    change_tensors(folder, lambda tensors: tensors.pop("mtp.pre_fc_norm_hidden.weight"))
    with refuses(CheckpointError, folder, "'mtp.pre_fc_norm_hidden.weight' is missing"):
        load(folder, mtp=True)
    load(folder)  # the trunk is whole


def test_a_head_that_is_stored_twice_is_not_chosen_at_random(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", mtp="separate", shards=1)
    change_tensors(folder, lambda tensors: tensors.update({"language_model.mtp.fc.weight": mx.zeros((64, 128))}))
    with refuses(CheckpointError, folder, "mtp.fc.weight", "has no place"):
        load(folder, mtp=True)


def test_qwen3_moe_has_no_mtp_head(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe", shards=1)
    change_tensors(folder, lambda tensors: tensors.update({"mtp.layers.0.norm.weight": mx.zeros(64)}))
    with refuses(CheckpointError, folder / "config.json", "mtp.* tensors"):
        plan_model(Checkpoint.open(folder))


def test_fused_experts_of_odd_height_cannot_be_halved(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_5_moe", "fused", shards=1)
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    change_tensors(folder, lambda tensors: tensors.update({name: mx.zeros((8, 127, 64))}))
    with refuses(CheckpointError, folder / "model.safetensors", name, "two halves"):
        plan_model(Checkpoint.open(folder))


SCALES = "model.layers.0.mlp.switch_mlp.up_proj.scales"


@pytest.mark.parametrize(
    ("change", "says"),
    {
        "groups that do not divide": (lambda t: t.update({SCALES: mx.zeros((8, 64, 3))}), "does not divide"),
        "no groups": (lambda t: t.update({SCALES: mx.zeros((8, 64, 0))}), "does not divide"),
        "scalar scales": (lambda t: t.update({SCALES: mx.array(1.0)}), "does not divide"),
        "scales of a mode that does not exist": (
            lambda t: t.update({SCALES: mx.zeros((8, 64, 2), mx.uint8)}),
            "up_proj",
        ),
        "scales of too few rows": (lambda t: t.update({SCALES: mx.zeros((8, 32, 2))}), f"'{SCALES}' [8, 32, 2]"),
        "integer scales": (lambda t: t.update({SCALES: mx.zeros((8, 64, 2), mx.int32)}), "up_proj"),
        "missing scales": (lambda t: t.pop(SCALES), "up_proj"),
        "missing biases": (lambda t: t.pop(SCALES.replace("scales", "biases")), "biases' is missing"),
        "weights that are not packed": (
            lambda t: t.update({SCALES.replace("scales", "weight"): mx.zeros((8, 64, 64))}),
            "up_proj",
        ),
    }.values(),
)
def test_inconsistent_quantisation_is_named(
    quantised: Path, change: Callable[[dict[str, mx.array]], Any], says: str
) -> None:
    load_model(plan_model(Checkpoint.open(quantised)))  # sound so far
    change_tensors(quantised, change)
    with refuses(CheckpointError, quantised, says):
        plan_model(Checkpoint.open(quantised))


# Configuration


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_kinds_of_quantisation_are_refused_by_name(tmp_path: Path, family: str, method: str) -> None:
    folder = make_checkpoint(tmp_path / "model", family, quantization_config={"quant_method": method})
    with refuses(CheckpointError, folder / "config.json", method, "not supported"):
        load(folder)


@pytest.mark.parametrize("model_type", ["llama", "", None, 5, ["qwen3_moe"]])
def test_an_unsupported_family_gives_the_names_of_those_supported(folder: Path, model_type: Any) -> None:
    change_config(folder, model_type=model_type)
    with refuses(CheckpointError, folder / "config.json", *FAMILIES):
        load(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": "8"}, "num_experts is '8'"),
        ({"num_experts": None}, "num_experts is None"),
        ({"num_experts": True}, "num_experts is True"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": {"type": "yarn"}}, "does not describe"),
    ],
)
def test_a_senseless_value_is_named(tmp_path: Path, family: str, changes: dict[str, Any], says: str) -> None:
    if "rope_scaling" in changes and "qwen3_n" not in family and "qwen3_5" not in family:
        changes, says = {"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"
        if family == "mimo_v2_flash":  # has none
            return
    folder = make_checkpoint(tmp_path / "model", family)
    for name, own in zip(changes, own_keys(family, changes), strict=True):
        says = says.replace(name, own)
    changes = own_keys(family, changes)
    change_config(folder, **changes)
    with refuses(CheckpointError, folder / "config.json", says):
        load(folder)


_GROUPS = {"n_group": 2, "topk_group": 3}


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("glm4_moe", {"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("glm4_moe", {"topk_method": "greedy"}, "does not describe"),
        ("glm4_moe", {"n_group": 3}, "n_group is 3"),
        ("glm4_moe", {"n_group": 8}, "groups of two or more"),
        ("glm4_moe", {"first_k_dense_replace": 9}, "none of the layers has experts"),
        ("deepseek_v3", _GROUPS, "topk_group 3"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "topk_group = 2 groups have 4 experts"),
        ("deepseek_v3", {"n_routed_experts": None}, "n_routed_experts is None"),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, "holds 2 MTP layers"),
        ("glm4_moe_lite", {"moe_layer_freq": 0}, "does not describe"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [1, 1, 1]}, "hybrid_layer_pattern must have layers of both kinds"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1]}, "for each of the 3 layers"),
        ("mimo_v2_flash", {"moe_layer_freq": [0, 2, 1]}, "moe_layer_freq must have a 0 or a 1"),
        ("mimo_v2_flash", {"sliding_window_size": 1}, "sliding_window_size is 1"),
    ],
    ids=str,
)
def test_what_mlx_lm_would_compute_otherwise_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], says: str
) -> None:
    folder = make_checkpoint(tmp_path / "model", family, mtp="separate")
    change_config(folder, **changes)
    with refuses(CheckpointError, folder / "config.json", says):
        load(folder, mtp=True)


def test_keys_and_values_of_an_old_conversion_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "deepseek_v3", shards=1)
    name = "model.layers.0.self_attn.kv_b_proj"
    change_tensors(folder, lambda tensors: tensors.update({f"{name}.scales": mx.zeros((256, 1))}))
    with refuses(CheckpointError, f"{name}.weight is quantised", "convert"):
        load(folder)


def test_an_mtp_layer_with_a_missing_tensor_is_not_taken_for_none(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "glm4_moe", mtp="separate", shards=1)
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.3.eh_proj.weight"))
    with refuses(CheckpointError, folder, "'mtp.layers.0.eh_proj.weight' is missing"):
        load(folder, mtp=True)
    load(folder)  # the trunk is whole


def test_a_huge_number_of_experts_is_refused_without_counting_them(folder: Path) -> None:
    change_config(folder, num_experts=2**31 - 1)
    with refuses(CheckpointError, folder, "mlp.gate.weight"):
        load(folder)


@pytest.mark.parametrize("key", ["hidden_size", "num_experts", "num_experts_per_tok", "rms_norm_eps", "rope_theta"])
def test_a_missing_key_is_named(folder: Path, key: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    with refuses(CheckpointError, folder / "config.json", key):
        load(folder)


def test_a_text_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_5_moe")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": None}))
    with refuses(CheckpointError, folder / "config.json", "text_config"):
        load(folder)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "factor", "a"]), inner),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fuzzed")
    return {family: make_checkpoint(root / family, family, shards=1) for family in FAMILIES}


@given(st.sampled_from(FAMILIES), st.data())
def test_no_configuration_crashes_loading_or_the_first_step(
    fuzzed: dict[str, Path], family: str, data: st.DataObject
) -> None:
    folder = fuzzed[family]
    sound = (folder / "config.json").read_text()
    config = json.loads(sound)
    text = config.get("text_config", config)
    keys = [*text, "quantization", "quantization_config", "rope_scaling", "rope_parameters"]
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2)):
        text[key] = data.draw(ANYTHING)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        with may_refuse(folder):
            plan = plan_model(Checkpoint.open(folder))
            mx.eval(load_model(plan)(mx.array([[1, 2, 3]])))
            load_tokenizer(plan.checkpoint)
    finally:
        (folder / "config.json").write_text(sound)


@given(st.data())
def test_no_header_crashes_loading_or_the_first_step(fuzzed: dict[str, Path], data: st.DataObject) -> None:
    folder = fuzzed["qwen3_next"]
    file = folder / "model.safetensors"
    sound = file.read_bytes()
    size = int.from_bytes(sound[:8], "little")
    header = json.loads(sound[8 : 8 + size])
    for name in data.draw(st.lists(st.sampled_from(sorted(header)), min_size=1, max_size=2)):
        match data.draw(st.sampled_from(["drop", "rename", "replace", "dtype", "shape", "data_offsets"])):
            case "drop":
                header.pop(name, None)
            case "rename":
                header[data.draw(st.sampled_from([*header, "x", "mtp.x", ""]))] = header.pop(name, {})
            case "replace":
                header[name] = data.draw(ANYTHING)
            case field if isinstance(header.get(name), dict):
                sensible = st.sampled_from(["F16", "BF16", "U32", "I32", "F64", [64, 64], [4096], [0, 4], [2, 128, 16]])
                header[name][field] = data.draw(ANYTHING | sensible)
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + sound[8 + size :])
    try:
        with may_refuse(folder):
            mx.eval(load_model(plan_model(Checkpoint.open(folder)))(mx.array([[1, 2, 3]])))
    finally:
        file.write_bytes(sound)
