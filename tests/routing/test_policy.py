"""Policies: their tables, their domain, and the three ways to make one."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from strata_mlx.errors import InputError
from strata_mlx.routing import RoutingPolicy
from tests.errors import refuses
from tests.strategies import additive_policies, policies

B, R = np.float32(math.exp(0.85)), np.float32(math.exp(0.4))


@pytest.mark.parametrize(
    ("policy", "head", "draft"),
    [
        (RoutingPolicy(), [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
        (RoutingPolicy(0.85), [1, B, B, B, B], [1, B, B, B, B]),
        (RoutingPolicy(0.85, protect=0), [1, B, B, B, B], [1, B, B, B, B]),
        (RoutingPolicy(0.85, 0.4, protect=3), [1, R, R, B, B], [1, R, R, B, B]),
        (RoutingPolicy(0.85, 0.4, protect=1), [1, B, B, B, B], [1, B, B, B, B]),
        (
            RoutingPolicy(0.85, 0.4, protect=3, draft_moce=True),
            [1, R, R, B, B],
            [1, B * B, B * B, B * B, B * B],
        ),
        (RoutingPolicy(0.85, -1.0, protect=3), [1, 1, 1, B, B], [1, 1, 1, B, B]),
        (RoutingPolicy(0.85, 0.4, protect=5), [1, R, R, R, R], [1, R, R, R, R]),
        (RoutingPolicy(0.0, 0.4, protect=3), [1, R, R, R, R], [1, R, R, R, R]),  # the tail keeps r
        (RoutingPolicy(-1.0, 0.4, protect=2, draft_moce=True), [1, R, R, R, R], [1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_the_tables_say_the_rule(policy: RoutingPolicy, head: list[float], draft: list[float]) -> None:
    tables = policy.tables(5)
    assert tables.dtype == np.float32
    assert tables.shape == (2, 2, 5)
    assert (tables[:, 0] == np.array([head, draft], np.float32)).all()
    assert (tables[:, 1] == np.float32(1) / tables[:, 0]).all()


@given(policy=policies())
def test_every_inverse_is_normal_and_recovers(policy: RoutingPolicy) -> None:
    factors, inverses = policy.tables(16).transpose(1, 0, 2).astype(np.float64)
    assert (inverses >= np.finfo(np.float32).tiny).all()
    assert np.abs(factors * inverses - 1).max() <= 2.0**-23
    assert policy.active == bool((factors != 1).any())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moce_bonus": math.nan}, "moce_bonus is nan"),
        ({"moce_bonus": math.inf}, "moce_bonus is inf"),
        ({"r1_bonus": -math.inf}, "r1_bonus is -inf"),
        ({"moce_bonus": 10**400}, "moce_bonus is inf"),
        ({"moce_bonus": "0.85"}, "moce_bonus is '0.85'"),
        ({"moce_bonus": True}, "moce_bonus is True"),
        ({"moce_bonus": 89.0}, "b = exp"),
        ({"moce_bonus": 45.0}, r"b \* b"),
        ({"moce_bonus": 44.0}, "inverse"),
        ({"r1_bonus": 89.0}, "r = exp"),
        ({"r1_bonus": 88.0}, "inverse"),
        ({"moce_bonus": 40.0, "r1_bonus": -60.0}, "b / r"),
        ({"r1_bonus": -200.0, "moce_bonus": -200.0}, "b / r"),
        ({"protect": -1}, "protect is -1"),
        ({"protect": 1.0}, "protect is 1.0"),
        ({"protect": True}, "protect is True"),
        ({"protect": None}, "protect is None"),
        ({"draft_moce": 1}, "draft_moce is 1"),
        ({"kind": "best"}, "kind is 'best'"),
        ({"kind": "cache_prior", "prior_lambda": -0.1}, "prior_lambda is -0.1"),
        ({"kind": "cache_prior", "prior_lambda": math.nan}, "prior_lambda is nan"),
        ({"kind": "mass", "mass": 1.1}, "mass is 1.1"),
        ({"kind": "margin", "margin": -0.1}, "margin is -0.1"),
        ({"kind": "margin", "sure_margin": 1.5}, "sure_margin is 1.5"),
        ({"kind": "margin", "sure_margin": math.nan}, "sure_margin is nan"),
        ({"kind": "margin", "sure_margin": "1"}, "sure_margin is '1'"),
        ({"sure_margin": 0.0}, "sure_margin belongs to kind 'margin'"),
        ({"margin": 0.1}, "margin belongs to kind 'margin'"),
        ({"kind": "max_rank", "max_rank": 0}, "max_rank is 0"),
        ({"kind": "max_rank", "max_rank": 2.5}, "max_rank is 2.5"),
        ({"kind": "mass", "moce_bonus": 1.0}, "moce_bonus belongs to kind 'moce'"),
        ({"mass": 0.5}, "mass belongs to kind 'mass'"),
    ],
)
def test_a_value_outside_its_domain_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RoutingPolicy(**values)


def test_what_only_top_k_can_tell_is_refused_with_it() -> None:
    with pytest.raises(InputError, match=r"protect is 11.*top_k = 10"):
        RoutingPolicy(protect=11).tables(10)
    with pytest.raises(InputError, match=r"max_rank is 9.*top_k = 10"):
        RoutingPolicy(kind="max_rank", max_rank=9).check_top_k(10)
    with pytest.raises(InputError, match="top_k is 0"):
        RoutingPolicy().tables(0)
    with pytest.raises(InputError, match="no table"):
        RoutingPolicy(kind="mass", mass=0.5).tables(10)


@given(policy=policies() | additive_policies())
def test_json_keeps_a_policy(policy: RoutingPolicy) -> None:
    assert RoutingPolicy.from_json(policy.to_json()) == policy
    assert str(policy).startswith(policy.kind if policy.active else "exact")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"bonus": 1}', "unknown bonus"),
        ('{"protect": 1, "protect": 2}', "twice"),
        ('{"moce_bonus": NaN}', "moce_bonus is nan"),
        ('{"moce_bonus": "1"}', "moce_bonus is '1'"),
        ('{"kind": ["moce"]}', "kind is"),
    ],
)
def test_json_that_is_no_policy_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        RoutingPolicy.from_json(text)


ENVIRONMENT = {
    "STRATA_METAL_MOCE_BONUS": "0.85",
    "STRATA_METAL_R1_BONUS": "0.4",
    "STRATA_METAL_MOCE_PROTECT": "3",
    "STRATA_METAL_DRAFT_MOCE": "1",
}
FULL = RoutingPolicy(0.85, 0.4, 3, True)


def test_the_environment_makes_a_policy() -> None:
    assert RoutingPolicy.from_env({}) == RoutingPolicy()
    assert RoutingPolicy.from_env(ENVIRONMENT) == FULL
    assert RoutingPolicy.from_env({**ENVIRONMENT, "STRATA_METAL_DRAFT_MOCE": "off"}).draft_moce is False


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("STRATA_METAL_MOCE_BONUS", "much"),
        ("STRATA_METAL_MOCE_BONUS", ""),
        ("STRATA_METAL_MOCE_BONUS", "nan"),
        ("STRATA_METAL_MOCE_BONUS", "400"),
        ("STRATA_METAL_R1_BONUS", "inf"),
        ("STRATA_METAL_MOCE_PROTECT", "1.5"),
        ("STRATA_METAL_MOCE_PROTECT", "-1"),
        ("STRATA_METAL_DRAFT_MOCE", "2"),
    ],
)
def test_a_malformed_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(InputError, match=f"{variable}={value!r}"):
        RoutingPolicy.from_env({variable: value})


def test_variables_that_do_not_go_together_are_named() -> None:
    with pytest.raises(InputError, match=r"STRATA_METAL_MOCE_BONUS, STRATA_METAL_R1_BONUS: .*b / r"):
        RoutingPolicy.from_env({"STRATA_METAL_MOCE_BONUS": "40", "STRATA_METAL_R1_BONUS": "-60"})


def parse(*words: str, environ: dict[str, str] | None = None) -> RoutingPolicy:
    parser = argparse.ArgumentParser()
    RoutingPolicy.add_arguments(parser)
    return RoutingPolicy.from_args(parser.parse_args(words), environ or {})


def test_flags_go_over_the_policy_and_that_over_the_environment(tmp_path: Path) -> None:
    assert parse() == RoutingPolicy()
    assert parse(environ=ENVIRONMENT) == FULL
    assert parse("--moce-bonus", "0.85", "--r1-bonus", "0.4", "--protect", "3", "--draft-moce") == FULL
    assert parse("--no-draft-moce", environ=ENVIRONMENT) == RoutingPolicy(0.85, 0.4, 3)
    assert parse("--route-policy", "moce", environ=ENVIRONMENT) == RoutingPolicy()
    mass = RoutingPolicy(kind="mass", mass=0.5, protect=2)
    assert parse("--route-policy", mass.to_json(), environ=ENVIRONMENT) == mass
    (tmp_path / "policy.json").write_text(json.dumps({"moce_bonus": 1.5}))
    file = str(tmp_path / "policy.json")
    assert parse("--route-policy", file, "--protect", "2") == RoutingPolicy(1.5, protect=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--route-policy", "mass"), "does nothing alone"),
        (("--route-policy", "no/such/file"), "not a policy file"),
        (("--route-policy", '{"kind": "mass", "mass": 2}'), "mass is 2"),
        (("--route-policy", '{"kind": "mass"}', "--moce-bonus", "1"), "moce_bonus belongs"),
        (("--moce-bonus", "nan"), "moce_bonus is nan"),
    ],
)
def test_a_command_line_that_makes_no_policy_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(*words)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ('{"mass": 1}', "mass belongs"), ("[]", "object")]
)
def test_a_file_that_holds_no_policy_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "policy.json"
    file.write_text(text)
    with refuses(InputError, "--route-policy", file, message):
        parse("--route-policy", str(file))
