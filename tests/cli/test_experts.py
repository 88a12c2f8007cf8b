"""--memory and the options for experts that stay on disk, on the command line."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strata_mlx import engine
from strata_mlx.experts import options
from strata_mlx.experts.streaming import Streaming
from tests.budgets import count_a_small_process, memory_for
from tests.cli.conftest import Run
from tests.tiny import make_checkpoint

PROMPT = ("-p", "abcdefghij", "--ignore-chat-template", "-m", "6")
CONTEXT = 16


@pytest.fixture(autouse=True)
def small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    count_a_small_process(monkeypatch)
    monkeypatch.setattr(options, "system_sources", list)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "experts", num_experts=16, mtp="separate")


@pytest.fixture
def record(run: Run, model: Path) -> Any:
    def record(*arguments: str | Path) -> dict[str, Any]:
        ended = run("generate", "--model", model, *PROMPT, "--json", *arguments)
        assert (ended.code, ended.err) == (0, "")
        result = json.loads(ended.out)
        assert isinstance(result, dict)
        return result

    return record


def memory(model: Path, slots: int) -> str:
    return str(memory_for(model, slots, mtp=True, context=CONTEXT))


def test_a_budget_gives_the_same_text_and_says_what_it_cost(record: Any, model: Path) -> None:
    plain = record()
    within = record("--memory", memory(model, 5))
    assert within["text"] == plain["text"]
    assert plain["memory"] is plain["experts"] is None
    fit, experts = within["memory"], within["experts"]
    assert (fit["slots"], fit["experts"], fit["moe_layers"], fit["streams"]) == (5, 16, 3, True)
    assert sum(fit["bytes"].values()) <= fit["budget"] == int(memory(model, 5))
    assert (experts["mode"], experts["slots"]) == ("exact", 5)
    assert experts["misses"] > 0
    assert experts["bytes"] == experts["misses"] * experts["slot_bytes"] // (5 * 3)
    assert experts["miss_rate"] == experts["misses"] / (experts["hits"] + experts["misses"])
    for name in ("read_seconds", "stall_seconds"):
        assert experts[name] >= 0


def test_the_lines_for_people_say_the_same(run: Run, model: Path) -> None:
    ended = run("generate", "--model", model, *PROMPT, "--memory", memory(model, 5))
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[1].startswith("Memory: ")
    assert "of process memory: 31% of 16 x 3 experts in memory" in lines[1] or "GPU memory" in lines[1]
    assert lines[-1].startswith("Experts: 31% of 16 x 3 in memory (")
    assert lines[-1].endswith("; exact")
    for part in (" hits, ", " misses (", " read in ", "stalled "):
        assert part in lines[-1]


def test_when_all_fits_nothing_streams_and_it_is_said(run: Run, model: Path, record: Any, tmp_path: Path) -> None:
    ended = run("generate", "--model", model, *PROMPT, "--memory", "1GB", "--eviction", "frequency")
    assert "all 16 x 3 experts in memory, nothing streams" in ended.out
    assert "--eviction has nothing to do" in ended.out
    assert "Experts:" not in ended.out
    profile = tmp_path / "profile.json"
    within = record("--memory", "1GB", "--expert-profile", profile)
    assert within["experts"] is None
    assert within["memory"]["streams"] is False
    assert not profile.exists()


def test_the_budget_that_a_refusal_names_works(run: Run, record: Any, model: Path) -> None:
    ended = run("generate", "--model", model, *PROMPT, "--memory", "2MB")
    assert ended.code == 2
    named = ended.error.partition("smallest that works is ")[2].partition(" (")[0]
    assert record("--memory", named)["memory"]["slots"] >= 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--memory", "12 elephants"), "elephants"),
        (("--memory", "-1"), "memory"),
        (("--memory", ""), "memory ''"),
        (("--memory", "1KB"), "too small"),
        (("--memory", "1GB", "--io-threads", "0"), "--io-threads"),
        (("--eviction", "lru"), "--eviction is for experts that stay on disk: give --memory"),
        (("--pin", "x"), "--pin is for experts"),
        (("--expert-profile", "x"), "--expert-profile is for experts"),
        (("--io-threads", "2"), "--io-threads is for experts"),
        (("--context", "2"), "--context is for experts"),
        (("--memory", "1GB", "--pin", "/nowhere.json"), "--pin /nowhere.json"),
        (("--memory", "1GB", "--expert-profile", "/nowhere/x"), "--expert-profile /nowhere/x"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "cache_prompt"])
def test_a_wrong_option_is_one_line_and_code_2(
    run: Run, model: Path, tmp_path: Path, command: str, arguments: tuple[str, ...], says: str
) -> None:
    more = ("--prompt-cache-file", tmp_path / "c.safetensors") if command == "cache_prompt" else ()
    ended = run(command, "--model", model, "-p", "abc", *more, *arguments)
    assert ended.code == 2
    assert says in ended.error
    assert not (tmp_path / "c.safetensors").exists()


def test_an_unknown_policy_is_named(run: Run, model: Path) -> None:
    ended = run("generate", "--model", model, *PROMPT, "--memory", memory(model, 5), "--eviction", "random")
    assert ended.code == 2
    assert "'random'" in ended.error
    assert "lru" in ended.error


def test_a_profile_warms_the_next_run(record: Any, model: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    first = record("--memory", memory(model, 8), "--expert-profile", profile)
    second = record("--memory", memory(model, 8), "--expert-profile", profile)
    assert second["text"] == first["text"]
    assert second["experts"]["misses"] < first["experts"]["misses"]


def test_a_profile_is_saved_when_ctrl_c_ends_the_text(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, profile = engine.stream_generate, tmp_path / "profile.json"

    def interrupted(*args: Any, **given: Any) -> Any:
        for response in stream(*args, **given):
            yield response
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine, "stream_generate", interrupted)
    ended = run("generate", "--model", model, *PROMPT, "--memory", memory(model, 5), "--expert-profile", profile)
    assert (ended.code, ended.err) == (130, "")
    assert sum(json.loads(profile.read_text())["layers"]["0"]["counts"]) > 0


def test_ctrl_c_while_experts_are_read_at_the_start_ends_quietly(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "profile.json"
    arguments = ("generate", "--model", model, *PROMPT, "--memory", memory(model, 5), "--expert-profile", profile)
    run(*arguments)
    before = profile.read_text()
    monkeypatch.setattr(Streaming, "warm", lambda *_: signal.raise_signal(signal.SIGINT))
    ended = run(*arguments)
    assert (ended.code, ended.out, ended.err) == (130, "", "")
    assert profile.read_text() == before


def test_ctrl_c_while_weights_are_read_ends_quietly(model: Path) -> None:
    """In a process of its own, whose end shows whether anything is left behind."""
    code = (
        "import signal, sys\n"
        "from strata_mlx import loading\n"
        "from strata_mlx.cli import main\n"
        "load = loading.evaluate\n"
        "def interrupted(*args):\n"
        "    load(*args)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "loading.evaluate = interrupted\n"
        "main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", code, "generate", "--model", str(model), "--memory", "10GB"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_prompt_cache_can_be_made_and_used_within_a_budget(
    run: Run, record: Any, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "c.safetensors"
    arguments = ("cache_prompt", "--model", model, "-p", "x" * 40, "--prompt-cache-file", file)
    assert run(*arguments).code == 0
    plain = record("--prompt-cache-file", file)["text"]
    ended = run(*arguments, "--memory", str(memory_for(model, 5, context=60)))
    assert (ended.code, ended.err) == (0, "")
    need = str(memory_for(model, 5, mtp=True, context=80))
    assert record("--prompt-cache-file", file, "--memory", need)["text"] == plain


def test_inspect_says_what_a_budget_would_give(run: Run, model: Path) -> None:
    size = memory_for(model, 5, mtp=True, context=512)
    arguments = ("inspect", "--model", model, "--memory", str(size), "--context", "512")
    budget = json.loads(run(*arguments, "--json").out)["budget"]
    assert (budget["slots"], budget["budget"], budget["streams"]) == (5, size, True)
    assert budget["smallest"] < size < budget["everything"]
    ended = run(*arguments)
    assert (ended.code, ended.err) == (0, "")
    assert "31% of 16 x 3 experts in memory" in ended.out
    assert "all experts are in memory" in ended.out
    assert "budget" not in json.loads(run("inspect", "--model", model, "--json").out)
    assert run("inspect", "--model", model, "--memory", "1MB").code == 2
