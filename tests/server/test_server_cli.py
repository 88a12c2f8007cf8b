"""The command, as a process of its own: what it serves with a real model, how it ends, and what it refuses."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from strata_mlx import generate, load
from strata_mlx.cli import main
from tests.tiny import make_checkpoint

TOKENS = 24
WAIT = 120  # seconds that nothing here takes
PROMPTS = ("class Stack:", "def fibonacci(n", "import os\n", "# A queue of numbers\n")


@dataclass
class Running:
    """A server in a process of its own. said: what it has printed."""

    process: subprocess.Popen[str]
    url: str
    said: list[str]

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT)

    def ends(self, how: signal.Signals) -> int:
        """The exit code after the signal ``how``."""
        self.process.send_signal(how)
        return self.process.wait(WAIT)


@contextmanager
def running(*arguments: str | Path, **environment: str) -> Iterator[Running]:
    """``strata_mlx server ARGUMENTS`` at a free port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "strata_mlx", "server", "--port", "0", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    said: list[str] = []
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout
        for line in process.stdout:
            said.append(line)
            if match := re.match(r"Serving at (\S+) ", line):
                found.put(match[1])
        found.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        url = found.get(timeout=WAIT)
        assert url, "".join(said)
        yield Running(process, url, said)
    finally:
        process.kill()
        process.wait(WAIT)
        reader.join(WAIT)
        assert process.stdout
        process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """With the model that comes with the package."""
    with running("--max-context", "256", "--decode-concurrency", "4") as server:
        yield server


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What the model writes after each prompt, by itself."""
    model, tokenizer = load()
    return {prompt: generate(model, tokenizer, prompt, max_tokens=TOKENS) for prompt in PROMPTS}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose texts have no end."""
    path = tmp_path_factory.mktemp("server") / "tiny"
    return make_checkpoint(path, "qwen3_moe", "stacked", vocab_size=256, eos_token_id=None)


def test_texts_are_those_of_generate(server: Running, texts: dict[str, str]) -> None:
    for prompt, text in texts.items():
        ask = server.openai
        answer = ask.completions.create(model="default_model", prompt=prompt, max_tokens=TOKENS)
        assert answer.choices[0].text == text
        messages: list[Any] = [{"role": "user", "content": prompt}]
        chunks = ask.chat.completions.create(model="default_model", messages=messages, max_tokens=TOKENS, stream=True)
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text


def test_requests_at_the_same_time_get_their_own_texts(server: Running, texts: dict[str, str]) -> None:
    def ask(prompt: str) -> str:
        chunks = server.openai.completions.create(model="default_model", prompt=prompt, max_tokens=TOKENS, stream=True)
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)

    prompts = PROMPTS * 2
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == [texts[prompt] for prompt in prompts]


def test_messages_of_anthropic(server: Running, texts: dict[str, str]) -> None:
    ask = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=WAIT)
    options: dict[str, Any] = {"model": "strata-mlx-embedded", "messages": [{"role": "user", "content": PROMPTS[0]}]}
    message = ask.messages.create(**options, max_tokens=TOKENS)
    assert message.content[0].to_dict()["text"] == texts[PROMPTS[0]]
    assert message.stop_reason == "max_tokens"
    with ask.messages.stream(**options, max_tokens=TOKENS) as stream:
        assert stream.get_final_text() == texts[PROMPTS[0]]
    assert ask.messages.count_tokens(**options).input_tokens == message.usage.input_tokens + (
        message.usage.cache_read_input_tokens or 0
    )


def test_the_next_turn_reads_only_what_is_new(server: Running) -> None:
    said: list[Any] = [{"role": "user", "content": "class Queue:\n" + "    # keeps numbers in order\n" * 4}]
    first = server.openai.chat.completions.create(model="default_model", messages=said, max_tokens=20)
    said += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "def f():"},
    ]
    second = server.openai.chat.completions.create(model="default_model", messages=said, max_tokens=5)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens - 1


def test_samples_repeat_with_their_seed(server: Running) -> None:
    def sample(seed: int) -> list[str]:
        answer = server.openai.completions.create(
            model="default_model", prompt="class", max_tokens=20, temperature=1.0, seed=seed, n=2
        )
        return [choice.text for choice in answer.choices]

    assert sample(1) == sample(1)
    assert sample(1)[1] == sample(2)[0]
    assert len(set(sample(1))) == 2


def test_stop_strings_and_log_probabilities(server: Running, texts: dict[str, str]) -> None:
    text = texts[PROMPTS[0]]
    stop = text[12:16]
    answer = server.openai.completions.create(
        model="default_model", prompt=PROMPTS[0], max_tokens=TOKENS, stop=stop, logprobs=2
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert choice.logprobs is not None
    # A text does not begin with a space, a token may.
    assert "".join(choice.logprobs.tokens or ()).lstrip().startswith(choice.text.lstrip())
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs or ())


def test_what_does_not_fit_is_refused(server: Running) -> None:
    ask = server.openai
    with pytest.raises(openai.BadRequestError, match="256"):
        ask.completions.create(model="default_model", prompt="a " * 300)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        ask.completions.create(model="default_model", prompt=[10**6])
    answer = ask.completions.create(model="default_model", prompt=[5] * 250, max_tokens=1000)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 256


def test_the_work_for_a_client_that_leaves_ends(server: Running) -> None:
    with server.openai.completions.create(
        model="default_model", prompt="#", max_tokens=200, logit_bias={"8189": -100}, stream=True
    ) as chunks:
        next(iter(chunks))
    with httpx.stream("GET", f"{server.url}/v1/engine", headers={"Accept": "text/event-stream"}, timeout=WAIT) as live:
        for line in live.iter_lines():
            if line.startswith("data: ") and not json.loads(line.removeprefix("data: "))["requests"]:
                break
    totals = httpx.get(f"{server.url}/v1/engine", timeout=WAIT).json()["totals"]
    assert totals["requests"]["cancelled"] == 1


def test_what_is_said_when_it_starts(server: Running) -> None:
    assert server.said[0].startswith("Model: the embedded model (qwen3_next)")
    assert any(line.startswith("Requests: 4 at a time with up to 256 tokens, 64 may wait") for line in server.said)
    assert httpx.get(f"{server.url}/health", timeout=WAIT).json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/v1/models", timeout=WAIT).json()["data"][0]["id"] == "strata-mlx-embedded"
    assert "<html" in httpx.get(f"{server.url}/", timeout=WAIT).text


def test_ctrl_c_tells_clients_and_ends(tiny: Path) -> None:
    with running("--model", tiny, STRATA_MLX_API_KEY="a key") as server:
        assert httpx.get(f"{server.url}/v1/models", timeout=WAIT).status_code == 401
        ask = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a key", max_retries=0, timeout=WAIT)
        assert [model.id for model in ask.models.list()] == ["tiny"]
        with ask.completions.create(model="tiny", prompt="a", max_tokens=500, stream=True) as chunks:
            next(iter(chunks))
            assert server.ends(signal.SIGINT) == 130
            with pytest.raises(openai.APIError, match="closing"):
                list(chunks)
        assert "Traceback" not in "".join(server.said)
    with running("--model", tiny) as server:
        assert server.ends(signal.SIGTERM) == -signal.SIGTERM
        assert "Traceback" not in "".join(server.said)


def test_after_kill_9_it_starts_again(tiny: Path) -> None:
    with running("--model", tiny) as server:
        port = server.url.rpartition(":")[2]
        with server.openai.completions.create(model="tiny", prompt="a", max_tokens=500, stream=True) as chunks:
            next(iter(chunks))
            assert server.ends(signal.SIGKILL) == -signal.SIGKILL
    with running("--model", tiny, "--port", port) as again:
        assert again.url == server.url
        assert again.openai.completions.create(model="tiny", prompt="a", max_tokens=3).choices[0].text


def test_within_a_budget_the_texts_are_the_same(texts: dict[str, str], tmp_path: Path) -> None:
    few = ("--decode-concurrency", "2", "--max-context", "256", "--prompt-cache-bytes", "2MB")
    with (
        pytest.raises(AssertionError, match="fewer or shorter contexts need less") as refused,
        running("--memory", "1MB", *few),
    ):
        pass
    match = re.search(r"smallest that works is ([\d.]+) MB", str(refused.value))
    assert match
    profile = tmp_path / "profile.json"
    with running("--memory", f"{float(match[1]) + 12}MB", *few, "--expert-profile", profile) as server:
        assert any("experts in memory; prompts are read" in line for line in server.said)
        for prompt in PROMPTS[:2]:
            answer = server.openai.completions.create(model="default_model", prompt=prompt, max_tokens=TOKENS)
            assert answer.choices[0].text == texts[prompt]
            assert answer.usage is not None
            spent = (answer.usage.model_extra or {})["strata"]
            assert spent["misses"] > 0
            assert spent["bytes_read"] > 0
        assert server.ends(signal.SIGINT) == 130
    assert profile.exists()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code, and what is said about it."""
    with pytest.raises(SystemExit) as end:
        main(["server", *arguments])
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert isinstance(end.value.code, int)
    return end.value.code, error.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "others can reach this server"),
        (["--host", "::"], "--allow-anyone"),
        (["--api-key", ""], "printable ASCII"),
        (["--api-key", "schl\u00fcssel"], "printable ASCII"),
        (["--max-body", "much"], "--max-body: 'much' is not an amount"),
        (["--prompt-cache-bytes", "-1"], "--prompt-cache-bytes: '-1'"),
        (["--chat-template-args", "{"], "--chat-template-args is not valid JSON"),
        (["--chat-template-args", '{"tools": []}'], "--chat-template-args: tools cannot be given"),
        (["--eviction", "lru"], "give --memory as well"),
        (["--port", "70000"], "from 0 to 65535"),
        (["--decode-concurrency", "0"], "from 1 to 1024"),
        (["--kv-bits", "4"], "--kv-bits is not available"),
        (["--draft-model", "x"], "MTP head"),
        (["--trust-remote-code"], "never run"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.delenv("STRATA_MLX_API_KEY", raising=False)
    code, error = refused(capsys, "--port", "0", *arguments)
    assert code == 2
    assert message in error


def test_an_address_that_cannot_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, error = refused(capsys, "--port", str(taken.getsockname()[1]))
    assert code == 1
    assert "choose another port" in error
    code, error = refused(capsys, "--host", "no.such.host.invalid", "--allow-anyone")
    assert code == 1
    assert "there is no such address" in error
