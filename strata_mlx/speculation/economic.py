"""Retention by what a draft is worth: its calibrated chance to be committed, against the time that its row costs.

The rule is that of ``economics``: where decoding earns ``rate`` tokens per second, a round should have the k drafts
that maximise ``R_k - rate * C_k``. What the rule needs is measured beforehand, and followed while a text is decoded.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError
from ..values import items, json_object, known, number, numbers
from .calibration import MAX_POSITIONS, Calibration
from .economics import best_k, best_rate, expected_tokens
from .pacing import Pacer
from .record import Round
from .retention import PATHS, observed

KIND = "economic"
_CHAINS = 32  # latest ones, by which the number of drafts is chosen
_HALF_LIFE = 64.0  # rounds after which a measurement counts half
_TRUST = 32.0  # rounds that the measurements made beforehand count as
_SPREAD = 0.5  # expected variance, from text to text, of what the log-odds of acceptance are off by
_MARGIN = 0.03  # tokens by which another number of drafts must be better, so that it does not change at every round


@dataclass(frozen=True)
class EconomicPolicy:
    """What retention needs to know about model, machine and storage.

    Seconds are those of a machine with its storage: reading the experts that a row needs and that are not in memory is
    part of them.

    Args:
        calibration: the probability that a draft is accepted, by its confidence.
        plain_seconds: of a plain step.
        draft_seconds: of making 1, 2, ... n drafts, n from 1 to 8.
        verify_seconds: of windows of 1, 2, ... n + 1 rows.
        chains: confidences of typical chains, n each, by which to choose how many drafts to make until there are
            chains of the text.
        thrift: what a second of a row is taken to be worth, in tokens, over what it earns at the moment. Less than 1
            keeps longer windows: what a row reads may be of use to later windows, which the seconds do not tell.
        catch_up_seconds: of each token of the steps without drafts, which the head has to read before it drafts again.

    Raises:
        InputError: a value of the wrong type or out of its range, or lengths that do not go together.
    """

    calibration: Calibration
    plain_seconds: float
    draft_seconds: tuple[float, ...]
    verify_seconds: tuple[float, ...]
    chains: tuple[tuple[float, ...], ...]
    thrift: float = 1.0
    catch_up_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("plain_seconds", "thrift", "catch_up_seconds"):
            object.__setattr__(self, name, number(f"economic policy: {name}", getattr(self, name)))
        for name in ("draft_seconds", "verify_seconds"):
            object.__setattr__(self, name, numbers(f"economic policy: {name}", getattr(self, name)))
        if not isinstance(self.calibration, Calibration):
            raise InputError("economic policy: calibration must be a Calibration")
        rows = items("economic policy: chains", self.chains)
        chains = tuple(numbers(f"economic policy: chains[{i}]", chain) for i, chain in enumerate(rows))
        object.__setattr__(self, "chains", chains)
        n = self.steps
        if not 1 <= n <= MAX_POSITIONS or len(self.verify_seconds) != n + 1:
            raise InputError(
                f"economic policy: {n} draft_seconds and {len(self.verify_seconds)} verify_seconds; expected 1 to "
                f"{MAX_POSITIONS} of the first, and one more of the second"
            )
        if not chains or any(len(chain) != n or not all(0 <= p <= 1 for p in chain) for chain in chains):
            raise InputError(f"economic policy: chains must be at least one, of {n} confidences from 0 to 1")
        if min(self.plain_seconds, self.thrift, *self.verify_seconds) <= 0:
            raise InputError("economic policy: plain_seconds, verify_seconds and thrift must be positive")
        if min(self.catch_up_seconds, *self.draft_seconds) < 0:
            raise InputError("economic policy: draft_seconds and catch_up_seconds must be 0 or more, not negative")

    @property
    def steps(self) -> int:
        """n, the most drafts."""
        return len(self.draft_seconds)

    @property
    def chances(self) -> NDArray[np.float64]:
        """Of the drafts of the typical chains to be accepted, each once those before were, ``[chains, n]``."""
        return np.array([self.calibration.acceptances(chain) for chain in self.chains])

    @property
    def rate(self) -> float:
        """Tokens per second, the most that any number of drafts promises for the typical chains."""
        chances, verify = self.chances, self.verify_seconds
        rates = [best_rate(chances[:, : n + 1], verify[: n + 2], made) for n, made in enumerate(self.draft_seconds)]
        return max(1 / self.plain_seconds, *rates)

    def start(self) -> EconomicController:
        """What follows one text."""
        return EconomicController(self)

    def to_json(self) -> str:
        """The policy as one JSON object."""
        return json.dumps({"kind": KIND, **asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> EconomicPolicy:
        """The policy that ``to_json`` wrote. Raises InputError for anything else."""
        values: dict[str, Any] = json_object("economic policy", text)
        if (kind := values.pop("kind", None)) != KIND:
            raise InputError(f"economic policy: kind is {kind!r}, expected {KIND!r}")
        required = ("calibration", "plain_seconds", "draft_seconds", "verify_seconds", "chains")
        known("economic policy", values, cls, required)
        return cls(**{**values, "calibration": Calibration.from_dict(values["calibration"])})

    def __str__(self) -> str:
        return f"economic, up to {self.steps} drafts, {self.rate:.1f} tokens per second expected"


class EconomicController:
    """Follows one text: which drafts are worth their time, and whether drafting is worth it at all.

    It follows the rate, how much slower or faster than measured beforehand this machine is, how far acceptance is off
    its calibration, and the latest chains. A number of drafts is left only for one that is better by a margin. Where
    the best number is none, drafting is probed, within the share of the time that pacing allows.
    """

    keeps_all = False

    def __init__(self, policy: EconomicPolicy):
        self._policy, self._begun = policy, False
        self._unknown = self._drafted = self._stepwise = False  # a round on its way; the latest one drafted; the path
        self._verify, self._draft = np.array(policy.verify_seconds), np.array([0.0, *policy.draft_seconds])
        self._plain = policy.plain_seconds
        self._pacer = Pacer(plain=self._plain)
        self._keep = 2 ** (-1 / _HALF_LIFE)
        self._seconds = self._expected = self._measured = _TRUST * self._plain
        self._tokens = self._seconds * policy.rate
        self._behind = 0  # tokens that the draft head has not read
        self._shift, self._doubt = 0.0, _SPREAD
        chances = policy.chances
        self._typical = chances.mean(axis=0)  # [n]
        self._chains: deque[NDArray[np.float64]] = deque(chances[-_CHAINS:], _CHAINS)
        self._worth = self._depths()
        self._depth = int(np.argmax(self._worth))

    @property
    def rate(self) -> float:
        """Tokens per second, of late."""
        return self._tokens / self._seconds

    @property
    def price(self) -> float:
        """Tokens that a second of a draft's row must bring."""
        return self._policy.thrift * self.rate

    @property
    def pace(self) -> float:
        """Seconds that take one second by the policy's measurements."""
        return self._measured / self._expected

    @property
    def shift(self) -> float:
        """Of the log-odds of acceptance, from what the calibration says."""
        return self._shift

    def depth(self, most: int) -> int:
        """How many drafts, up to ``most``, the next round should make; 0 is a plain step."""
        most = min(most, self._policy.steps)
        if most < 1:
            return 0
        best = int(np.argmax(self._worth[: most + 1]))
        current = min(self._depth, most)
        if self._worth[best] <= self._worth[current] + _MARGIN:
            best = current
        if best == 0 and not self._unknown:  # one probe at a time
            expected = float(self._worth[0] - self._worth[1 : most + 1].max()) / self.rate
            expected += self._policy.catch_up_seconds * self.pace * self._behind
            if not self._pacer.affords(expected):
                return 0
            best = 1 + int(np.argmax(self._worth[1 : most + 1]))
        return most if best and self._stepwise else best  # the stepwise gate stops where it should

    def gate(self, path: str = "chained") -> EconomicGate:
        """The rule for one round. Raises InputError for a path that there is not."""
        if path not in PATHS:
            raise InputError(f"retention: path is {path!r}, expected one of {', '.join(PATHS)}")
        self._unknown, self._stepwise = True, path == "stepwise"
        costs = (self._verify * self.pace, self._draft * self.pace)
        return EconomicGate(self._policy.calibration, self.shift, self.price, *costs, self._typical, path)

    def learn(self, latest: Round) -> None:
        """Take note of a round, or of a plain step. The first one of a text starts cold, and counts for nothing."""
        if not self._begun:
            self._begun = True
            return
        policy, made = self._policy, len(latest.confidences)
        drafts, rows = min(made, policy.steps), min(latest.rows, policy.steps + 1)
        expected = self._draft[drafts] + self._verify[rows - 1] if made else self._plain
        self._tokens = self._tokens * self._keep + latest.committed
        self._seconds = self._seconds * self._keep + latest.seconds
        self._measured = self._measured * self._keep + latest.seconds
        self._expected = self._expected * self._keep + expected
        self._doubt = self._keep**2 * self._doubt + (1 - self._keep**2) * _SPREAD
        if made:
            self._pacer.round(latest.seconds, latest.committed)
            self._compare(latest)
        elif self._drafted:
            self._pacer.change(latest.seconds)
        else:
            self._pacer.step(latest.seconds)
        self._unknown, self._drafted = False, made > 0
        self._behind = 0 if made else self._behind + latest.committed
        self._worth = self._depths()
        best = int(np.argmax(self._worth))
        if self._worth[best] > self._worth[self._depth] + _MARGIN:
            self._depth = best

    def _compare(self, latest: Round) -> None:
        """Correct the calibration by the drafts whose outcome is known, and remember the chain.

        That is a Kalman filter for the shift, which drifts back to 0 while there is nothing to learn from it.
        """
        chances = np.array(self._policy.calibration.acceptances(latest.confidences[: self._policy.steps]))
        self._shift *= self._keep
        for position, chance in enumerate(chances[: min(latest.accepted + 1, latest.retained)]):
            expected = float(shifted(chance, self._shift))
            self._doubt /= 1 + self._doubt * expected * (1 - expected)
            self._shift += self._doubt * ((position < latest.accepted) - expected)
        self._chains.append(np.append(chances, self._typical[len(chances) :]))

    def _depths(self) -> NDArray[np.float64]:
        """What a round of 0, 1, ... drafts is worth, in tokens more than its time could earn, ``[n + 1]``."""
        chances = shifted(np.array(self._chains), self.shift)
        # Drafts that are made one by one end with the first that is not kept.
        early, late = (np.append(self._draft[1:], self._draft[-1]), 0.0) if self._stepwise else (0.0, self._draft)
        worth = expected_tokens(chances) - self.rate * self.pace * (self._verify + early)  # [chains, n + 1]
        best = np.maximum.accumulate(worth, axis=1).mean(axis=0) - self.rate * self.pace * late
        best[0] = 1 - self.rate * self.pace * self._plain
        return np.asarray(best)


class EconomicGate:
    """One round: offer the drafts' confidences in order; ``kept`` says how many of them to verify.

    open: whether another draft may be worth making: on the stepwise path, whether its expected gain exceeds the time
    that it takes. A confidence that is no probability ends the round.
    """

    def __init__(
        self,
        calibration: Calibration,
        shift: float,
        rate: float,
        verify: NDArray[np.float64],
        draft: NDArray[np.float64],
        typical: NDArray[np.float64],
        path: str,
    ):
        self.open = True
        self._calibration, self._shift, self._rate = calibration, shift, rate
        self._verify, self._draft, self._typical, self._stepwise = verify, draft, typical, path == "stepwise"
        self._chances: list[float] = []
        self._before = 1.0

    @property
    def kept(self) -> int:
        """How many of the drafts offered so far to verify."""
        n = len(self._chances)
        return int(best_k(self._chances, self._verify[: n + 1], rate=self._rate)) if n else 0

    def offer(self, p: SupportsFloat) -> bool:
        """Whether the next draft, of confidence ``p``, is worth its row so far. Raises InputError: not a number."""
        if not self.open:
            return False
        value, place = observed(p), len(self._chances)
        if not 0 <= value <= 1 or place >= len(self._draft) - 1:
            self.open = False
            return False
        chance = self._calibration.acceptance(place, value, self._before)
        self._chances.append(float(shifted(chance, self._shift)))
        self._before *= value
        if self._stepwise:
            self.open = self._goes_on()
        return self.kept > place

    def _goes_on(self) -> bool:
        n = len(self._chances)
        likely = [*self._chances, *shifted(self._typical[n:], self._shift)]
        made = np.maximum(self._draft, self._draft[n])  # what has been drafted is paid for
        return int(best_k(likely, self._verify, made, rate=self._rate)) > n


def shifted(chances: ArrayLike, shift: float) -> NDArray[np.float64]:
    """Probabilities with ``shift`` added to their log-odds."""
    chances, odds = np.asarray(chances, np.float64), np.exp(shift)
    return np.asarray(chances * odds / (1 - chances + chances * odds))
