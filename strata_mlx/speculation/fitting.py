"""Fit the calibration to what was recorded, and judge it on other documents. Fitting needs the extra ``tune``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .calibration import SMALLEST, Calibration, Curve

Floats = NDArray[np.float64]

KINDS = ("logistic", "isotonic")
_SPREAD = 0.5  # standard deviation expected of a position's coefficients around those of all positions
_PSEUDO = 50.0  # observations that the logistic curve counts as, where an isotonic one is fitted
_FOLDS = 5
_LOOSE = 0.01  # of the coefficients that positions share: a ridge that only keeps them finite


class Trials(NamedTuple):
    """Drafts whose predecessors were all accepted, so that their own acceptance is known. All ``[n]``.

    document: which one it is from. position: in the chain. p: confidence. before: the product of those before.
    accepted: the outcome.
    """

    document: NDArray[np.int64]
    position: NDArray[np.int64]
    p: Floats
    before: Floats
    accepted: NDArray[np.bool_]

    def where(self, mask: NDArray[np.bool_]) -> Trials:
        return Trials(self.document[mask], self.position[mask], self.p[mask], self.before[mask], self.accepted[mask])

    def predicted(self, calibration: Calibration) -> Floats:
        """What ``calibration`` says of each."""
        columns = (self.position.tolist(), self.p.tolist(), self.before.tolist())
        return np.array([calibration.acceptance(*trial) for trial in zip(*columns, strict=True)], np.float64)


def trials(confidences: Sequence[NDArray[Any]], agree: Sequence[NDArray[Any]]) -> Trials:
    """Of full chains ``[N, K]``, an array of confidences and one of agreement for each document.

    Drafts beyond the end of a text are no trials.
    """
    parts = []
    for number, (p, same) in enumerate(zip(confidences, agree, strict=True)):
        count, steps = p.shape
        p, same = np.asarray(p, np.float64), np.asarray(same, np.bool_)
        before = np.cumprod(np.concatenate([np.ones((count, 1)), p], axis=1), axis=1)[:, :steps]
        reached = np.cumprod(np.concatenate([np.ones((count, 1), np.bool_), same], axis=1), axis=1)[:, :steps] > 0
        position = np.broadcast_to(np.arange(steps), p.shape)
        inside = np.arange(count)[:, None] + position < count
        parts.append(Trials(np.full(p.shape, number), position, p, before, same).where(reached & inside))
    return Trials(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def fit(data: Trials, kind: str | None = None) -> tuple[Calibration, dict[str, float]]:
    """A calibration, and the Brier score of each kind in cross-validation by document, by which it was chosen.

    A position with few trials has the curve of all positions together. kind: one of KINDS, not to choose.

    Raises:
        InputError: no trials, another kind, or scikit-learn is not installed.
    """
    if not len(data.p):
        raise InputError("calibration: there is nothing to fit: no draft was made with all before it accepted")
    if kind is not None:
        return _fit(data, kind), {}
    scores = {kind: _cross_validated(data, kind) for kind in KINDS}
    return _fit(data, min(scores, key=lambda kind: scores[kind])), scores


def _cross_validated(data: Trials, kind: str) -> float:
    documents = np.unique(data.document)
    folds = min(_FOLDS, len(documents))
    if folds < 2:
        return brier(data.predicted(_fit(data, kind)), data.accepted)
    fold = np.searchsorted(documents, data.document) % folds
    predicted = np.empty(len(data.p))
    for number in range(folds):
        held = fold == number
        predicted[held] = data.where(held).predicted(_fit(data.where(~held), kind))
    return brier(predicted, data.accepted)


def _fit(data: Trials, kind: str) -> Calibration:
    curves = _logistic(data)
    if kind == "logistic":
        return Calibration(curves)
    if kind != "isotonic":
        raise InputError(f"calibration: kind is {kind!r}, expected one of {', '.join(KINDS)}")
    return Calibration(
        tuple(_isotonic(curve, data.where(data.position == position)) for position, curve in enumerate(curves))
    )


def _logistic(data: Trials) -> tuple[Curve, ...]:
    """Logistic regressions of the positions, whose coefficients are drawn to common ones, and slopes not negative."""
    try:
        from scipy.optimize import minimize
    except ImportError:
        raise _missing() from None
    positions = int(data.position.max()) + 1
    p = np.clip(data.p, SMALLEST, 1 - SMALLEST)
    # [n, 3]; at position 0 the last column is 0 throughout, so that its coefficient follows the common one.
    inputs = np.stack([np.ones_like(p), np.log(p / (1 - p)), np.log(np.clip(data.before, SMALLEST, 1))], axis=1)
    sign = np.where(data.accepted, 1.0, -1.0)

    def loss(flat: Floats) -> tuple[float, Floats]:
        common, own = flat[:3], flat[3:].reshape(positions, 3)
        margin = sign * (inputs * own[data.position]).sum(axis=1)
        pull = (own - common) / _SPREAD**2
        slope = -sign * np.exp(-np.logaddexp(0, margin))  # of log(1 + exp(-margin))
        gradient = np.stack([np.bincount(data.position, slope * column, positions) for column in inputs.T], axis=1)
        value = np.logaddexp(0, -margin).sum() + (pull * (own - common)).sum() / 2 + _LOOSE * (common**2).sum() / 2
        return float(value), np.concatenate([_LOOSE * common - pull.sum(axis=0), (gradient + pull).ravel()])

    bounds = [(None, None), (0, None), (0, None)] * (positions + 1)
    start = np.tile([0.0, 1.0, 0.0], positions + 1)
    solution = minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B", options={"maxiter": 1000}).x
    return tuple(Curve(*row) for row in solution[3:].reshape(positions, 3).tolist())


def _isotonic(curve: Curve, data: Trials) -> Curve:
    """The best ascending function of the logistic score, held to the logistic one by pseudo-observations."""
    try:
        from sklearn.isotonic import IsotonicRegression
    except ImportError:
        raise _missing() from None
    scores = np.array([curve.score(*trial) for trial in zip(data.p.tolist(), data.before.tolist(), strict=True)])
    if not len(scores):
        return curve
    anchors = np.unique(np.quantile(scores, np.linspace(0, 1, 25)))
    pulled = np.array([curve(float(score)) for score in anchors])
    weights = np.concatenate([np.ones(len(scores)), np.full(len(anchors), _PSEUDO / len(anchors))])
    fitted = IsotonicRegression(y_min=0, y_max=1).fit(
        np.concatenate([scores, anchors]), np.concatenate([data.accepted, pulled]), weights
    )
    knots, values = fitted.X_thresholds_.tolist(), np.maximum.accumulate(fitted.y_thresholds_).tolist()
    return Curve(curve.bias, curve.confidence, curve.product, tuple(knots), tuple(values))


def _missing() -> InputError:
    return InputError("fitting needs scikit-learn, which is not installed; install strata-mlx[tune]")


# How good predictions are


class Bin(NamedTuple):
    """A point of a reliability diagram: how many trials, their mean prediction, and the share that was accepted."""

    trials: int
    predicted: float
    observed: float


def reliability(predicted: Floats, accepted: NDArray[np.bool_], most: int = 10, fewest: int = 200) -> list[Bin]:
    """Trials by ascending prediction, in up to ``most`` groups of equal size, of at least ``fewest`` where there are
    as many: the scatter of small groups would look like miscalibration. Equal predictions are shuffled, lest groups
    differ by document.
    """
    order = np.lexsort((np.random.default_rng(0).permutation(len(predicted)), predicted))
    groups = np.array_split(order, max(1, min(most, len(order) // fewest)))
    return [Bin(len(g), float(predicted[g].mean()), float(accepted[g].mean())) for g in groups if len(g)]


def calibration_error(bins: Sequence[Bin]) -> float:
    """The expected calibration error (Naeini et al., AAAI 2015): the mean over trials of how far a bin is off."""
    return sum(b.trials * abs(b.predicted - b.observed) for b in bins) / max(sum(b.trials for b in bins), 1)


def brier(predicted: Floats, accepted: NDArray[np.bool_]) -> float:
    """The mean squared error of probabilities (Brier, 1950)."""
    return float(np.mean((predicted - accepted) ** 2))
