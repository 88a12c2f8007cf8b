"""strata_mlx generate --policy FILE."""

import json
from pathlib import Path
from typing import Any

import pytest

from strata_mlx import Policy, RetentionPolicy, RoutingPolicy, load
from strata_mlx.replay.costs import measured_on
from strata_mlx.replay.recording import fingerprint
from tests.cli.conftest import Run
from tests.test_policy import ECONOMIC
from tests.tiny import make_checkpoint

COMMAND = ("generate", "-p", "abc", "-m", "20", "--ignore-chat-template", "--json")


def generated(run: Run, model: Path, *arguments: str | Path, warns: bool = False) -> dict[str, Any]:
    ended = run(*COMMAND, "--model", model, *arguments)
    assert ended.code == 0, ended.err
    assert bool(ended.err) == warns, ended.err
    result: dict[str, Any] = json.loads(ended.out)
    return result


def saved(policy: Policy, folder: Path) -> Path:
    policy.save(folder / "policy.json")
    return folder / "policy.json"


@pytest.mark.parametrize(
    "policy",
    [Policy(ECONOMIC, "on", 2), Policy(RetentionPolicy(0.01), "on", 4, "stepwise"), Policy(mtp="off")],
    ids=str,
)
def test_the_text_is_the_same_by_any_policy(run: Run, tiny: Path, tmp_path: Path, policy: Policy) -> None:
    made = generated(run, tiny, "--policy", saved(policy, tmp_path))
    assert made["text"] == generated(run, tiny, "--no-mtp")["text"]
    assert (made["mtp"] is None) == (policy.mtp == "off")


def test_every_option_goes_before_the_file(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = saved(Policy(RetentionPolicy(1.0), "on", 2, routing=RoutingPolicy(moce_bonus=1.0)), tmp_path)
    made = generated(run, tiny, "--policy", file)
    assert made["mtp"]["drafted"] > 0 == made["mtp"]["retained"]
    assert made["routing"]["policy"]["moce_bonus"] == 1.0
    assert generated(run, tiny, "--policy", file, "--spec-min-p", "0")["mtp"]["retained"] > 0
    assert generated(run, tiny, "--policy", file, "--no-mtp")["mtp"] is None
    one = generated(run, tiny, "--policy", file, "--mtp-max-steps", "1")["mtp"]
    assert one["drafted"] <= one["drafting_rounds"]
    assert generated(run, tiny, "--policy", file, "--moce-bonus", "0.5")["routing"]["policy"]["moce_bonus"] == 0.5


def test_it_is_printed(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = saved(Policy(RetentionPolicy(0.25), "on", 3), tmp_path)
    shown = run(*COMMAND[:-1], "--model", tiny, "--policy", file).out
    assert f"Policy: {file}: min_p 0.25, up to 3 drafts, chained" in shown
    assert "plain decoding" in run(*COMMAND[:-1], "--model", tiny, "--policy", saved(Policy(mtp="off"), tmp_path)).out


@pytest.mark.parametrize("arguments", [("--kv-bits", "4", "--kv-group-size", "32"), ("--max-kv-size", "64")], ids=str)
def test_caches_that_cannot_be_rolled_back_do_without_drafts(
    run: Run, tiny: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    file = saved(Policy(RetentionPolicy(), "on"), tmp_path)
    assert generated(run, tiny, "--policy", file, *arguments)["mtp"] is None


def test_a_seed_repeats_a_sampled_text(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = saved(Policy(ECONOMIC, "on", 2), tmp_path)
    texts = [generated(run, tiny, "--policy", file, "--temp", "1.2", "--seed", "4") for _ in range(2)]
    assert texts[0]["text"] == texts[1]["text"]
    assert texts[0]["mtp"] is None


def test_another_machine_is_a_warning_and_another_model_an_error(run: Run, tiny: Path, tmp_path: Path) -> None:
    model = load(tiny)[0]
    here, name = measured_on(model), fingerprint(model, head=False)
    generated(run, tiny, "--policy", saved(Policy(model=name, measured_on=here), tmp_path))
    elsewhere = saved(Policy(model=name, measured_on={**here, "machine": "the one next door"}), tmp_path)
    ended = run(*COMMAND, "--model", tiny, "--policy", elsewhere)
    assert ended.code == 0
    assert "the one next door" in ended.err
    assert len(ended.err.splitlines()) == 1
    other = make_checkpoint(tmp_path / "other", "qwen3_next", "stacked", mtp="stacked", seed=1)
    ended = run(*COMMAND, "--model", other, "--policy", elsewhere)
    assert ended.code == 2
    assert "another model" in ended.error
    assert str(elsewhere) in ended.error


def test_a_broken_file_is_one_error(run: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    for text, mention in (("{", "JSON"), ("{}", "not a policy"), (Policy().to_json().replace("1", "7", 1), "version")):
        file.write_text(text)
        ended = run(*COMMAND, "--model", tiny, "--policy", file)
        assert ended.code == 2
        assert mention in ended.error
        assert str(file) in ended.error
