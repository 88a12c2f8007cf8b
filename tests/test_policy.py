"""The policy as a value and as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx import Policy, RetentionPolicy, RoutingPolicy, load
from strata_mlx.errors import InputError
from strata_mlx.replay.recording import fingerprint
from strata_mlx.speculation.calibration import Calibration, Curve
from strata_mlx.speculation.economic import EconomicPolicy
from tests.errors import may_refuse, refuses
from tests.tiny import make_checkpoint

ECONOMIC = EconomicPolicy(Calibration((Curve(),)), 0.01, (0.002, 0.004), (0.01, 0.012, 0.014), ((0.9, 0.8),))
FULL = Policy(
    ECONOMIC, "on", 2, "stepwise", RoutingPolicy(moce_bonus=0.5), {"name": "qwen3_next", "sha256": "0" * 64}, {"a": 1}
)
probability = st.floats(0, 1)
policies = st.builds(
    Policy,
    st.one_of(
        st.just(ECONOMIC),
        st.builds(
            RetentionPolicy,
            probability,
            st.none() | st.lists(probability, min_size=1, max_size=8).map(tuple),
            probability,
        ),
    ),
    st.sampled_from(["on", "off", "auto"]),
    st.none() | st.integers(1, 8),
    st.sampled_from(["chained", "stepwise"]),
    st.none() | st.builds(RoutingPolicy, moce_bonus=st.floats(0, 10)),
    st.none() | st.just({"name": "n", "sha256": "s"}),
    st.dictionaries(st.text(), st.integers()),
)


@given(policies)
def test_json_gives_the_same_policy_back(policy: Policy) -> None:
    assert Policy.from_json(policy.to_json()) == policy


def test_the_file_gives_the_same_policy_back(tmp_path: Path) -> None:
    FULL.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == FULL
    assert [file.name for file in tmp_path.iterdir()] == ["policy.json"]


def test_a_person_may_write_the_least() -> None:
    text = '{"format": "strata-mlx policy", "version": 1, "mtp": "on", "retention": {"min_p": 0.5}}'
    assert Policy.from_json(text) == Policy(RetentionPolicy(0.5), "on")


def test_options_are_those_of_generating() -> None:
    assert FULL.options() == {"mtp": True, "retention": ECONOMIC, "max_steps": 2, "drafting": "stepwise"}
    assert Policy(mtp="off").options()["mtp"] is False
    assert Policy().options()["mtp"] == "auto"


@pytest.mark.parametrize(
    ("change", "mention"),
    [
        ({"format": "something else"}, "not a policy"),
        ({"version": 2}, "version 2"),
        ({"version": None}, "version None"),
        ({"mtp": "maybe"}, "mtp"),
        ({"mtp": ["on"]}, "mtp"),
        ({"max_steps": 9}, "max_steps"),
        ({"max_steps": True}, "max_steps"),
        ({"drafting": "at once"}, "drafting"),
        ({"retention": []}, "retention"),
        ({"retention": {"kind": "economic"}}, "economic policy"),
        ({"retention": {"min_p": 2}}, "min_p"),
        ({"routing": {"moce_bonus": -1, "kind": "none"}}, "kind"),
        ({"routing": 3}, "routing policy"),
        ({"model": "mine"}, "model"),
        ({"measured_on": 1}, "measured_on"),
        ({"depth": 3}, "depth"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_with_the_file(change: dict[str, Any], mention: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({**json.loads(FULL.to_json()), **change}))
    with refuses(InputError, path, mention):
        Policy.load(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 10_000, '{"mtp": "on", "mtp": "off"}', "\0"], ids=lambda t: t[:9]
)
def test_what_is_no_policy_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text)
    with refuses(InputError, path):
        Policy.load(path)


@given(st.integers(0, len(FULL.to_json()) - 1), st.characters(codec="utf-8"))
def test_any_edit_is_taken_or_is_one_error(place: int, character: str) -> None:
    text = FULL.to_json()
    with may_refuse():
        Policy.from_json(text[:place] + character + text[place + 1 :])


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with refuses(InputError, tmp_path / "none.json"):
        Policy.load(tmp_path / "none.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with refuses(InputError, tmp_path / "bytes", "UTF-8"):
        Policy.load(tmp_path / "bytes")


def test_it_is_for_its_model_whether_or_not_the_head_is_loaded(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "qwen3_next", "stacked", mtp="stacked")
    other = make_checkpoint(tmp_path / "other", "qwen3_next", "stacked", mtp="stacked", seed=1)
    with_head, plain = load(path, mtp=True)[0], load(path)[0]
    policy = Policy(model=fingerprint(with_head, head=False), measured_on={"device": "a machine of the past"})
    assert policy.check_model(plain) == policy.check_model(with_head)
    assert len(policy.check_model(plain)) == 1
    assert Policy().check_model(plain) == []
    with refuses(InputError, "another model"):
        policy.check_model(load(other)[0])


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(mtp="off"), False),
        (Policy(), True),
        (Policy(mtp="on"), False),
        (Policy(ECONOMIC, "on"), True),
        (Policy(ECONOMIC, "off"), False),
    ],
)
def test_what_depends_on_the_clock_is_known(policy: Policy, expected: bool) -> None:
    assert policy.by_the_clock is expected
