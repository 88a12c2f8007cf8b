"""What making the demo model does before it trains: gathering text, laying out files, refusing bad input."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.demo_model import data
from benchmarks.demo_model.__main__ import main
from benchmarks.demo_model.config import SPECIAL_TOKENS, Config, Recipe
from benchmarks.demo_model.layout import (
    index,
    json_files,
    plan_shards,
    read_config,
    read_weight_map,
    write_json,
)
from strata_mlx.errors import CheckpointError, InputError


def write(root: Path, sources: dict[str, str]) -> Path:
    for name, text in sources.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root


def gathered_documents(root: Path, output: Path, held_out: frozenset[str] = data.HELD_OUT) -> list[str]:
    data.gather([root], output, held_out)
    return data.read_documents(output)


# Gathering


def test_gathers_python_sources_in_the_order_of_their_paths(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {"b.py": "b = 1\n", "a/x.py": "x = 1\n", "a/notes.txt": "no", "c.py": "c = 1\n"})
    assert gathered_documents(root, tmp_path / "text") == ["b = 1\n", "c = 1\n", "x = 1\n"]


@pytest.mark.parametrize("name", sorted(data.HELD_OUT))
def test_held_out_packages_are_never_gathered(tmp_path: Path, name: str) -> None:
    sources = {
        f"{name}/__init__.py": "as a package\n",
        f"{name}/deep/module.py": "deep in a package\n",
        f"{name}.py": "as a module\n",
        f"pip/_vendor/{name}/console.py": "vendored\n",
        f"tqdm/{name}.py": "another package's module of that name\n",
        f"{name}_extras/__init__.py": "another package\n",
    }
    root = write(tmp_path / "root", sources)
    documents = gathered_documents(root, tmp_path / "text")
    assert sorted(documents) == ["another package\n", "another package's module of that name\n"]


def test_a_copy_of_a_held_out_file_is_left_out_wherever_it_lies(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {"aaa/copied.py": "same\n", "rich/panel.py": "same\n", "own.py": "own\n"})
    assert gathered_documents(root, tmp_path / "text") == ["own\n"]


def test_further_packages_can_be_held_out(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {"mine/a.py": "a\n", "other/b.py": "b\n"})
    output = tmp_path / "text"
    assert main(["corpus", "--root", str(root), "--text", str(output), "--hold-out", "mine"]) == 0
    assert data.read_documents(output) == ["b\n"]


def test_equal_files_are_gathered_once_whatever_their_line_ends(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {"a.py": "x = 1\ny = 2\n", "b.py": "x = 1\r\ny = 2\r\n", "c.py": "z = 3\n"})
    assert gathered_documents(root, tmp_path / "text") == ["x = 1\ny = 2\n", "z = 3\n"]


def test_files_that_are_no_text_are_counted_and_left_out(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {"good.py": "x = 1\n", "empty.py": " \n", "nul.py": "a\x00b"})
    (root / "latin.py").write_bytes("# caf\xe9\n".encode("latin-1"))
    gathered = data.gather([root], tmp_path / "text")
    assert gathered.documents == 1
    assert gathered.left_out == {"not UTF-8 text": 2, "empty": 1}


def test_nested_package_folders_and_caches_are_not_part_of_a_root(tmp_path: Path) -> None:
    sources = {"os.py": "os\n", "site-packages/click/core.py": "click\n", "__pycache__/os.py": "cache\n"}
    assert gathered_documents(write(tmp_path / "root", sources), tmp_path / "text") == ["os\n"]


@pytest.mark.parametrize(
    ("root", "message"),
    [("missing", "not a folder"), ("empty", "no Python sources"), ("networkx", "held-out package")],
)
def test_a_root_without_usable_text_is_refused_and_nothing_is_left_behind(
    tmp_path: Path, root: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "networkx", {"graph.py": "graph\n"})
    with pytest.raises(InputError, match=message):
        data.gather([tmp_path / root], tmp_path / "out" / "text")
    assert not list(tmp_path.glob("out/*"))


# Tokenizer and token file


def test_preparing_writes_tokens_that_decode_to_the_documents(tmp_path: Path) -> None:
    documents = ["def f(x):\n    return x + 12\n", "class Überraschung:\n\tpass\n"]
    (tmp_path / "text").write_text(data.SEPARATOR.join(documents), encoding="utf-8")
    vocab = 256 + len(SPECIAL_TOKENS) + 4
    total = data.prepare(tmp_path / "text", tmp_path / "data", vocab)
    ids = data.read_tokens(tmp_path / "data", 1, vocab)
    tokenizer = data.load_tokenizer(tmp_path / "data" / "tokenizer.json")
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [vocab - 3, vocab - 2, vocab - 1]
    assert len(ids) == total
    assert ids[-1] == vocab - 3
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert text == "".join(document + SPECIAL_TOKENS[0] for document in documents)


def test_too_little_text_for_the_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x = 1\n")
    with pytest.raises(InputError, match="gather more text"):
        data.prepare(tmp_path / "text", tmp_path / "data", Config().vocab_size)


def test_a_text_can_be_written_in_the_tokens_of_another_model(tmp_path: Path) -> None:
    vocab = 256 + len(SPECIAL_TOKENS) + 4
    for name, text in (("one", "abcabcabcd = 1\n"), ("two", "xyzxyzxyzw = 2\n")):
        (tmp_path / f"{name}.txt").write_text(text)
        data.prepare(tmp_path / f"{name}.txt", tmp_path / name, vocab)
    with pytest.raises(InputError, match="different tokenizers: run `prepare --tokenizer"):
        data.require_same_tokenizer(tmp_path / "one", tmp_path / "two")
    data.prepare(tmp_path / "one.txt", tmp_path / "one", vocab, tmp_path / "two" / "tokenizer.json")
    data.require_same_tokenizer(tmp_path / "one", tmp_path / "two")
    with pytest.raises(InputError, match="has 263 tokens, but the model has 300"):
        data.prepare(tmp_path / "one.txt", tmp_path / "new", 300, tmp_path / "two" / "tokenizer.json")


def test_tokens_that_do_not_fit_the_training_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run `prepare` first"):
        data.read_tokens(tmp_path, 4, 300)
    np.array([1, 2, 299], np.uint16).tofile(tmp_path / "tokens.bin")
    with pytest.raises(InputError, match="3 tokens, but one training window takes 4"):
        data.read_tokens(tmp_path, 4, 300)
    with pytest.raises(InputError, match="token 299"):
        data.read_tokens(tmp_path, 3, 299)


# Configuration and recipe


def test_a_configuration_survives_its_config_json(tmp_path: Path) -> None:
    config = replace(Config(), num_hidden_layers=5, full_attention_interval=2, num_experts=16, rope_theta=5e5)
    write_json(tmp_path / "config.json", config.to_hf())
    assert read_config(tmp_path) == config


def test_the_demo_models_config_json_describes_it() -> None:
    hf = Config().to_hf()
    assert hf["model_type"] == "qwen3_next"
    assert hf["layer_types"] == [*["linear_attention"] * 3, "full_attention"] * 2
    assert (hf["num_experts"], hf["num_experts_per_tok"], hf["num_nextn_predict_layers"]) == (128, 10, 1)
    assert hf["eos_token_id"] == 8189 == json_files(Config())["generation_config.json"]["eos_token_id"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be a positive integer, not 0"),
        ({"hidden_size": "256"}, "hidden_size must be a positive integer, not '256'"),
        ({"num_experts": True}, "num_experts must be a positive integer"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number"),
        ({"num_experts_per_tok": 129}, r"num_experts_per_tok \(129\) exceeds num_experts \(128\)"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"linear_num_key_heads": 3}, "multiple of linear_num_key_heads"),
        ({"vocab_size": 258}, "vocab_size must lie between"),
        ({"vocab_size": 65537}, "vocab_size must lie between"),
        ({"partial_rotary_factor": 0.05}, "must be even"),
        ({"model_type": "llama"}, "model_type = 'llama'"),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers = 0"),
    ],
)
def test_a_config_json_of_something_else_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Config.from_hf(Config().to_hf() | change)


def test_a_config_json_without_a_size_is_refused() -> None:
    hf = Config().to_hf()
    del hf["num_experts"]
    with pytest.raises(CheckpointError, match="lacks num_experts"):
        Config.from_hf(hf)


def test_the_default_recipe_sees_213_million_tokens() -> None:
    assert round(Recipe().tokens / 1e6) == 213


def test_the_learning_rate_warms_up_stays_and_falls() -> None:
    recipe = Recipe(steps=1000, warmup_steps=200, learning_rate=1.0)
    rates = [recipe.rate(step) for step in range(recipe.steps)]
    assert rates[:200] == sorted(rates[:200])
    assert set(rates[200:600]) == {1.0}
    assert rates[600:] == sorted(rates[600:], reverse=True)
    assert rates[-1] == 0.02


@pytest.mark.parametrize("change", [{"steps": 0}, {"learning_rate": -1.0}, {"balance_weight": -0.1}, {"seed": -1}])
def test_a_recipe_out_of_range_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(change))):
        Recipe(**change)  # type: ignore[arg-type]


# Files of a checkpoint


@given(st.dictionaries(st.text(min_size=1, max_size=4), st.integers(1, 50), min_size=1), st.integers(1, 100))
def test_shards_hold_every_tensor_once_in_order_and_within_the_limit(sizes: dict[str, int], limit: int) -> None:
    shards = plan_shards(sizes, limit)
    assert [name for names in shards.values() for name in names] == sorted(sizes)
    totals = [sum(sizes[name] for name in names) for names in shards.values()]
    for names, total in zip(shards.values(), totals, strict=True):
        assert total <= limit or len(names) == 1
    first_sizes = [sizes[names[0]] for names in shards.values()]
    for total, following in zip(totals[:-1], first_sizes[1:], strict=True):
        assert total + following > limit  # no shard ends before it must
    assert list(shards) == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]


def test_the_index_names_the_shard_of_every_tensor(tmp_path: Path) -> None:
    sizes = {"a": 3, "b": 4, "c": 5}
    write_json(tmp_path / "model.safetensors.index.json", index(sizes, plan_shards(sizes, 7)))
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert read_weight_map(tmp_path) == {"a": first, "b": first, "c": second}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "has no weight_map"),
        (json.dumps({"weight_map": {"a": "../other.safetensors"}}), "no file name"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, contents: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(contents)
    with pytest.raises(CheckpointError, match=message):
        read_weight_map(tmp_path)


# The command line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["paint"],
        ["train", "--steps", "0"],
        ["train", "--device", "tpu"],
        ["evaluate"],
        ["corpus", "--txet", "x"],
    ],
)
def test_wrong_arguments_end_with_usage_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m benchmarks.demo_model" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "export", "evaluate", "check"])
def test_without_pytorch_a_command_that_needs_it_says_so(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main([command, *(["--text", "x"] if command == "evaluate" else [])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: this command needs PyTorch")
    assert error.count("\n") == 1


def test_preparing_before_gathering_says_what_to_run_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--text", str(tmp_path / "none"), "--data", str(tmp_path / "data")]) == 2
    assert "run `corpus` first" in capsys.readouterr().err


def test_help_names_the_commands_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    steps = [text.index(f"benchmarks.demo_model {name}") for name in ("corpus", "prepare", "train", "export")]
    assert steps == sorted(steps)
