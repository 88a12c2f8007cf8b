"""How far is the draft head's confidence from the share of its drafts that is accepted, as it is and calibrated?

    python benchmarks/calibration.py [--json] [--recording FILE]

Held-out documents are recorded once. Every other one fits the map from chain position, confidence and the product of
the confidences before it to acceptance; the others judge it. A position's trials are the drafts whose predecessors were
all accepted. The error is that of up to ten groups of equal size, of at least 200 trials. ``noise`` is the error that a
perfectly calibrated map would show with as many trials: the mean over outcomes that are drawn by the fitted one.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from strata_mlx import load
from strata_mlx.replay.recording import Recording
from strata_mlx.replay.sweep import halves
from strata_mlx.replay.tuning import trials_of
from strata_mlx.speculation.fitting import Floats, Trials, brier, calibration_error, fit, reliability

LIMIT = 0.03  # that the error of the fitted map must not exceed, at any position
_DRAWS, _RESAMPLES = 200, 1000


def recorded(args: Any) -> Recording:
    """The recording that ``--recording`` names; made where there is none."""
    if args.recording and args.recording.exists():
        return Recording.load(args.recording)
    model, tokenizer = load(args.model, mtp=True)
    recording = heldout.recording(model, tokenizer, args.documents, args.tokens, prompt_tokens=args.prompt_tokens)
    if args.recording:
        recording.save(args.recording)
    return recording


def row(name: int | str, data: Trials, fitted: Floats) -> dict[str, Any]:
    """Errors and scores of the trials of one position, or of all."""
    bins = reliability(fitted, data.accepted)
    rng = np.random.default_rng(0)
    draws = [calibration_error(reliability(fitted, rng.random(len(fitted)) < fitted)) for _ in range(_DRAWS)]
    return {
        "position": name,
        "trials": len(data.p),
        "accepted": float(data.accepted.mean()),
        "ece_raw": calibration_error(reliability(data.p, data.accepted)),
        "ece_fitted": calibration_error(bins),
        "ece_fitted_interval": interval(data, fitted),
        "noise": float(np.mean(draws)),
        "brier_raw": brier(data.p, data.accepted),
        "brier_fitted": brier(fitted, data.accepted),
        "reliability_raw": [b._asdict() for b in reliability(data.p, data.accepted)],
        "reliability_fitted": [b._asdict() for b in bins],
    }


def interval(data: Trials, fitted: Floats) -> list[float]:
    """Of the error of the fitted map: the middle 95 % over documents drawn with replacement."""
    rng = np.random.default_rng(0)
    places = [np.flatnonzero(data.document == document) for document in np.unique(data.document)]
    errors = []
    for _ in range(_RESAMPLES):
        drawn = np.concatenate([places[i] for i in rng.integers(0, len(places), len(places))])
        errors.append(calibration_error(reliability(fitted[drawn], data.accepted[drawn])))
    return [float(value) for value in np.quantile(errors, [0.025, 0.975])]


def run(args: Any) -> dict[str, Any]:
    recording = recorded(args)
    first, second = halves(recording)
    fitting, testing = trials_of(first), trials_of(second)
    calibration, scores = fit(fitting)
    fitted = testing.predicted(calibration)
    rows = []
    for position in range(recording.header.steps):
        mask = testing.position == position
        rows.append(row(position, testing.where(mask), fitted[mask]))
    return {
        "largest_error": max(each["ece_fitted"] for each in rows),
        "limit": LIMIT,
        "kind": min(scores, key=lambda kind: scores[kind]),
        "cross_validated_brier": scores,
        "documents": [len(first.documents), len(second.documents)],
        "positions": [first.positions, second.positions],
        "rows": [*rows, row("all", testing, fitted)],
        "calibration": calibration.to_dict(),
        "device": mx.default_device().type.name,
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "scikit-learn")},
    }


def add_recording_options(parser: Any) -> None:
    parser.add_argument("--model", help="a folder or a repository with an MTP head; by default the embedded model")
    parser.add_argument("--documents", type=int, default=60, help="held-out documents")
    parser.add_argument("--tokens", type=int, default=97, help="tokens of each")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of each document that are the prompt")
    parser.add_argument("--recording", type=Path, help="where to keep the recording, or to find it again")


def main() -> int:
    """Prints the table; the exit code is 1 where the fitted map misses the limit."""
    parser = report.parser(__doc__)
    add_recording_options(parser)
    args = parser.parse_args()
    result = run(args)
    if not report.publish(result, args):
        columns = ("position", "trials", "accepted", "ece_raw", "ece_fitted", "noise", "brier_raw", "brier_fitted")
        print(report.table(result["rows"], columns))
        print(f"{result['kind']}, fitted to {result['documents'][0]} documents, tested on {result['documents'][1]}")
    return 0 if result["largest_error"] <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
