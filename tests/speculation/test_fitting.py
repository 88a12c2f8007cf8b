"""Fitting the calibration: to streams whose truth is known, to little data, and measures of how good it is."""

import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_mlx.errors import InputError
from strata_mlx.speculation import fitting
from strata_mlx.speculation.calibration import Calibration, Curve
from strata_mlx.speculation.fitting import KINDS, Bin, Trials, brier, calibration_error, fit, reliability, trials
from tests.errors import refuses

needs_scikit_learn = pytest.mark.skipif(find_spec("sklearn") is None, reason="fitting needs the extra tune")
TRUTH = Calibration((Curve(1.5, 1.5), Curve(1.5, 1.0, 0.5), Curve(1.5, 0.75, 0.5)))


def stream(truth: Calibration, documents: int = 8, positions: int = 800, seed: int = 0) -> Trials:
    """Chains whose drafts are accepted as ``truth`` says."""
    rng = np.random.default_rng(seed)
    p = rng.beta(2, 1, (documents, positions, len(truth.curves)))
    chances = np.array([[truth.acceptances(chain) for chain in document] for document in p.tolist()])
    return trials(list(p), list(rng.random(p.shape) < chances))


@needs_scikit_learn
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_fitted_is_calibrated_on_other_documents(kind: str) -> None:
    fitted, _ = fit(stream(TRUTH), kind)
    other = stream(TRUTH, seed=1)
    for position in range(3):
        data = other.where(other.position == position)
        raw = calibration_error(reliability(data.p, data.accepted))
        error = calibration_error(reliability(data.predicted(fitted), data.accepted))
        assert error <= 0.03 < raw


@needs_scikit_learn
def test_the_truth_is_found_where_it_is_of_the_family() -> None:
    fitted, scores = fit(stream(TRUTH, positions=2000))
    assert set(scores) == set(KINDS)
    for position in range(3):
        for p in (0.4, 0.6, 0.9):
            assert fitted.acceptance(position, p, 0.5) == pytest.approx(TRUTH.acceptance(position, p, 0.5), abs=0.08)


@needs_scikit_learn
def test_cross_validation_prefers_stairs_to_a_line_that_cannot_follow() -> None:
    steps = Calibration((Curve(0, 1, 0, (-0.01, 0.01, 2.0, 2.01), (0.1, 0.5, 0.5, 0.98)),))
    fitted, scores = fit(stream(steps, positions=1500))
    assert scores["isotonic"] < scores["logistic"]
    assert fitted.curves[0].knots


@needs_scikit_learn
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 40), kind=st.sampled_from(KINDS))
def test_any_data_give_a_map_that_ascends(seed: int, count: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    p = rng.choice([0.0, 0.3, 0.9, 1.0], (2, count, 3))
    data = trials(list(p), list(rng.random(p.shape) < rng.random()))
    if len(data.p):
        fitted, _ = fit(data, kind)
        values = [fitted.acceptance(0, x) for x in np.linspace(0, 1, 41).tolist()]
        assert values == sorted(values)
        assert 0 <= values[0] <= values[-1] <= 1


@needs_scikit_learn
def test_a_position_with_few_trials_follows_the_others() -> None:
    data = stream(TRUTH)
    rare = np.flatnonzero(data.position == 2)[:2]
    few = data.where((data.position < 2) | np.isin(np.arange(len(data.p)), rare))
    fitted, _ = fit(few, "logistic")
    assert fitted.acceptance(2, 0.7, 0.6) == pytest.approx(fitted.acceptance(1, 0.7, 0.6), abs=0.15)


def test_trials_are_drafts_after_accepted_ones_within_the_text() -> None:
    p = np.array([[0.9, 0.8], [0.7, 0.6], [0.5, 0.4]])
    agree = np.array([[True, False], [False, True], [True, True]])
    data = trials([p, p[:1]], [agree, agree[:1]])
    assert data.document.tolist() == [0, 0, 0, 0, 1]
    assert data.position.tolist() == [0, 1, 0, 0, 0]  # the last position of a text has one draft that lies in it
    assert data.p.tolist() == [0.9, 0.8, 0.7, 0.5, 0.9]
    assert data.before.tolist() == [1, 0.9, 1, 1, 1]
    assert data.accepted.tolist() == [True, False, False, True, True]


def test_measures_by_hand() -> None:
    predicted, accepted = np.array([0.2, 0.9, 0.2, 0.7]), np.array([False, True, True, True])
    assert brier(predicted, accepted) == pytest.approx((0.04 + 0.01 + 0.64 + 0.09) / 4)
    bins = reliability(predicted, accepted, most=2, fewest=1)
    assert np.array(bins) == pytest.approx(np.array([Bin(2, 0.2, 0.5), Bin(2, 0.8, 1.0)]))
    assert calibration_error(bins) == pytest.approx(0.25)
    assert len(reliability(predicted, accepted)) == 1  # too few for more


@given(seed=st.integers(0, 2**32 - 1))
def test_the_error_of_a_perfect_map_is_small(seed: int) -> None:
    rng = np.random.default_rng(seed)
    predicted = rng.beta(2, 1, 20_000)
    assert calibration_error(reliability(predicted, rng.random(20_000) < predicted)) < 0.02


def test_there_must_be_something_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = trials([np.zeros((0, 3))], [np.zeros((0, 3), bool)])
    with refuses(InputError, "nothing to fit"):
        fit(nothing)
    data = stream(TRUTH, 2, 20)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with refuses(InputError, "scikit-learn", "strata-mlx[tune]"):
        fit(data)


@needs_scikit_learn
def test_another_kind_is_refused() -> None:
    with refuses(InputError, "'linear'", "logistic, isotonic"):
        fit(stream(TRUTH, 2, 20), "linear")


MUTANTS: dict[str, Any] = {
    "one curve for all": ("_SPREAD", 1e-3),
    "nothing but pseudo-observations": ("_PSEUDO", 1e9),
}


@needs_scikit_learn
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_worse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the data where what they break is needed."""
    steps = Calibration((Curve(0, 1, 0, (-0.01, 0.01, 2.0, 2.01), (0.1, 0.5, 0.5, 0.98)), Curve(0.5, 0.5)))
    data, other = stream(steps, 2, 800), stream(steps, 4, 2000, seed=1)
    kind = "isotonic" if "pseudo" in name else "logistic"
    judged = other.where(other.position == (1 if kind == "logistic" else 0))
    right = brier(judged.predicted(fit(data, kind)[0]), judged.accepted)
    attribute, value = MUTANTS[name]
    monkeypatch.setattr(fitting, attribute, value)
    assert brier(judged.predicted(fit(data, kind)[0]), judged.accepted) > right
