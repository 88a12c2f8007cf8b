"""strata_mlx tune, on a tiny model: what it writes is what it says, and generate takes it."""

import importlib.util
import json
from pathlib import Path

import pytest

from strata_mlx import Policy, RoutingPolicy, load
from strata_mlx.cli.tune import recommendation
from strata_mlx.replay.recording import Header, Recording, fingerprint
from tests.cli.conftest import Run
from tests.tiny import make_checkpoint

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

QUICK = ("--documents", "4", "--tokens", "16", "--prompt-tokens", "8", "--probes", "16")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"{number} times seven is {7 * number}, and that is that." * 3)
    return folder


def test_it_writes_a_policy_and_a_report_and_says_what_pays(run: Run, tiny: Path, texts: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("policy.json", "report.html", "recording.npz")}
    options = (
        "--output",
        files["policy.json"],
        "--report",
        files["report.html"],
        "--recording",
        files["recording.npz"],
    )
    ended = run("tune", "--model", tiny, "--data", texts, *QUICK, *options, "--json")
    assert (ended.code, ended.err) == (0, "")
    result = json.loads(ended.out)
    kinds = [row["kind"] for row in result["rows"]]
    assert sorted(kinds) == sorted(
        ("plain", "flat", "schedule", "cumulative", "composed", "economic", "default", "oracle")
    )
    assert result["fit"]["documents"] == result["held_out"]["documents"] == 2
    assert Recording.load(files["recording.npz"]).positions == sum(
        result[half]["positions"] for half in ("fit", "held_out")
    )
    policy = Policy.load(files["policy.json"])
    assert json.loads(policy.to_json()) == result["policy"]
    assert policy.mtp == ("on" if result["chosen"]["pays"] else "off")
    assert policy.routing is None
    assert result["recommendation"] in files["report.html"].read_text()
    assert policy.check_model(load(tiny)[0]) == []
    written = run("generate", "--model", tiny, "-p", "abc", "-m", "8", "--policy", files["policy.json"], "--json")
    assert (written.code, written.err) == (0, "")
    # Once recorded, it need not be again; and with slots, and a routing policy to price.
    again = run(
        "tune", "--model", tiny, "--data", texts, *QUICK, *options, "--slots", "4", "--storage", "0.5",
        "--route-policy", '{"moce_bonus": 0.5}',
    )  # fmt: skip
    assert (again.code, again.err) == (0, "")
    assert "Written: " in again.out
    policy = Policy.load(files["policy.json"])
    assert policy.routing == RoutingPolicy(moce_bonus=0.5)
    assert policy.measured_on["storage"] == "0.5 GB/s"
    assert policy.measured_on["slots_of_model"] == 4
    assert 'id="price"' in files["report.html"].read_text()


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (("--memory", "1GB", "--slots", "4"), "--memory and --slots"),
        (("--storage", "2"), "--storage"),
        (("--eviction", "lru"), "--eviction"),
        (("--slots", "4", "--eviction", "random"), "random"),
        (("--output", "no/such/folder/policy.json"), "--output"),
        (("--report", "/"), "--report"),
        (("--data", "no-such-file"), "no-such-file"),
        (("--evaluation", "no-such-file"), "--evaluation"),
        (("--evaluation", "x", "--route-policy", "{}"), "--evaluation and --route-policy"),
        (("--route-policy", "no-such-file"), "--route-policy"),
        (("--tokens", "2"), "--tokens"),
    ],
    ids=str,
)
def test_mistakes_are_found_at_once(run: Run, tiny: Path, arguments: tuple[str, ...], mention: str) -> None:
    ended = run("tune", "--model", tiny, *arguments)
    assert ended.code == 2
    assert mention in ended.error


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', '{"rows": [{"name": "exact"}]}'])
def test_a_broken_evaluation_is_named(run: Run, tiny: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "evaluation.json"
    file.write_text(text)
    ended = run("tune", "--model", tiny, "--evaluation", file)
    assert ended.code == 2
    assert str(file) in ended.error


def test_too_little_text_is_refused(run: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("only one document of text")
    ended = run("tune", "--model", tiny, "--data", tmp_path / "one.txt", *QUICK)
    assert ended.code == 2
    assert "1 documents" in ended.error


def test_a_recording_of_another_model_is_refused(run: Run, tiny: Path, texts: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "qwen3_next", "stacked", mtp="stacked", seed=1)
    file = tmp_path / "recording.npz"
    Recording(_header(other), ()).save(file)
    ended = run("tune", "--model", tiny, "--data", texts, *QUICK, "--recording", file)
    assert ended.code == 2
    assert "another model" in ended.error


def _header(path: Path) -> Header:
    return Header(fingerprint(load(path, mtp=True)[0]), 7, 2, 8, (0, 1), (2,), "cpu", "float32", {})


def test_a_missing_extra_is_named_before_anything_is_loaded(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    ended = run("tune", "--model", tiny)
    assert ended.code == 2
    assert "strata-mlx[tune]" in ended.error


def test_it_says_plainly_where_nothing_pays() -> None:
    row = {"kind": "flat", "tokens_per_s": 90.0, "speedup": 0.9, "speedup_interval": [0.8, 1.0], "drafted_per_token": 1}
    assert recommendation(row, pays=False).startswith("Nothing beats plain decoding here")
    assert "0.90 times" in recommendation(row, pays=False)
    assert recommendation({**row, "kind": "plain"}, pays=False).startswith("Nothing beats plain decoding here")
    assert recommendation({**row, "speedup": 1.2}, pays=True).startswith("Use the flat policy")
    assert "as the economic policy would" in recommendation({**row, "kind": "economic", "drafted_per_token": 0}, False)
