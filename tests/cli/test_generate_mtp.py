"""strata_mlx generate with drafts, and inspect --probe-mtp."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.tiny import make_checkpoint

LINE = re.compile(
    r"MTP: (\d+) of (\d+) rounds drafted, (\d+) drafted, (\d+) retained, (\d+) accepted, \d\.\d\d tokens per round"
)
COMMAND = ("generate", "-p", "abc", "-m", "20", "--ignore-chat-template")


def record(run: Run, model: Path, *arguments: str) -> dict[str, Any]:
    ended = run(*COMMAND, "--model", model, "--json", *arguments)
    assert (ended.code, ended.err) == (0, "")
    result: dict[str, Any] = json.loads(ended.out)
    return result


@pytest.mark.parametrize("arguments", [("--mtp",), ("--mtp", "on"), ("--mtp", "--drafting", "stepwise")], ids=str)
def test_text_and_one_summary_line_are_printed(run: Run, tiny: Path, arguments: tuple[str, ...]) -> None:
    ended = run(*COMMAND, "--model", tiny, *arguments)
    last = ended.out.splitlines()[-1]
    match = LINE.fullmatch(last)
    assert match, last
    drafting, rounds, drafted, retained, accepted = map(int, match.groups())
    assert 0 < drafting < rounds <= 20
    assert drafted >= retained >= accepted
    assert LINE.sub("", ended.out).partition("=\n")[2].startswith(record(run, tiny, "--no-mtp")["text"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--mtp",),
        ("--mtp", "--mtp-max-steps", "1"),
        ("--mtp", "--mtp-max-steps", "8", "--drafting", "stepwise", "--spec-min-p", "0.01"),
        ("--mtp", "--spec-min-p-schedule", "0.1,0.01", "--spec-min-cum-p", "0.0001"),
        ("--mtp", "auto"),
        (),
    ],
    ids=str,
)
def test_no_option_changes_the_text(run: Run, tiny: Path, arguments: tuple[str, ...]) -> None:
    plain = record(run, tiny, "--no-mtp")
    drafted = record(run, tiny, *arguments)
    assert plain["mtp"] is None
    assert drafted["text"] == plain["text"]
    assert drafted["mtp"]["rounds"] <= 20
    assert drafted["mtp"]["drafted"] >= drafted["mtp"]["accepted"]


def test_json_says_what_was_drafted(run: Run, tiny: Path) -> None:
    counts = record(run, tiny, "--mtp", "--mtp-max-steps", "2")["mtp"]
    assert counts["retained"] == counts["drafted"] == 2 * counts["drafting_rounds"] - (counts["drafted"] % 2)
    assert counts["tokens"] == counts["accepted"] + counts["drafting_rounds"]
    assert counts["parked"] is False
    assert record(run, tiny, "--mtp", "--spec-min-p", "1")["mtp"]["retained"] == 0


def test_a_seed_repeats_a_sampled_text(run: Run, tiny: Path) -> None:
    for arguments in (("--mtp",), ()):
        options = ("--temp", "1.2", "--seed", "4", *arguments)
        assert record(run, tiny, *options)["text"] == record(run, tiny, *options)["text"]


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (("--mtp", "--max-kv-size", "64"), "max_kv_size"),
        (("--mtp", "--kv-bits", "4"), "kv_bits"),
        (("--mtp", "maybe"), "maybe"),
        (("--mtp-max-steps", "9"), "--mtp-max-steps"),
        (("--drafting", "parallel"), "parallel"),
        (("--spec-min-p", "2"), "--spec-min-p"),
        (("--spec-min-p-schedule", ""), "--spec-min-p-schedule"),
        (("--spec-min-cum-p", "nan"), "--spec-min-cum-p"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_error(run: Run, tiny: Path, arguments: tuple[str, ...], mention: str) -> None:
    ended = run(*COMMAND, "--model", tiny, *arguments)
    assert (ended.code, ended.out.count("Traceback")) == (2, 0)
    assert mention in ended.error


@pytest.mark.parametrize("arguments", [("--max-kv-size", "64"), ("--kv-bits", "4", "--kv-group-size", "32")], ids=str)
def test_auto_does_without_drafts_where_caches_cannot_be_rolled_back(
    run: Run, tiny: Path, arguments: tuple[str, ...]
) -> None:
    assert record(run, tiny, *arguments)["mtp"] is None


def test_a_model_without_a_head_decodes_plainly_unless_drafts_are_asked_for(run: Run, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "headless", "qwen3_next", "stacked")
    assert record(run, model)["mtp"] is None
    ended = run(*COMMAND, "--model", model, "--mtp")
    assert ended.code == 2
    assert "no MTP head" in ended.error


def test_the_probe_says_which_hidden_states_the_head_takes(run: Run, tiny: Path) -> None:
    probe = json.loads(run("inspect", "--model", tiny, "--probe-mtp", "--json").out)["mtp_probe"]
    assert set(probe["acceptance"]) == {"before", "after"}
    assert probe["configured"] == "after"
    assert probe["acceptance"][probe["best"]] == max(probe["acceptance"].values())
    assert f"mtp_hidden should be {probe['best']!r}" in run("inspect", "--model", tiny, "--probe-mtp").out
    assert "mtp_probe" not in json.loads(run("inspect", "--model", tiny, "--json").out)


def test_the_probe_needs_a_head(run: Run, tmp_path: Path) -> None:
    ended = run("inspect", "--model", make_checkpoint(tmp_path / "m", "qwen3_moe"), "--probe-mtp")
    assert ended.code == 2
    assert "no MTP head" in ended.error
