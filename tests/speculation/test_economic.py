"""The economic policy: its rule against trying everything, when it drafts at all, how it follows a text, its JSON."""

import json
import math
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strata_mlx.errors import InputError
from strata_mlx.speculation import economic
from strata_mlx.speculation.calibration import Calibration, Curve
from strata_mlx.speculation.decoder import SpeculativeDecoder
from strata_mlx.speculation.economic import EconomicController, EconomicGate, EconomicPolicy
from strata_mlx.speculation.pacing import SHARE, Pacer
from strata_mlx.speculation.record import Round
from strata_mlx.speculation.retention import PATHS, Gate, RetentionPolicy
from tests.conftest import Report
from tests.errors import refuses
from tests.speculation.test_decoder import COUNT, PROMPT, Script, decode, plain
from tests.strategies import economic_policies, likelihoods, observations

IDENTITY = Calibration((Curve(),))
VERIFY = (1.0, 1.25, 1.5, 1.75)
GOOD = EconomicPolicy(IDENTITY, 1.0, (0.1, 0.2, 0.3), VERIFY, ((0.9, 0.8, 0.8),))
DEAR = replace(GOOD, verify_seconds=(1.0, 2.0, 3.0, 4.0))  # a row costs as much as a step, so that nothing pays


def the_round(policy: EconomicPolicy, confidences: Any, retained: int, accepted: int, pace: float = 1.0) -> Round:
    made = len(confidences)
    draft = policy.draft_seconds[made - 1] if made else 0.0
    verify = policy.verify_seconds[retained] if made else policy.plain_seconds
    return Round(tuple(confidences), retained, accepted, 1 + accepted, draft * pace, verify * pace, 0.0)


def live(policy: EconomicPolicy, rounds: int, accept: Any, seed: int = 0, pace: Any = lambda _: 1.0) -> list[Round]:
    """Decode so many rounds; ``accept(round, position, p)`` is the true acceptance."""
    rng, controller, made = np.random.default_rng(seed), policy.start(), []
    controller.learn(the_round(policy, (), 0, 0))
    for number in range(rounds):
        depth, confidences = controller.depth(policy.steps), []
        gate: Gate = controller.gate() if depth else RetentionPolicy().gate()
        for position in range(depth):
            confidences.append(float(policy.chains[0][position]))
            gate.offer(confidences[-1])
        accepted = 0
        while accepted < gate.kept and rng.random() < accept(number, accepted, confidences[accepted]):
            accepted += 1
        made.append(the_round(policy, confidences, gate.kept, accepted, pace(number)))
        controller.learn(made[-1])
    return made


# The rule


@given(policy=economic_policies(), data=st.data())
def test_what_is_kept_is_best_of_all_choices(policy: EconomicPolicy, data: st.DataObject) -> None:
    """At the controller's rate no other number of the drafts is worth more, and none that is smaller as much."""
    controller = policy.start()
    made = data.draw(st.lists(likelihoods, max_size=policy.steps))
    gate = controller.gate()
    for p in made:
        gate.offer(p)
    chances, worth = policy.calibration.acceptances(made), []
    for k in range(len(made) + 1):
        tokens = 1 + sum(math.prod(chances[: i + 1]) for i in range(k))
        worth.append(tokens - policy.thrift * controller.rate * policy.verify_seconds[k])
    assert worth[gate.kept] >= max(worth) - 1e-9
    assert all(each < worth[gate.kept] + 1e-9 for each in worth[: gate.kept])


@given(policy=economic_policies(most=3))
def test_the_rate_to_begin_with_is_the_best_of_all_plans(policy: EconomicPolicy) -> None:
    """All plans: a number of drafts to make, the same in each round, and of each chain any number to verify."""
    assume(len(policy.chains) <= 2)
    rates = [1 / policy.plain_seconds]
    for made in range(1, policy.steps + 1):
        for ks in product(range(made + 1), repeat=len(policy.chains)):
            tokens = cost = 0.0
            for chain, k in zip(policy.chains, ks, strict=True):
                chances = policy.calibration.acceptances(chain)
                tokens += 1 + sum(math.prod(chances[: i + 1]) for i in range(k))
                cost += policy.draft_seconds[made - 1] + policy.verify_seconds[k]
            rates.append(tokens / cost)
    assert policy.rate == pytest.approx(max(rates))


@given(policy=economic_policies(), probs=st.lists(observations, max_size=6), path=st.sampled_from(PATHS))
def test_what_is_no_probability_is_never_kept(policy: EconomicPolicy, probs: list[float], path: str) -> None:
    gate = policy.start().gate(path)
    for p in probs:
        gate.offer(p)
    valid = next((i for i, p in enumerate(probs) if not 0 <= p <= 1), len(probs))
    assert gate.kept <= min(valid, policy.steps)
    assert gate.open or len(probs) > 0


@given(policy=economic_policies(), probs=st.lists(likelihoods, min_size=1, max_size=4), path=st.sampled_from(PATHS))
def test_it_never_keeps_a_row_that_costs_more_than_a_token_earns(
    policy: EconomicPolicy, probs: list[float], path: str
) -> None:
    rows = np.arange(policy.steps + 1)
    dear = replace(policy, thrift=1.0, verify_seconds=tuple(policy.plain_seconds * (1 + rows * 1.001)))
    gate = dear.start().gate(path)
    for p in probs:
        gate.offer(p)
    assert gate.kept == 0


def test_a_dear_row_is_kept_for_the_cheap_ones_after_it() -> None:
    steps = replace(GOOD, verify_seconds=(1.0, 2.0, 2.01, 2.02))
    gate = steps.start().gate()
    kept = [(gate.offer(0.99), gate.kept) for _ in range(3)]
    assert kept == [(False, 0), (True, 2), (True, 3)]


def test_stepwise_drafting_stops_where_another_draft_is_not_worth_making() -> None:
    gate = GOOD.start().gate("stepwise")
    assert [(gate.offer(p), gate.open) for p in (0.95, 0.05, 1.0)] == [(True, True), (False, False), (False, False)]
    assert gate.kept == 1
    free = replace(GOOD, draft_seconds=(0.0, 0.0, 0.0), verify_seconds=(1.0, 1.0, 1.0, 1.0)).start().gate("stepwise")
    assert [free.offer(0.01) and free.open for _ in range(3)] == [True, True, False]


def test_what_is_no_path_and_no_number_is_refused() -> None:
    controller = GOOD.start()
    with refuses(InputError, "'host'", "chained, stepwise"):
        controller.gate("host")
    with refuses(InputError, "'half'", "expected a number"):
        controller.gate().offer("half")  # type: ignore[arg-type]


# Whether to draft


def test_it_drafts_from_the_beginning_where_that_pays_and_not_where_it_does_not() -> None:
    assert GOOD.start().depth(3) == 3
    assert GOOD.start().depth(2) == 2
    assert GOOD.start().depth(0) == 0
    assert DEAR.start().depth(3) == 0
    assert replace(GOOD, chains=((0.9, 0.01, 0.01),)).start().depth(3) == 1


def test_it_gives_up_where_nothing_is_accepted_and_probes_no_more_than_its_share() -> None:
    rounds = live(GOOD, 2500, lambda *_: 0.0)
    lost = sum(each.seconds - each.committed * GOOD.plain_seconds for each in rounds[200:])
    assert sum(each.drafted > 0 for each in rounds[200:]) > 0
    assert lost <= 2 * SHARE * sum(each.seconds for each in rounds)


def test_it_comes_back_when_drafts_are_accepted_again() -> None:
    rounds = live(GOOD, 2000, lambda number, *_: 0.0 if number < 50 else 0.95)
    assert all(each.drafted for each in rounds[-100:])


def test_it_is_as_fast_as_the_best_depth_whatever_is_accepted() -> None:
    """Regret against plain steps and every fixed depth, of texts whose acceptance is not what the policy expects."""
    for chance in (0.0, 0.3, 0.6, 0.95):
        rounds = live(GOOD, 600, lambda *_, chance=chance: chance, seed=1)
        speed = sum(each.committed for each in rounds) / sum(each.seconds for each in rounds)
        tokens = np.cumsum([1.0, *np.cumprod([chance] * 3)])
        fixed = [1.0, *(tokens[k] / (GOOD.draft_seconds[k - 1] + VERIFY[k]) for k in (1, 2, 3))]
        assert speed >= 0.93 * max(fixed)


def test_a_slower_machine_changes_nothing_and_noise_does_not_make_it_change_its_mind() -> None:
    slow = live(GOOD, 200, lambda *_: 0.8, pace=lambda _: 3.0)
    assert [each.drafted for each in slow] == [each.drafted for each in live(GOOD, 200, lambda *_: 0.8)]
    rng = np.random.default_rng(0)
    noisy = [each.drafted for each in live(GOOD, 300, lambda *_: 0.8, pace=lambda _: rng.uniform(0.7, 1.3))]
    assert sum(a != b for a, b in pairwise(noisy)) <= 25


def test_what_a_head_has_to_catch_up_with_makes_probes_rarer() -> None:
    policies = (DEAR, *(replace(DEAR, catch_up_seconds=c) for c in (0.008, 0.02)))
    probes = [sum(each.drafted > 0 for each in live(policy, 2000, lambda *_: 0.0)) for policy in policies]
    assert probes[0] > probes[1] > probes[2] == 0


def test_the_first_round_counts_for_nothing() -> None:
    controller = GOOD.start()
    before = controller.rate
    controller.learn(Round((), 0, 0, 1, 0.0, 1e6, 0.0))
    assert controller.rate == before
    controller.learn(Round((), 0, 0, 1, 0.0, 1e6, 0.0))
    assert controller.rate < before


@given(policy=economic_policies(), data=st.data())
def test_anything_may_happen(policy: EconomicPolicy, data: st.DataObject) -> None:
    controller = policy.start()
    for _ in range(data.draw(st.integers(1, 8))):
        confidences = data.draw(st.lists(observations, max_size=8))
        retained = data.draw(st.integers(0, len(confidences)))
        accepted = data.draw(st.integers(0, retained))
        seconds = data.draw(st.sampled_from([0.0, 1e-6, 1.0, 100.0]))
        controller.learn(Round(tuple(confidences), retained, accepted, 1 + accepted, 0.0, seconds, 0.0))
        assert 0 <= controller.depth(3) <= min(3, policy.steps)
        assert math.isfinite(controller.rate)


# The value


@given(policy=economic_policies(most=8))
def test_json_gives_the_same_value_back(policy: EconomicPolicy) -> None:
    assert EconomicPolicy.from_json(policy.to_json()) == policy
    assert hash(policy) == hash(EconomicPolicy.from_json(policy.to_json()))


def test_it_says_what_it_is() -> None:
    assert "economic, up to 3 drafts" in str(GOOD)
    assert json.loads(GOOD.to_json())["kind"] == "economic"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"calibration": None}, "calibration"),
        ({"plain_seconds": 0}, "positive"),
        ({"plain_seconds": math.nan}, "plain_seconds"),
        ({"plain_seconds": "1"}, "plain_seconds"),
        ({"thrift": 0.0}, "positive"),
        ({"thrift": math.inf}, "thrift"),
        ({"draft_seconds": ()}, "0 draft_seconds"),
        ({"draft_seconds": (0.1,) * 9, "verify_seconds": (1.0,) * 10}, "1 to 8"),
        ({"draft_seconds": (0.1, 0.2, -0.3)}, "not negative"),
        ({"draft_seconds": 0.1}, "draft_seconds"),
        ({"catch_up_seconds": -0.1}, "catch_up_seconds"),
        ({"catch_up_seconds": math.nan}, "catch_up_seconds"),
        ({"verify_seconds": (1.0, 1.1, 1.2)}, "3 verify_seconds"),
        ({"verify_seconds": (1.0, 1.1, 1.2, 0.0)}, "positive"),
        ({"verify_seconds": (1.0, 1.1, 1.2, math.inf)}, "verify_seconds[3]"),
        ({"chains": ()}, "at least one"),
        ({"chains": ((0.5, 0.5),)}, "of 3 confidences"),
        ({"chains": ((0.5, 0.5, 1.5),)}, "from 0 to 1"),
        ({"chains": ((0.5, 0.5, math.nan),)}, "chains[0][2]"),
        ({"chains": "chains"}, "expected a list"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    with refuses(InputError, "economic policy", message):
        replace(GOOD, **change)


@pytest.mark.parametrize("name", ["calibration", "plain_seconds", "draft_seconds", "verify_seconds", "chains", "kind"])
def test_json_without_a_field_or_with_another_is_refused(name: str) -> None:
    values = json.loads(GOOD.to_json())
    with refuses(InputError, "economic policy", "unknown more"):
        EconomicPolicy.from_json(json.dumps({**values, "more": 1}))
    del values[name]
    with refuses(InputError, "economic policy", name):
        EconomicPolicy.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "flat"}', '{"kind": "economic", "kind": "economic"}', "NaN"])
def test_broken_json_is_refused(text: str) -> None:
    with refuses(InputError, "economic policy"):
        EconomicPolicy.from_json(text)


# In the decoder


@pytest.mark.parametrize("drafting", PATHS)
@pytest.mark.parametrize("name", ["good", "dear", "free"])
def test_the_text_is_that_of_plain_decoding(model: nn.Module, name: str, drafting: str) -> None:
    free = replace(GOOD, draft_seconds=(0.0, 0.0, 0.0), verify_seconds=(1.0, 1.0, 1.0, 1.0))
    policy = {"good": GOOD, "dear": DEAR, "free": free}[name]
    assert decode(model, retention=policy, drafting=drafting) == plain(model)


@pytest.mark.parametrize("right", [0, 1, 3])
def test_right_drafts_are_kept_in_the_decoder(model: nn.Module, right: int) -> None:
    free = replace(GOOD, draft_seconds=(1e-9,) * 3, verify_seconds=(1.0,) * 4)
    text = plain(model)
    script = Script(text, right)
    decoder = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=COUNT, max_steps=3, retention=free, drafter=script)
    assert [each.token for each in decoder] == text
    assert decoder.rounds[1].retained == 3
    assert decoder.rounds[1].accepted == right


def test_where_drafting_does_not_pay_the_decoder_makes_plain_steps(model: nn.Module) -> None:
    decoder = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=COUNT, max_steps=3, retention=DEAR)
    assert [each.token for each in decoder] == plain(model)
    assert decoder.rounds[1].drafted == 0
    assert decoder.summary.parked
    assert mx.default_device() is not None


# Mutants


CHECKS = {
    "no path, no number": test_what_is_no_path_and_no_number_is_refused,
    "cheap rows after dear ones": test_a_dear_row_is_kept_for_the_cheap_ones_after_it,
    "stepwise": test_stepwise_drafting_stops_where_another_draft_is_not_worth_making,
    "drafting or not": test_it_drafts_from_the_beginning_where_that_pays_and_not_where_it_does_not,
    "first round": test_the_first_round_counts_for_nothing,
    "pace": test_a_slower_machine_changes_nothing_and_noise_does_not_make_it_change_its_mind,
    "giving up": test_it_gives_up_where_nothing_is_accepted_and_probes_no_more_than_its_share,
    "coming back": test_it_comes_back_when_drafts_are_accepted_again,
    "speed": test_it_is_as_fast_as_the_best_depth_whatever_is_accepted,
}


def _keep_all(gate: EconomicGate) -> int:
    return len(gate._chances)


def _first_that_does_not_pay(gate: EconomicGate) -> int:
    kept, reach = 0, 1.0
    for chance, less, more in zip(gate._chances, gate._verify, gate._verify[1:], strict=False):
        reach *= chance
        if reach <= (more - less) * gate._rate:
            break
        kept += 1
    return kept


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "keeps every draft": (EconomicGate, "kept", property(_keep_all)),
    "keeps none": (EconomicGate, "kept", property(lambda _: 0)),
    "stops at the first that does not pay": (EconomicGate, "kept", property(_first_that_does_not_pay)),
    "never stops drafting": (EconomicGate, "_goes_on", lambda _: True),
    "always stops drafting": (EconomicGate, "_goes_on", lambda _: False),
    "never corrects the calibration": (EconomicController, "shift", property(lambda _: 0.0)),
    "never notices the pace": (EconomicController, "pace", property(lambda _: 1.0)),
    "never probes": (Pacer, "affords", lambda *_: False),
    "always probes": (Pacer, "affords", lambda *_: True),
    "changes its mind for nothing": (economic, "_MARGIN", 0.0),
    "learns from the first round": (EconomicController, "_begun", True),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_die(name: str, monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    owner, attribute, value = MUTANTS[name]
    if attribute == "_begun":
        begin = EconomicController.__init__

        def begun(controller: EconomicController, policy: EconomicPolicy) -> None:
            begin(controller, policy)
            controller._begun = True

        owner, attribute, value = EconomicController, "__init__", begun
    monkeypatch.setattr(owner, attribute, value)
    for check, run in CHECKS.items():
        try:
            run()
        except BaseException:
            report(name, check)
            return
    report(name, None)
