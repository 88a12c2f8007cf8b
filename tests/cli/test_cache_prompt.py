"""strata_mlx cache_prompt, and generate with what it saved."""

import io
import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from tokenizers import Tokenizer, processors

from tests.cli.conftest import Run
from tests.cli.test_generate import make_adapter
from tests.tiny import FAMILIES, START, make_checkpoint

KINDS = {
    "plain": [],
    "bounded": ["--max-kv-size", "30"],
    "quantised": ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"],
    "in chunks": ["--prefill-step-size", "4"],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "p.safetensors"


def text(run: Run, *arguments: str | Path) -> str:
    ended = run("generate", "-m", "12", "--json", *arguments)
    assert (ended.code, ended.err) == (0, "")
    return str(json.loads(ended.out)["text"])


@pytest.mark.parametrize("template", [True, False], ids=["chat", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_prompt_and_its_continuation_give_the_text_of_the_whole(
    family: str, template: bool, run: Run, file: Path, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "m", family, "stacked")
    if not template:
        without_template(model)
    saved = run("cache_prompt", "--model", model, "--prompt", "abc ", "--prompt-cache-file", file)
    assert (saved.code, saved.err) == (0, "")
    assert saved.out == f"{file}: the state after {10 if template else 4} tokens\n"
    whole = text(run, "--model", model, "-p", "abc def")
    assert text(run, "--prompt-cache-file", file, "-p", "def") == whole
    assert text(run, "--model", model, "--prompt-cache-file", file, "-p", "def") == whole


def without_template(model: Path) -> Path:
    config = model / "tokenizer_config.json"
    options = json.loads(config.read_text())
    config.write_text(json.dumps({name: value for name, value in options.items() if name != "chat_template"}))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache_can_be_continued_and_more_than_once(kind: str, run: Run, tiny: Path, file: Path) -> None:
    saved = run("cache_prompt", "--model", tiny, "-p", "abcdef" * 4, "--prompt-cache-file", file, *KINDS[kind])
    assert (saved.code, saved.err) == (0, "")
    content = file.read_bytes()
    first = text(run, "--prompt-cache-file", file, "-p", "g")
    assert text(run, "--prompt-cache-file", file, "-p", "g") == first
    assert text(run, "--prompt-cache-file", file, "-p", "hello") != first
    assert file.read_bytes() == content


def test_the_continuation_follows_the_chat_template(run: Run, tiny: Path, file: Path) -> None:
    assert run("cache_prompt", "--model", tiny, "-p", "abc", "--prompt-cache-file", file).code == 0
    for options in ([], ["--prefill-response", "So "], ["--ignore-chat-template"]):
        suffix = ["-p", "def", *options]
        expected = text(run, "--model", tiny, "-p", "abcdef", *options)
        assert (text(run, "--prompt-cache-file", file, *suffix) == expected) is (
            "--ignore-chat-template" not in options
        )


def test_a_continuation_does_not_begin_the_sequence_again(run: Run, file: Path, tmp_path: Path) -> None:
    model = without_template(make_checkpoint(tmp_path / "m", "qwen3_moe", "stacked"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    start = (START, tokenizer.token_to_id(START))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[start])
    tokenizer.save(str(model / "tokenizer.json"))
    assert "after 4 tokens" in run("cache_prompt", "--model", model, "-p", "abc", "--prompt-cache-file", file).out
    whole = text(run, "--model", model, "-p", "abcdef")
    assert text(run, "--prompt-cache-file", file, "-p", "def") == whole


def test_a_cache_that_mlx_lm_saved_is_continued(run: Run, tiny: Path, file: Path) -> None:
    model, tokenizer = mlx_lm.load(str(tiny))
    cache = make_prompt_cache(model)
    model(mx.array([tokenizer.encode("abc")]), cache=cache)
    expected = text(run, "--model", tiny, "-p", "abcdef", "--ignore-chat-template")
    save_prompt_cache(str(file), cache, {"model": str(tiny), "tokenizer_config": "{}"})
    arguments = ("--prompt-cache-file", file, "-p", "def", "--ignore-chat-template")
    assert text(run, *arguments) == expected
    save_prompt_cache(str(file), cache)
    assert text(run, "--model", tiny, *arguments) == expected
    ended = run("generate", *arguments)
    assert ended.code == 2
    assert "name the model" in ended.error


def test_adapters_are_part_of_the_state(run: Run, tiny: Path, file: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny)
    arguments = ("--model", tiny, "--adapter-path", adapter)
    assert run("cache_prompt", *arguments, "-p", "abc", "--prompt-cache-file", file).code == 0
    assert text(run, *arguments, "--prompt-cache-file", file, "-p", "def") == text(run, *arguments, "-p", "abcdef")


def test_a_dash_reads_the_prompt_from_standard_input(
    run: Run, tiny: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("cache_prompt", "--model", tiny, "-p", "ä\nb", "--prompt-cache-file", file).code == 0
    expected = file.read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ä\nb".encode()), encoding="utf-8"))
    assert run("cache_prompt", "--model", tiny, "-p", "-", "--prompt-cache-file", file).code == 0
    assert file.read_bytes() == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert "UTF-8" in run("cache_prompt", "--model", tiny, "-p", "-", "--prompt-cache-file", file).error


@pytest.mark.parametrize("name", ["", "p", "p.bin", "nowhere/p.safetensors", "folder.safetensors"])
def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.safetensors").mkdir()
    ended = run("cache_prompt", "--model", "nowhere", "-p", "x", "--prompt-cache-file", name)
    assert (ended.code, ended.out) == (2, "")
    assert "nowhere'" not in ended.error


@pytest.mark.parametrize(
    "arguments",
    [("--prompt", "x"), ("--prompt-cache-file", "x"), ("--prompt-cache-file=x", "-p", "x", "--max-kv-size", "4")],
)
def test_a_missing_or_wrong_option_is_refused(arguments: tuple[str, ...], run: Run) -> None:
    ended = run("cache_prompt", *arguments)
    assert ended.code == 2
    assert "--" in ended.error


def test_an_empty_prompt_is_refused(run: Run, file: Path, tmp_path: Path) -> None:
    model = without_template(make_checkpoint(tmp_path / "m", "qwen3_moe", "stacked"))
    ended = run("cache_prompt", "--model", model, "-p", "", "--prompt-cache-file", file)
    assert ended.code == 2
    assert "prompt is empty" in ended.error
    assert not file.exists()


def test_generate_refuses_a_cache_that_does_not_belong_to_the_model(
    run: Run, tiny: Path, file: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    assert run("cache_prompt", "--model", model, "-p", "abc", "--prompt-cache-file", file).code == 0
    ended = run("generate", "--model", tiny, "--prompt-cache-file", file)
    assert (ended.code, ended.out) == (2, "")
    assert f"made with the model {str(model)!r}, not {str(tiny)!r}" in ended.error
    shutil.rmtree(model)
    assert str(model) in run("generate", "--prompt-cache-file", file).error
    make_checkpoint(model, "qwen3_moe", "stacked")
    assert "does not fit the model" in run("generate", "--prompt-cache-file", file).error


@pytest.mark.parametrize("content", [None, b"", b"noise" * 30], ids=["missing", "empty", "noise"])
def test_generate_refuses_a_file_that_is_no_cache(content: bytes | None, run: Run, tiny: Path, file: Path) -> None:
    if content is not None:
        file.write_bytes(content)
    ended = run("generate", "--model", tiny, "--prompt-cache-file", file)
    assert (ended.code, ended.out) == (2, "")
    assert str(file) in ended.error
    weights = next(tiny.glob("model*.safetensors"))
    assert "not a prompt cache" in run("generate", "--model", tiny, "--prompt-cache-file", weights).error
    assert run("generate", "--model", tiny, "--prompt-cache-file", "").code == 2


def test_generate_refuses_cache_options_that_a_saved_cache_has_settled(run: Run, tiny: Path, file: Path) -> None:
    options = ["--kv-group-size", "32", "--quantized-kv-start", "0"]
    saved = run("cache_prompt", "--model", tiny, "-p", "x", "--prompt-cache-file", file, "--kv-bits", "8", *options)
    assert saved.code == 0
    for option, value in {"--max-kv-size": "8", "--system-prompt": "Be brief."}.items():
        ended = run("generate", "--prompt-cache-file", file, option, value)
        assert ended.code == 2
        assert option in ended.error
    ended = run("generate", "--prompt-cache-file", file, "--kv-bits", "4", *options)
    assert ended.code == 2
    assert "8 bits in groups of 32" in ended.error
    assert run("generate", "--prompt-cache-file", file, "--kv-bits", "8", *options, "-m", "1").code == 0
