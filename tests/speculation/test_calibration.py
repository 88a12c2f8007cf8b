"""The map from confidence to acceptance: its laws for any numbers, its JSON, and what it refuses."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strata_mlx.errors import InputError
from strata_mlx.speculation.calibration import Calibration, Curve
from tests.errors import refuses
from tests.strategies import calibrations, curves, likelihoods, observations

LOGISTIC = Curve(0.5, 1.5, 0.25)
STAIRS = Curve(0.0, 1.0, 0.0, (-1.0, 0.0, 2.0), (0.25, 0.25, 0.75))


def test_examples_by_hand() -> None:
    calibration = Calibration((LOGISTIC, STAIRS))
    assert calibration.acceptance(0, 0.8) == pytest.approx(1 / (1 + math.exp(-0.5) * 0.25**1.5))
    assert calibration.acceptance(0, 0.5, 0.5) == pytest.approx(1 / (1 + math.exp(-0.5) * 2**0.25))
    odds = [math.exp(-5), math.exp(-0.5), 1.0, math.exp(1), math.exp(2), math.exp(5)]
    expected = [0.25, 0.25, 0.25, 0.5, 0.75, 0.75]
    assert [calibration.acceptance(1, x / (1 + x)) for x in odds] == pytest.approx(expected)
    assert calibration.acceptance(7, 0.5) == calibration.acceptance(1, 0.5)  # the last curve goes on
    assert calibration.acceptances([0.8, 0.5]) == [calibration.acceptance(0, 0.8), calibration.acceptance(1, 0.5, 0.8)]


@given(calibration=calibrations(), position=st.integers(0, 9), p=observations, before=observations)
def test_it_is_a_probability_and_what_is_none_is_never_accepted(
    calibration: Calibration, position: int, p: float, before: float
) -> None:
    acceptance = calibration.acceptance(position, p, before)
    assert 0 <= acceptance <= 1
    if not (0 <= p <= 1 and 0 <= before <= 1):
        assert acceptance == 0


@given(curve=curves(), first=st.tuples(likelihoods, likelihoods), second=st.tuples(likelihoods, likelihoods))
@example(curve=STAIRS, first=(0.5, 1.0), second=(math.nextafter(0.5, 1), 1.0))
def test_more_confidence_never_means_less_acceptance(curve: Curve, first: Any, second: Any) -> None:
    low, high = (
        [min(pair) for pair in zip(first, second, strict=True)],
        [max(pair) for pair in zip(first, second, strict=True)],
    )
    calibration = Calibration((curve,))
    assert calibration.acceptance(0, *low) <= calibration.acceptance(0, *high)


@given(calibration=calibrations())
def test_json_gives_the_same_value_back(calibration: Calibration) -> None:
    assert Calibration.from_json(calibration.to_json()) == calibration
    assert hash(Calibration.from_json(calibration.to_json())) == hash(calibration)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", None, True, 10**400])
@pytest.mark.parametrize("name", ["bias", "confidence", "product"])
def test_a_coefficient_must_be_a_finite_number(name: str, value: Any) -> None:
    with refuses(InputError, "calibration", name, "number"):
        replace(LOGISTIC, **{name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidence": -0.1}, "must not be negative"),
        ({"product": -1e-9}, "must not be negative"),
        ({"knots": (0.0,)}, "1 knots need as many values"),
        ({"knots": (0.0, 0.0), "values": (0.1, 0.2)}, "must ascend"),
        ({"knots": (1.0, 0.0), "values": (0.1, 0.2)}, "must ascend"),
        ({"knots": (0.0, 1.0), "values": (0.2, 0.1)}, "must not descend"),
        ({"knots": (0.0, 1.0), "values": (0.2, 1.1)}, "from 0 to 1"),
        ({"knots": (math.nan, 1.0), "values": (0.2, 0.3)}, "knots[0]"),
        ({"knots": "01", "values": (0.2, 0.3)}, "expected a list"),
        ({"knots": 1.0}, "expected a list"),
    ],
)
def test_a_curve_that_would_not_ascend_is_refused(change: dict[str, Any], message: str) -> None:
    with refuses(InputError, "calibration", message):
        replace(LOGISTIC, **change)


@pytest.mark.parametrize("value", [(), (LOGISTIC,) * 9, "curves", {}, None, 1, (1,), ({"slope": 1},)])
def test_what_holds_no_curves_is_refused(value: Any) -> None:
    with refuses(InputError, "calibration"):
        Calibration(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"curves": []}',
        '{"curves": [{}], "more": 1}',
        '{"curves": [{}], "curves": [{}]}',
        '{"curves": [{"bias": NaN}]}',
        '{"curves": [{"bias": 1e999}]}',
        '{"curves": [{"bias": 0, "bias": 1}]}',
        '{"curves": [[1, 2]]}',
        "[" * 100_000,
    ],
)
def test_broken_json_is_refused(text: str) -> None:
    with refuses(InputError, "calibration"):
        Calibration.from_json(text)


def test_json_is_plain_numbers() -> None:
    assert json.loads(Calibration((STAIRS,)).to_json()) == {
        "curves": [{"bias": 0, "confidence": 1, "product": 0, "knots": [-1, 0, 2], "values": [0.25, 0.25, 0.75]}]
    }
