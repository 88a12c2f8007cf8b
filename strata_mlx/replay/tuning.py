"""Make an economic policy of a recording: fit the calibration, and let replays say what rounds cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..speculation.calibration import Calibration
from ..speculation.economic import EconomicPolicy
from ..speculation.fitting import Trials, fit, trials
from ..speculation.record import Round
from ..speculation.retention import RetentionPolicy
from .costs import CostModel
from .recording import Recording
from .replayer import replay

CHAINS = 64  # that a policy takes along
THRIFT = 0.85  # the best of 0.6 to 1 on tuning halves: experts that a row reads are of use to later windows as well


class _NoDrafts(RetentionPolicy):
    def depth(self, most: int) -> int:  # noqa: ARG002
        return 0

    def __str__(self) -> str:
        return "no drafts"


PLAIN = _NoDrafts()


def calibrate(recording: Recording) -> Calibration:
    """The calibration of all documents together."""
    return fit(trials_of(recording))[0]


def trials_of(recording: Recording) -> Trials:
    """What a calibration is fitted to, and judged by."""
    return trials([each.p for each in recording.documents], [each.agree for each in recording.documents])


def tune(recording: Recording, costs: CostModel, calibration: Calibration, **options: Any) -> EconomicPolicy:
    """The policy for a model on this machine, with slots and storage as ``options`` of replay() say.

    A window of so many rows, and so many drafts, cost what they do on average where every round has as many.
    """
    steps, plain = recording.header.steps, RetentionPolicy()
    draft, verify = [], [0.0]
    for depth in range(1, steps + 1):
        rounds = replay(recording, plain, costs, **{**options, "steps": depth}).later
        full = [each for each in rounds if each.retained == depth]
        draft.append(_mean(full, "draft_seconds"))
        verify.append(_mean(full, "verify_seconds", "commit_seconds"))
    rounds = replay(recording, PLAIN, costs, **options).later
    plain_seconds = _mean(rounds, "verify_seconds", "commit_seconds")
    rounds = replay(recording, RetentionPolicy(min_cum_p=1.0), costs, **{**options, "steps": 1}).later
    verify[0] = _mean([each for each in rounds if each.drafted and not each.retained] or rounds, "verify_seconds")
    p = np.concatenate([each.p[: each.positions + 1 - steps] for each in recording.documents])
    chosen = np.random.default_rng(0).permutation(len(p))[:CHAINS]
    chains = tuple(tuple(chain) for chain in p[chosen].astype(np.float64).tolist())
    measured = costs.resident if options.get("slots") is None else costs.streamed
    catch_up = measured.catch_up if measured else 0.0
    return EconomicPolicy(calibration, plain_seconds, tuple(draft), tuple(verify), chains, THRIFT, catch_up)


def _mean(rounds: list[Round], *parts: str) -> float:
    return float(np.mean([sum(getattr(each, part) for part in parts) for each in rounds]))
