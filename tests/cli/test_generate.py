"""strata_mlx generate, compared with mlx_lm.generate, and used by somebody who means no good."""

import argparse
import importlib
import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import setup_arg_parser
from mlx_lm.tuner.utils import linear_to_lora_layers

from strata_mlx import engine
from strata_mlx.cli.options import NotHere
from tests.cli.conftest import Run
from tests.tiny import END, make_checkpoint

KEYS: dict[str, type] = {
    "text": str,
    "prompt_tokens": int,
    "prompt_tps": float,
    "generation_tokens": int,
    "generation_tps": float,
    "peak_memory_gb": float,
    "finish_reason": str,
    "mtp": dict,
    "memory": type(None),
    "experts": type(None),
    "routing": dict,
}
Text = Callable[..., str]


@pytest.fixture
def text(run: Run, tiny: Path) -> Text:
    """The text that a command writes."""

    def text(*arguments: str | Path) -> str:
        ended = run("generate", "--model", tiny, "-m", "12", "--json", *arguments)
        assert (ended.code, ended.err) == (0, "")
        result = json.loads(ended.out)["text"]
        assert isinstance(result, str)
        return result

    return text


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model has been given to read, as text."""
    seen: list[str] = []
    stream = engine.stream_generate

    def watching(model: Any, tokenizer: Any, prompt: list[int], **options: Any) -> Iterator[Any]:
        seen.append(tokenizer.decode(prompt))
        return stream(model, tokenizer, prompt, **options)

    monkeypatch.setattr(engine, "stream_generate", watching)
    return seen


# What it prints


def test_json_has_the_text_the_counts_the_speeds_and_the_reason(run: Run, tiny: Path) -> None:
    ended = run("generate", "--model", tiny, "-p", "abc", "-m", "4", "--json", "--ignore-chat-template")
    record = json.loads(ended.out)
    assert {name: type(value) for name, value in record.items()} == KEYS
    assert (record["prompt_tokens"], record["generation_tokens"], record["finish_reason"]) == (3, 4, "length")
    assert record["prompt_tps"] > 0
    assert record["generation_tps"] > 0
    assert record["peak_memory_gb"] > 0


def test_the_summary_is_mlx_lms_and_the_text_alone_comes_without_it(
    run: Run, tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model", str(tiny), "-p", "abc", "-m", "6"]
    ours = run("generate", "--no-mtp", *arguments)
    quiet = run("generate", *arguments, "--verbose", "False")
    monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", *arguments])
    mlx_lm_main()
    theirs = capfd.readouterr().out

    def without_numbers(output: str) -> str:
        body = output.partition("=" * 10 + "\n")[2]
        return "".join("#" if char.isdigit() else char for char in body).replace("##", "#").replace("##", "#")

    assert (ours.code, ours.err, quiet.code, quiet.err) == (0, "", 0, "")
    body = ours.out.partition("=" * 10 + "\n")[2]
    assert body.startswith(quiet.out)
    assert body.splitlines()[-3].startswith(theirs.splitlines()[-3].partition(",")[0])
    assert body.splitlines()[-2].startswith(theirs.splitlines()[-2].partition(",")[0])
    assert without_numbers(ours.out).split() == without_numbers(theirs).split()
    assert ours.out.splitlines()[0].startswith(f"Model: {tiny} (qwen3_next), computing in ")


def test_each_segment_is_written_before_the_next_token_is_waited_for(
    run: Run, endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, stream, written = io.BytesIO(), engine.stream_generate, []

    def watching(*args: Any, **options: Any) -> Iterator[engine.GenerationResponse]:
        text = ""
        for response in stream(*args, **options):
            text += response.text
            yield response
            written.append(raw.getvalue().decode() == text)

    monkeypatch.setattr(engine, "stream_generate", watching)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
    arguments = ("--model", endless, "-p", "abc", "-m", "8", "--ignore-chat-template", "--verbose", "False")
    assert run("generate", *arguments).code == 0
    assert written == [True] * 8


def mlx_lm_main() -> None:
    importlib.import_module("mlx_lm.generate").main()


@pytest.mark.parametrize(
    "options",
    [
        ["-p", "abc"],
        ["-p", "a\\n\\tb"],
        ["-p", "abc", "--ignore-chat-template"],
        ["-p", "abc", "--system-prompt", "Be brief.", "--max-tokens", "1"],
        ["-p", "abc", "--prefill-response", "The"],
        ["-p", "abc", "--chat-template-config", '{"enable_thinking": false, "other": [1]}'],
        ["-p", "abc", "--temp", "0.9", "--seed", "3", "--top-p", "0.9", "--min-p", "0.01"],
        ["-p", "abc", "--temp", "1.5", "--seed", "0", "--top-k", "20", "--min-tokens-to-keep", "2"],
        ["-p", "abc", "--temp", "1", "--seed", "1", "--xtc-probability", "0.5", "--xtc-threshold", "0.02"],
        ["-p", "abc", "--prefill-step-size", "3"],
        ["-p", "abc", "--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "5"],
        ["-p", "abc", "--extra-eos-token", "e", "10", "--temp", "1", "--seed", "5"],
        ["-p", ""],
    ],
    ids=" ".join,
)
def test_the_text_is_mlx_lms_for_the_same_options(
    options: list[str], run: Run, tiny: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--model", str(tiny), "--verbose", "False", "--max-tokens", "24", *options]
    ours = run("generate", *arguments)
    monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", *arguments])
    mlx_lm_main()
    assert (ours.code, ours.err) == (0, "")
    assert ours.out == capfd.readouterr().out


def test_the_same_seed_gives_the_same_text_and_another_seed_another(text: Text) -> None:
    hot = ("--temp", "1.5", "--seed")
    assert text(*hot, "1") == text(*hot, "1") != text(*hot, "2")
    assert text(*hot, str(2**64 - 1)) == text(*hot, str(2**64 - 1))


def test_one_token_is_enough(run: Run, tiny: Path) -> None:
    record = json.loads(run("generate", "--model", tiny, "-m", "1", "--json").out)
    assert (record["generation_tokens"], record["finish_reason"]) == (1, "length")


def test_a_chunk_that_is_longer_than_any_prompt_is_the_whole_prompt(run: Run, tiny: Path) -> None:
    assert run("generate", "--model", tiny, "-m", "1", "--prefill-step-size", "9" * 400, "--json").code == 0


# The prompt


def test_a_dash_reads_the_prompt_from_standard_input(
    text: Text, prompts: list[str], stdin: Callable[[bytes], None]
) -> None:
    stdin("zwei\nZeilen \\n ä\n".encode())
    text("-p", "-", "--ignore-chat-template")
    assert prompts == ["zwei\nZeilen \\n ä\n"]


def test_backslash_n_and_t_are_line_ends_and_tabs(text: Text, prompts: list[str]) -> None:
    text("-p", r"a\nb\tc\d", "--ignore-chat-template")
    assert prompts == ["a\nb\tc\\d"]


def test_input_that_is_not_utf8_is_refused(run: Run, tiny: Path, stdin: Callable[[bytes], None]) -> None:
    stdin(b"\xff\xfe")
    assert run("generate", "--model", tiny, "-p", "-").error == "error: standard input is not text in UTF-8"
    for option in ("--prompt", "--system-prompt", "--prefill-response"):  # bytes that Python could not decode
        ended = run("generate", "--model", tiny, option, "\udcff")
        assert ended.code == 2
        assert option in ended.error


def test_a_closed_standard_input_is_refused(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    ended = run("generate", "--model", tiny, "-p", "-")
    assert ended.code == 2
    assert "closed" in ended.error


def test_an_empty_prompt_without_a_chat_template_is_refused(run: Run, tiny: Path) -> None:
    ended = run("generate", "--model", tiny, "-p", "", "--ignore-chat-template", "--json")
    assert (ended.code, ended.out) == (2, "")
    assert "prompt is empty" in ended.error


def test_the_chat_template_puts_the_messages_together(text: Text, prompts: list[str]) -> None:
    text("-p", "Hi", "--system-prompt", "Be brief.", "--prefill-response", "Yes, ")
    text("-p", "Hi")
    text("-p", "Hi", "--ignore-chat-template", "--system-prompt", "not used")
    assert prompts == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes, ",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "Hi",
    ]


@pytest.mark.parametrize(
    ("value", "says"),
    [("{", "not valid JSON"), ("[1]", "JSON object"), ("3", "JSON object"), ('"a"', "JSON object"), ("", "not valid")],
)
def test_a_chat_template_config_that_is_no_object_is_refused(value: str, says: str, run: Run, tiny: Path) -> None:
    ended = run("generate", "--model", tiny, "--chat-template-config", value)
    assert (ended.code, ended.out) == (2, "")
    assert "--chat-template-config" in ended.error
    assert says in ended.error


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "continue_final_message", "conversation"])
def test_a_chat_template_config_cannot_change_what_the_command_sets(name: str, run: Run, tiny: Path) -> None:
    ended = run("generate", "--model", tiny, "--chat-template-config", json.dumps({name: True}))
    assert (ended.code, ended.out) == (2, "")
    assert name in ended.error


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system\\nprompts') }}", "{{ messages[9].role }}", "{% if %}", "{{ 1 + 'a' }}"]
)
def test_a_chat_template_that_fails_is_one_line(template: str, run: Run, tmp_path: Path) -> None:
    model = with_template(make_checkpoint(tmp_path / "m", "qwen3_moe", "stacked"), template)
    ended = run("generate", "--model", model)
    assert (ended.code, ended.out) == (2, "")
    assert "chat template" in ended.error
    assert run("generate", "--model", model, "--ignore-chat-template", "-m", "1").code == 0


def with_template(path: Path, template: str) -> Path:
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return path


def test_an_extra_end_token_ends_the_text(run: Run, tiny: Path) -> None:
    whole = run(
        "generate", "--model", tiny, "-m", "30", "--json", "--ignore-chat-template", "--temp", "1", "--seed", "5"
    )
    letter = next(char for char in json.loads(whole.out)["text"] if char.isascii() and char.isprintable())
    ended = run(
        "generate", "--model", tiny, "-m", "30", "--json", "--ignore-chat-template", "--temp", "1", "--seed", "5",
        "--extra-eos-token", letter, END,
    )  # fmt: skip
    record = json.loads(ended.out)
    assert record["finish_reason"] == "stop"
    assert record["text"] == json.loads(whole.out)["text"].partition(letter)[0]


@pytest.mark.parametrize("token", ["no such token", "259", "-1", ""])
def test_an_extra_end_token_that_the_model_lacks_is_refused(token: str, run: Run, tiny: Path) -> None:
    ended = run("generate", "--model", tiny, f"--extra-eos-token={token}")
    assert (ended.code, ended.out) == (2, "")
    assert f"--extra-eos-token {token!r}" in ended.error


# Options


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser()
    importlib.import_module("strata_mlx.cli.generate").add_arguments(result)
    return result


def test_every_option_of_mlx_lm_is_there_with_its_default_or_refused_with_a_reason(run: Run) -> None:
    ours = parser()._option_string_actions
    for theirs in setup_arg_parser()._actions:
        for option in theirs.option_strings:
            if option in ("-h", "--help"):
                continue
            assert option in ours, f"mlx_lm.generate has {option}"
            if isinstance(ours[option], NotHere):
                ended = run("generate", option)
                assert ended.code == 2
                assert f"{option} is not available: " in ended.error
                assert run("generate", option, "value").error == ended.error
            else:
                assert (ours[option].default, ours[option].dest) == (theirs.default, theirs.dest), option
                assert ours[option].nargs == theirs.nargs, option
                assert ours[option].const == theirs.const, option


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--max-tokens", ["0", "-2", "1.5", "x", "", "1e3"]),
        ("-m", ["0"]),
        ("--temp", ["-1", "nan", "inf", "1e-300", "1e300", "x"]),
        ("--top-p", ["-0.1", "1.01", "nan", "-inf"]),
        ("--min-p", ["-0.1", "1.01"]),
        ("--top-k", ["-1", "2.5"]),
        ("--xtc-probability", ["-0.1", "1.1"]),
        ("--xtc-threshold", ["-0.1", "0.51"]),
        ("--min-tokens-to-keep", ["0", "-1"]),
        ("--seed", ["-1", str(2**64), "9" * 400, "9" * 5000, "x"]),
        ("--prefill-step-size", ["0", "-1", "x"]),
        ("--max-kv-size", ["4", "0", "-1", "9" * 400]),
        ("--kv-bits", ["1", "7", "9", "x"]),
        ("--kv-group-size", ["0", "16", "48", "x"]),
        ("--quantized-kv-start", ["-1", "x"]),
        ("--verbose", ["maybe", ""]),
        ("--dtype", ["int8"]),
        ("--extra-eos-token", []),
        ("--prompt", []),
        ("--model", []),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_options_name(option: str, values: list[str], run: Run) -> None:
    for value in values:
        ended = run("generate", f"{option}={value}" if option.startswith("--") else f"{option}{value}")
        assert (ended.code, ended.out) == (2, ""), value
        assert option in ended.error, value
    if not values:
        ended = run("generate", option)
        assert (ended.code, ended.out) == (2, "")
        assert option in ended.error


def test_every_option_that_is_parsed_refuses_nonsense(run: Run) -> None:
    for action in parser()._actions:
        # A trace may be written to a file of any name.
        if (action.choices or action.type not in (None, str)) and action.dest != "trace":
            option = action.option_strings[0]
            ended = run("generate", option, "\udc80 nonsense")
            assert (ended.code, ended.out) == (2, "")
            assert option in ended.error


def test_options_that_exclude_each_other_are_refused(run: Run, tiny: Path) -> None:
    ended = run("generate", "--model", tiny, "--max-kv-size", "8", "--kv-bits", "4")
    assert ended.code == 2
    assert "--max-kv-size" in ended.error
    assert "--kv-bits" in ended.error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--top-k", "259"], "--top-k 259"),
        (["--top-k", "9" * 400], "--top-k"),
        (["--min-tokens-to-keep", "260"], "--min-tokens-to-keep 260"),
        (["--kv-bits", "4", "--kv-group-size", "64"], "head dimension 32"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_this_model_cannot_do_is_refused_in_one_line(options: list[str], says: str, run: Run, tiny: Path) -> None:
    ended = run("generate", "--model", tiny, *options)
    assert ended.code == 2
    assert says in ended.error


def test_a_type_that_the_cpu_cannot_compute_experts_in_is_refused(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata_mlx.loading.on_cpu", lambda: True)
    for dtype in ("float16", "bfloat16"):
        ended = run("generate", "--model", tiny, "--dtype", dtype)
        assert (ended.code, ended.out) == (2, "")
        assert dtype in ended.error
    model = tmp_path / "q"
    assert run("convert", "--model", tiny, "--mlx-path", model, "-q", "--q-group-size", "32", "--json").code == 0
    assert "bfloat16" in run("generate", "--model", model, "--dtype", "bfloat16", "-m", "2").out


def test_a_bounded_cache_works_on_a_hybrid_model(text: Text) -> None:
    assert text("--max-kv-size", "5") != text() == text("--max-kv-size", "500")


# Adapters


def make_adapter(folder: Path, model_path: Path) -> Path:
    folder.mkdir()
    model, _ = mlx_lm.load(str(model_path))
    model.freeze()
    parameters: dict[str, Any] = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    linear_to_lora_layers(model, 2, parameters)
    mx.random.seed(0)
    weights = {name: mx.random.normal(array.shape) for name, array in tree_flatten(model.trainable_parameters())}
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_adapters_change_the_text_as_in_mlx_lm(text: Text, tiny: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny)
    model, tokenizer = mlx_lm.load(str(tiny), adapter_path=str(adapter))
    expected = mlx_lm.generate(model, tokenizer, "abc", max_tokens=12)
    ours = text("--adapter-path", adapter, "-p", "abc", "--ignore-chat-template")
    assert ours == expected != text("-p", "abc", "--ignore-chat-template")


def test_adapters_that_are_missing_or_broken_are_refused(run: Run, tiny: Path, tmp_path: Path) -> None:
    def error(path: Path | str) -> str:
        ended = run("generate", "--model", tiny, "--adapter-path", path)
        assert (ended.code, ended.out) == (2, "")
        return ended.error

    assert "nowhere" in error(tmp_path / "nowhere")
    adapter = make_adapter(tmp_path / "adapter", tiny)
    weights, config = adapter / "adapters.safetensors", adapter / "adapter_config.json"
    whole = config.read_text()
    for broken in ("{", "[]", "{}", whole.replace('"rank": 4', '"rank": 2')):
        config.write_text(broken)
        assert str(adapter) in error(adapter), broken
    config.write_text(whole)
    weights.write_bytes(weights.read_bytes()[:200])
    assert str(adapter) in error(adapter)
    weights.unlink()
    assert "adapters.safetensors" in error(adapter)


# Interruptions


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let Ctrl-C come when the model has given so many tokens."""
    stream = engine.stream_generate

    def after(count: int) -> None:
        def interrupt(*args: Any, **options: Any) -> Iterator[engine.GenerationResponse]:
            for number, response in enumerate(stream(*args, **options)):
                if number == count:
                    signal.raise_signal(signal.SIGINT)
                yield response

        monkeypatch.setattr(engine, "stream_generate", interrupt)

    return after


def test_ctrl_c_with_json_prints_what_there_is(run: Run, endless: Path, interrupted: Callable[[int], None]) -> None:
    arguments = ("generate", "--model", endless, "-p", "abc", "-m", "-1", "--ignore-chat-template", "--json")
    interrupted(7)
    ended = run(*arguments)
    record = json.loads(ended.out)
    assert (ended.code, ended.err) == (130, "")
    assert {name: type(value) for name, value in record.items()} == {**KEYS, "mtp": type(None)}
    assert (record["generation_tokens"], record["finish_reason"]) == (7, "interrupted")


def test_ctrl_c_before_the_first_token_says_so(run: Run, endless: Path, interrupted: Callable[[int], None]) -> None:
    interrupted(0)
    arguments = ("generate", "--model", endless, "-p", "abc", "--ignore-chat-template")
    ended = run(*arguments, "--json")
    record = json.loads(ended.out)
    assert (ended.code, ended.err) == (130, "")
    assert list(record) == list(KEYS)
    assert (record["text"], record["generation_tokens"], record["finish_reason"]) == ("", 0, "interrupted")
    ended = run(*arguments)
    assert (ended.code, ended.err) == (130, "")
    assert "interrupted before the first token" in ended.out


def test_broken_weights_are_a_fault_with_code_1(run: Run, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "nan", "qwen3_moe", "stacked", shards=1)
    file = str(model / "model.safetensors")
    weights = mx.load(file)
    assert isinstance(weights, dict)
    mx.save_safetensors(file, {**weights, "lm_head.weight": weights["lm_head.weight"] * float("nan")})
    ended = run("generate", "--model", model)
    assert ended.code == 1
    assert "token 1 are not finite" in ended.error
