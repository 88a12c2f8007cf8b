"""Drafting goes on while it pays, and costs little where it does not."""

from itertools import count

import pytest

from strata_mlx.speculation.pacing import FIRST_STEPS, SHARE, TRIAL, Pacer


def run(pacer: Pacer, tokens: int, round_seconds: float, per_round: int) -> tuple[float, int]:
    """Seconds and rounds until there are so many tokens, where a plain step takes one second."""
    seconds, rounds, made = 0.0, 0, 0
    while made < tokens:
        if pacer.drafting:
            pacer.round(round_seconds, per_round)
            seconds, rounds, made = seconds + round_seconds, rounds + 1, made + per_round
        else:
            pacer.step(1.0)
            seconds, made = seconds + 1, made + 1
    return seconds, rounds


@pytest.mark.parametrize("cost", [1.05, 1.5, 2.0, 4.0, 20.0])
def test_what_does_not_pay_costs_little(cost: float) -> None:
    seconds, rounds = run(Pacer(), 2000, cost, 1)
    assert seconds <= 2000 * (1 + SHARE) + cost
    assert rounds >= 1


@pytest.mark.parametrize("tokens", [FIRST_STEPS, 64, 128])
@pytest.mark.parametrize("cost", [1.05, 1.5, 2.0, 4.0, 20.0])
def test_in_a_short_text_it_costs_a_trial(cost: float, tokens: int) -> None:
    assert run(Pacer(), tokens, cost, 1)[0] <= tokens + TRIAL + cost - 1


@pytest.mark.parametrize("unlucky", [0, 1, 5, 30])
def test_a_round_without_luck_does_not_end_what_pays(unlucky: int) -> None:
    pacer, made = Pacer(), 0
    for _ in range(FIRST_STEPS):
        pacer.step(1.0)
    for number in count():
        assert pacer.drafting
        tokens = 1 if number in (unlucky, unlucky + 1) else 3
        pacer.round(2.3, tokens)
        made += tokens
        if made > 128:
            return


@pytest.mark.parametrize("cost", [1.5, 2.0, 4.0])
def test_probes_do_not_end(cost: float) -> None:
    pacer = Pacer()
    run(pacer, 1000, cost, 1)
    assert run(pacer, 3000, cost, 1)[1] > 1


def test_what_pays_is_done_all_the_time() -> None:
    seconds, rounds = run(Pacer(), 1000, 1.5, 2)
    assert rounds == (1000 - FIRST_STEPS) // 2
    assert seconds < 800


def test_what_begins_to_pay_is_found_out() -> None:
    pacer = Pacer()
    run(pacer, 500, 3.0, 1)
    seconds, _ = run(pacer, 5000, 1.0, 3)
    assert seconds < 2500


def test_what_no_longer_pays_is_given_up() -> None:
    pacer = Pacer()
    run(pacer, 3000, 1.0, 3)
    seconds, _ = run(pacer, 1000, 2.0, 1)
    assert seconds < 1000 * (1 + 2 * SHARE) + 32


def test_rounds_of_changing_luck_pay_by_their_average() -> None:
    pacer = Pacer()
    run(pacer, 100, 1.5, 2)
    kept = 0
    for number in range(200):
        pacer.round(1.5, (1, 4, 1, 2)[number % 4])  # two tokens on average
        kept += pacer.drafting
    assert kept > 150


def test_always_is_always() -> None:
    pacer = Pacer(always=True)
    assert pacer.drafting
    pacer.round(100.0, 1)
    assert pacer.drafting
