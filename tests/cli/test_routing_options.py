"""Residency-aware routing from the command line: what is on, what it does, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run


@pytest.fixture
def residency(tmp_path: Path) -> Path:
    file = tmp_path / "residency.json"
    file.write_text('{"0": [0, 1], "1": [0, 1]}')
    return file


def report(run: Run, *options: str | Path) -> dict[str, Any]:
    ended = run("generate", "--prompt", "hello", "-m", "12", "--ignore-chat-template", "--json", *options)
    assert ended.code == 0, ended.err
    result: dict[str, Any] = json.loads(ended.out)
    return result


def test_without_a_policy_routing_is_exact_and_says_so(run: Run, tiny: Path) -> None:
    assert report(run, "--model", tiny)["routing"]["mode"] == "exact"
    assert "Routing: exact\n" in run("generate", "--model", tiny, "-m", "1").out


def test_a_bonus_without_a_map_is_exact_and_says_why(run: Run, tiny: Path) -> None:
    assert report(run, "--model", tiny, "--moce-bonus", "2")["text"] == report(run, "--model", tiny)["text"]
    assert "no residency map" in run("generate", "--model", tiny, "-m", "1", "--moce-bonus", "2").out


def test_a_bonus_and_a_map_are_biased_and_change_the_text(run: Run, tiny: Path, residency: Path) -> None:
    biased = report(run, "--model", tiny, "--residency", residency, "--moce-bonus", "20", "--protect", "0")
    assert biased["routing"]["mode"] == "biased"
    assert biased["routing"]["policy"]["moce_bonus"] == 20
    assert biased["text"] != report(run, "--model", tiny)["text"]


def test_a_biased_run_says_its_price(run: Run, tiny: Path, residency: Path) -> None:
    options = ("--residency", residency, "--moce-bonus", "20", "--protect", "0")
    price = report(run, "--model", tiny, *options)["routing"]["price"]
    assert price["rows"] > price["sampled_rows"] > 0
    assert price["changed"] > 0
    assert price["extra_kl"] > 0
    out = run("generate", "--model", tiny, "-m", "12", *options).out
    assert "Routing: " in out.rpartition("==========")[2]
    assert "nats from the router's own" in out
    assert "price" not in report(run, "--model", tiny)["routing"]


def test_the_environment_sets_the_policy_and_flags_go_over_it(
    run: Run, tiny: Path, residency: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_METAL_MOCE_BONUS", "1.5")
    monkeypatch.setenv("STRATA_METAL_MOCE_PROTECT", "2")
    policy = report(run, "--model", tiny, "--residency", residency, "--moce-bonus", "0.5")["routing"]["policy"]
    assert (policy["moce_bonus"], policy["protect"]) == (0.5, 2)


@pytest.mark.parametrize("mtp", ["on", "off"])
def test_a_margin_that_waits_for_drafts_says_so_where_there_are_none(
    run: Run, tiny: Path, residency: Path, mtp: str
) -> None:
    policy = '{"kind": "margin", "margin": 0.02, "sure_margin": 0.1}'
    options = ["--model", str(tiny), "--residency", str(residency), "--route-policy", policy, "--mtp", mtp]
    found = run("generate", *options, "-p", "ab", "-m", "2").out
    assert "Routing: biased, margin (" in found
    assert ("sure_margin does nothing" in found) == (mtp == "off")
    exact = [option for option in options if option not in ("--residency", str(residency))]
    assert "sure_margin does nothing" not in run("generate", *exact, "-p", "ab", "-m", "2").out  # nor does anything


def test_a_policy_comes_from_a_file(run: Run, tiny: Path, residency: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text('{"kind": "cache_prior", "prior_lambda": 2.0, "protect": 0}')
    routing = report(run, "--model", tiny, "--residency", residency, "--route-policy", file)["routing"]
    assert routing["policy"] == {"kind": "cache_prior", "prior_lambda": 2.0, "protect": 0}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--moce-bonus", "nan"), "moce_bonus is nan"),
        (("--moce-bonus", "50"), "not finite in float32"),
        (("--protect", "3"), "picks top_k = 2"),
        (("--protect", "-1"), "at least 0"),
        (("--route-policy", "{"), "not valid JSON"),
        (("--route-policy", "no-such-file"), "not a policy file"),
        (("--residency", "no-such-file"), "cannot be read"),
    ],
)
def test_what_makes_no_policy_is_one_line_and_code_2(run: Run, tiny: Path, options: tuple[str, ...], says: str) -> None:
    ended = run("generate", "--model", tiny, "-m", "1", *options)
    assert ended.code == 2
    assert says in ended.error


def test_a_malformed_variable_is_named(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_METAL_R1_BONUS", "much")
    ended = run("generate", "--model", tiny, "-m", "1")
    assert ended.code == 2
    assert "STRATA_METAL_R1_BONUS='much'" in ended.error
