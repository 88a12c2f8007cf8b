"""Retention: the rule on examples and on any input, and the four ways to make a policy."""

import argparse
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import strata_mlx
from benchmarks.retention_decisions import (
    MALFORMED,
    MALFORMED_FLOORS,
    MALFORMED_SCHEDULES,
    PROBABILITIES,
    SCHEDULES,
)
from strata_mlx.errors import InputError
from strata_mlx.speculation.retention import CUMULATIVE_VARIABLE, SCHEDULE_VARIABLE, RetentionPolicy
from tests.errors import refuses
from tests.speculation.retention_properties import PROPERTIES
from tests.strategies import observations, retention_policies

SCHEDULE = (0.1, 0.35, 0.55)


@pytest.mark.parametrize("name", PROPERTIES)
@given(policy=retention_policies(), probs=st.lists(observations, max_size=10))
@example(policy=RetentionPolicy(0.1, None, 0.1 * 0.7 * 0.7), probs=[0.1, 0.7, 0.7, 1.0])
def test_property(name: str, policy: RetentionPolicy, probs: list[float]) -> None:
    PROPERTIES[name](policy, probs)


@pytest.mark.parametrize(
    ("policy", "probs", "chained", "stepwise"),
    [
        (RetentionPolicy(), [0.0, 0.0, 0.0], 3, 3),
        (RetentionPolicy(), [0.5, math.nan, 0.5], 1, 2),
        (RetentionPolicy(), [0.5, math.inf, 2.0], 3, 3),  # the old rule only compares
        (RetentionPolicy(0.35), [0.9, 0.35, 0.34, 0.9], 2, 3),
        (RetentionPolicy(0.35), [0.1], 0, 1),
        (RetentionPolicy(0.35), [], 0, 0),
        (RetentionPolicy(0.35, (0,)), [0.1, 0.0, math.inf], 2, 2),  # opts in
        (RetentionPolicy(0.35, None, 0.25), [0.3, 0.9], 0, 0),  # min_p goes on where there is no schedule
        (RetentionPolicy(0.35, None, 0.25), [0.5, 0.5, 1.0, 0.9], 3, 3),
        (RetentionPolicy(0.35, None, 0.0), [0.1], 0, 1),  # a floor of 0 does not opt in
        (RetentionPolicy(0.0, SCHEDULE), [0.1, 0.35, 0.55, 0.55, 0.54, 0.9], 4, 4),
        (RetentionPolicy(0.0, SCHEDULE, 0.2), [0.5, 0.8, 0.55], 3, 3),
        (RetentionPolicy(0.0, (0.9, 0.1)), [0.9, 0.1, 0.1, 0.05], 3, 3),
        (RetentionPolicy(0.0, (1.0,)), [1.0, 1.0, math.nextafter(1, 0)], 2, 2),
    ],
)
def test_examples(policy: RetentionPolicy, probs: list[float], chained: int, stepwise: int) -> None:
    assert (policy.retain(probs), policy.retain(probs, "stepwise")) == (chained, stepwise)


def test_probabilities_come_in_any_sequence_or_array() -> None:
    policy = RetentionPolicy(0.5)
    for probs in ((0.75, 0.25), iter([0.75, 0.25]), np.array([0.75, 0.25], np.float32), mx.array([0.75, 0.25])):
        assert policy.retain(probs) == 1
    assert policy.retain(mx.array([0.75, 0.25], mx.bfloat16)) == 1
    assert policy.gate().offer(mx.array(0.75)) is True
    assert RetentionPolicy(0.5, (0.5,)).retain([10**400]) == 0


def test_the_product_is_of_doubles() -> None:
    probs = np.full(6, 0.7, np.float32)
    product = math.prod(probs.tolist())
    assert float(np.multiply.reduce(probs)) > product  # in float32 it would pass the floor that it fails here
    assert RetentionPolicy(min_cum_p=math.nextafter(product, 1)).retain(probs) == 5
    assert RetentionPolicy(min_cum_p=product).retain(probs) == 6


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-9, -5e-324, math.nextafter(1, 2), 2, 10**400])
def test_a_floor_that_is_no_probability_is_refused(value: float) -> None:
    with refuses(InputError, "min_p", "from 0 to 1"):
        RetentionPolicy(value)
    with refuses(InputError, "min_cum_p", "from 0 to 1"):
        RetentionPolicy(min_cum_p=value)
    with refuses(InputError, "schedule[1]", "from 0 to 1"):
        RetentionPolicy(schedule=(0.5, value))
    with refuses(InputError, "min_p", "from 0 to 1"):
        RetentionPolicy.from_env(value, {})


@pytest.mark.parametrize("value", ["0.5", None, True, [0.5], 1j])
def test_a_floor_that_is_no_number_is_refused(value: Any) -> None:
    with refuses(InputError, "min_p", "expected a number"):
        RetentionPolicy(value)
    with refuses(InputError, "min_cum_p", "expected a number"):
        RetentionPolicy(min_cum_p=value)
    with refuses(InputError, "schedule[0]", "expected a number"):
        RetentionPolicy(schedule=(value,))


@pytest.mark.parametrize("value", [(), (0.5,) * 9, "0.5", b"1", 0.5, False])
def test_a_schedule_that_is_no_short_sequence_is_refused(value: Any) -> None:
    with refuses(InputError, "schedule"):
        RetentionPolicy(schedule=value)


def test_what_is_no_path_and_no_observation_is_refused() -> None:
    with refuses(InputError, "'host'", "chained, stepwise"):
        RetentionPolicy().retain([0.5], "host")
    with refuses(InputError, "'half'", "expected a number"):
        RetentionPolicy().retain(["half"])  # type: ignore[list-item]
    with refuses(InputError, "None", "expected a number"):
        RetentionPolicy().gate().offer(None)  # type: ignore[arg-type]


def test_a_policy_is_a_value() -> None:
    policy = RetentionPolicy(0, np.array([0.5, 1]), np.float32(0.25))  # type: ignore[arg-type]
    assert policy == RetentionPolicy(0.0, (0.5, 1.0), 0.25)
    assert hash(policy) == hash(RetentionPolicy(0.0, (0.5, 1.0), 0.25))
    assert strata_mlx.RetentionPolicy is RetentionPolicy
    with pytest.raises(AttributeError):
        policy.min_p = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (RetentionPolicy(), "every draft"),
        (RetentionPolicy(0.35), "min_p 0.35"),
        (RetentionPolicy(0.35, (0,)), "schedule 0.0"),
        (RetentionPolicy(min_cum_p=0.25), "cumulative 0.25"),
        (RetentionPolicy(0.35, min_cum_p=0.25), "min_p 0.35 and cumulative 0.25"),
        (RetentionPolicy(0.35, SCHEDULE, 0.2), "schedule 0.1,0.35,0.55 and cumulative 0.2"),
    ],
)
def test_a_policy_prints_what_applies(policy: RetentionPolicy, text: str) -> None:
    assert str(policy) == text


@given(policy=retention_policies())
def test_json_keeps_a_policy(policy: RetentionPolicy) -> None:
    assert RetentionPolicy.from_json(policy.to_json()) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[0.5]", "expected a JSON object"),
        ('{"floor": 0.5}', "unknown floor"),
        ('{"min_p": 0.1, "min_p": 0.2}', "twice"),
        ('{"min_p": NaN}', "min_p is nan"),
        ('{"min_p": null}', "min_p is None"),
        ('{"schedule": []}', "0 probabilities"),
        ('{"schedule": "0.5"}', "schedule is '0.5'"),
        ('{"schedule": {"0.5": 1}}', "schedule"),
        ('{"min_cum_p": 1.5}', "min_cum_p is 1.5"),
    ],
)
def test_json_that_is_no_policy_is_refused(text: str, message: str) -> None:
    with refuses(InputError, message):
        RetentionPolicy.from_json(text)


@pytest.mark.parametrize("text", SCHEDULES)
def test_a_schedule_is_read(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = RetentionPolicy(0.35, SCHEDULES[text])
    assert RetentionPolicy.from_env(0.35, {SCHEDULE_VARIABLE: text}) == expected
    assert parse("--spec-min-p=0.35", f"--spec-min-p-schedule={text}") == expected
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", PROBABILITIES)
def test_a_cumulative_floor_is_read(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = RetentionPolicy(PROBABILITIES[text], None, PROBABILITIES[text])
    assert RetentionPolicy.from_env(PROBABILITIES[text], {CUMULATIVE_VARIABLE: text}) == expected
    assert parse(f"--spec-min-p={text}", f"--spec-min-cum-p={text}") == expected
    assert capsys.readouterr().err == ""


def test_variables_go_together() -> None:
    assert RetentionPolicy.from_env(0.35, {}) == RetentionPolicy(0.35)
    environ = {SCHEDULE_VARIABLE: "0.10,0.35,0.55", CUMULATIVE_VARIABLE: "0.2"}
    assert RetentionPolicy.from_env(environ=environ) == RetentionPolicy(0.0, SCHEDULE, 0.2)


MALFORMED_SETTINGS = [
    *((SCHEDULE_VARIABLE, text, {CUMULATIVE_VARIABLE: "0.2"}) for text in MALFORMED_SCHEDULES),
    *((CUMULATIVE_VARIABLE, text, {SCHEDULE_VARIABLE: "0.1,0.35"}) for text in MALFORMED_FLOORS),
]


@pytest.mark.parametrize(("variable", "text", "other"), MALFORMED_SETTINGS)
def test_a_malformed_variable_rejects_both_in_one_line(
    variable: str, text: str, other: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for environ in ({variable: text}, {variable: text, **other}, {variable: text, next(iter(other)): "x"}):
        assert RetentionPolicy.from_env(0.35, environ) == RetentionPolicy(0.35)
        (line,) = capsys.readouterr().err.splitlines()
        assert variable in line
        assert "min_p alone" in line
        assert len(line) < 400


def parse(*words: str, environ: dict[str, str] | None = None) -> RetentionPolicy:
    parser = argparse.ArgumentParser()
    RetentionPolicy.add_arguments(parser)
    return RetentionPolicy.from_args(parser.parse_args(words), environ or {})


@pytest.mark.parametrize(("flag", "cases"), [("--spec-min-p", MALFORMED), ("--spec-min-cum-p", MALFORMED_FLOORS)])
def test_a_malformed_floor_on_the_command_line_is_an_error(flag: str, cases: list[str]) -> None:
    for text in cases:
        with refuses(InputError, flag):
            parse(f"{flag}={text}")


@pytest.mark.parametrize("text", MALFORMED_SCHEDULES)
def test_a_malformed_schedule_on_the_command_line_is_an_error(text: str) -> None:
    with refuses(InputError, "--spec-min-p-schedule"):
        parse(f"--spec-min-p-schedule={text}")


def test_flags_go_over_variables(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {SCHEDULE_VARIABLE: "0.5", CUMULATIVE_VARIABLE: "0.2"}
    assert parse() == RetentionPolicy()
    assert parse(environ=environ) == RetentionPolicy(0.0, (0.5,), 0.2)
    assert parse("--spec-min-p", "0.35", "--spec-min-cum-p", "0", environ=environ) == RetentionPolicy(0.35, (0.5,))
    assert parse("--spec-min-p-schedule", "0.1, 0.3", environ=environ) == RetentionPolicy(0.0, (0.1, 0.3), 0.2)
    assert capsys.readouterr().err == ""
    bad = {SCHEDULE_VARIABLE: "0.5", CUMULATIVE_VARIABLE: "2"}
    assert parse("--spec-min-p", "0.35", environ=bad) == RetentionPolicy(0.35)
    assert len(capsys.readouterr().err.splitlines()) == 1


def run(script: str, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(strata_mlx.__file__).resolve().parent.parent)
    command = [
        sys.executable,
        *options,
        "-c",
        "import os\nfrom strata_mlx import InputError, RetentionPolicy\n" + script,
    ]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root, **environ}, capture_output=True, text=True, check=True
    )


def test_a_process_reads_its_environment_once() -> None:
    script = f"""
print(RetentionPolicy.from_env(0.3), end="; ")
os.environ["{SCHEDULE_VARIABLE}"] = "0.9"
print(RetentionPolicy.from_env(0.4), end="; ")
del os.environ["{SCHEDULE_VARIABLE}"]
print(RetentionPolicy.from_env(0.5))
"""
    good = run(script, **{SCHEDULE_VARIABLE: "0.1,0.2", CUMULATIVE_VARIABLE: "0.25"})
    assert good.stdout == "; ".join(["schedule 0.1,0.2 and cumulative 0.25"] * 3) + "\n"
    assert good.stderr == ""
    bad = run(script, **{SCHEDULE_VARIABLE: "0.1,,0.2", CUMULATIVE_VARIABLE: "0.25"})
    assert bad.stdout == "min_p 0.3; min_p 0.4; min_p 0.5\n"
    assert len(bad.stderr.splitlines()) == 1


def test_the_checks_do_not_need_asserts_and_the_policy_needs_no_mlx() -> None:
    script = f"""
import sys
refused = 0
for values in ({{"min_p": 2}}, {{"schedule": ()}}, {{"schedule": (0.5,) * 9}}, {{"min_cum_p": "x"}}):
    try:
        RetentionPolicy(**values)
    except InputError:
        refused += 1
bad = RetentionPolicy.from_env(0.35, {{"{SCHEDULE_VARIABLE}": "nan"}})
gated = RetentionPolicy(0, (0.0,))
print(refused, bad, gated.retain([1.0, float("nan")]), gated.retain([1.5]), "mlx" in sys.modules, __debug__)
"""
    ended = run(script, "-O")
    assert ended.stdout == "4 min_p 0.35 1 0 False False\n"
    assert len(ended.stderr.splitlines()) == 1
