"""A replay is what the decoder does: the same rounds and the same misses, whatever the policy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_mlx import InputError, RetentionPolicy, SpeculativeDecoder
from strata_mlx.experts.streaming import streaming_of
from strata_mlx.replay.costs import STORAGES, CostModel, Storage
from strata_mlx.replay.recording import Recording
from strata_mlx.replay.replayer import Replayed, _Text, replay
from strata_mlx.replay.slots import LayerSlots
from strata_mlx.speculation.record import Round
from tests.conftest import Report
from tests.errors import refuses
from tests.experts.streamed import EXPERTS, TOP_K, streamed
from tests.replay.conftest import COSTS


class Scripted:
    """A policy that makes and keeps so many drafts as ``script`` says, round by round, and 0 is a plain step."""

    keeps_all = False

    def __init__(self, script: Sequence[tuple[int, int]]):
        self.script = script
        self.learned: list[Round] = []
        self.kept, self.open = 0, True

    def start(self) -> "Scripted":
        return Scripted(self.script)

    @property
    def now(self) -> tuple[int, int]:
        return self.script[len(self.learned) % len(self.script)]

    def depth(self, most: int) -> int:
        return min(most, self.now[0])

    def learn(self, latest: Round) -> None:
        self.learned.append(latest)

    def gate(self, path: str = "chained") -> "Scripted":  # noqa: ARG002
        self.kept, self.open = 0, True
        return self

    def offer(self, p: Any) -> bool:  # noqa: ARG002
        keep = self.kept < self.now[1]
        self.kept += keep
        self.open = keep
        return keep


@dataclass(frozen=True)
class Case:
    retention: Any
    steps: int
    drafting: str
    slots: int | tuple[int, ...]
    eviction: str
    prefill: int


@dataclass
class Real:
    rounds: list[Round]
    misses: list[int]  # by layer, those of prompts included


def decode(folder: Path, recording: Recording, case: Case) -> Real:
    model = streamed(folder, case.slots, eviction=case.eviction, mtp=True)
    rounds: list[Round] = []
    for document in recording.documents:
        decoder = SpeculativeDecoder(
            model,
            prompt=document.tokens[: document.prompt].tolist(),
            max_tokens=document.positions + 1,
            retention=case.retention,
            max_steps=case.steps,
            drafting=case.drafting,
            prefill_step_size=case.prefill,
        )
        assert [each.token for each in decoder] == document.tokens[document.prompt :].tolist()
        rounds += decoder.rounds
    streaming = streaming_of(model)
    assert streaming is not None
    tables = streaming.tables
    return Real(rounds, [tables[i].filled if i in tables else 0 for i in range(3)])


def replayed(recording: Recording, costs: CostModel, case: Case) -> Replayed:
    return replay(
        recording,
        case.retention,
        costs,
        steps=case.steps,
        drafting=case.drafting,
        slots=case.slots,
        eviction=case.eviction,
        prefill_step_size=case.prefill,
    )


def check_equal(found: Replayed, real: Real) -> None:
    def outcomes(rounds: Iterable[Round]) -> list[tuple[int, ...]]:
        return [(each.drafted, each.retained, each.accepted, each.committed) for each in rounds]

    assert outcomes(found.rounds) == outcomes(real.rounds)
    p = [p for each in found.rounds for p in each.confidences]
    np.testing.assert_allclose(p, [p for each in real.rounds for p in each.confidences], rtol=1e-4)
    assert (found.misses.sum(axis=0) + found.prompt_misses.sum(axis=0)).tolist() == real.misses


# Confidences of a real run differ in their last bits: no floor lies near one.
floors = st.floats(0.2, 0.9).map(lambda x: round(x, 2) + 0.00123)
policies = st.one_of(
    st.builds(RetentionPolicy, st.just(0.0) | floors),
    st.builds(lambda values: RetentionPolicy(schedule=tuple(values)), st.lists(floors, min_size=1, max_size=4)),
    st.builds(lambda floor: RetentionPolicy(min_cum_p=floor / 2), floors),
    st.builds(Scripted, st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=6)),
)
cases = st.builds(
    Case,
    policies,
    st.integers(1, 7),
    st.sampled_from(["chained", "stepwise"]),
    st.integers(TOP_K, EXPERTS - 1) | st.tuples(*[st.integers(TOP_K, EXPERTS)] * 3).filter(lambda s: min(s) < EXPERTS),
    st.sampled_from(["lru", "frequency", "lrfu"]),
    st.sampled_from([1, 3, 17, 2048]),
)
EXAMPLES = (
    Case(RetentionPolicy(), 3, "chained", TOP_K, "lru", 2048),
    Case(RetentionPolicy(0.35), 7, "stepwise", 7, "lrfu", 3),
    Case(RetentionPolicy(min_cum_p=0.1), 7, "chained", (5, 9, 6), "frequency", 2048),
    Case(Scripted([(3, 2), (0, 0), (0, 0), (7, 5), (1, 0), (0, 0)]), 7, "chained", 8, "lrfu", 17),
)


@settings(max_examples=20)
@given(case=cases)
def test_a_replay_is_what_the_decoder_does(folder: Path, recording: Recording, costs: CostModel, case: Case) -> None:
    check_equal(replayed(recording, costs, case), decode(folder, recording, case))


@pytest.fixture(scope="module")
def real(folder: Path, recording: Recording) -> list[Real]:
    """Of EXAMPLES."""
    return [decode(folder, recording, case) for case in EXAMPLES]


def test_examples(recording: Recording, costs: CostModel, real: list[Real]) -> None:
    for case, expected in zip(EXAMPLES, real, strict=True):
        check_equal(replayed(recording, costs, case), expected)


def one_token_too_many_is_committed(text: _Text, positions: range) -> None:
    text._waiting.append(range(positions.start, min(positions.stop + 1, text._document.positions)))


def one_committed_token_is_missing(text: _Text, positions: range) -> None:
    text._waiting.append(positions[:-1] or positions)


def the_head_reads_only_the_last_token(text: _Text, positions: range) -> None:
    text._waiting = [positions[-1:]]


def rows_have_the_experts_of_the_row_before(text: _Text, position: int, retained: int) -> Any:
    assert text._memory
    document = text._document
    if position < 0:
        return text._memory[0].window(document.prompt_experts[-1:])
    return text._memory[0].window(document.experts[position, [0, *range(retained)]])


def rejected_drafts_cost_no_rows(text: _Text, position: int, retained: int) -> Any:
    assert text._memory
    document = text._document
    kept = min(text._right[position], retained) if position >= 0 else 0
    rows = document.prompt_experts[-1:] if position < 0 else document.experts[position, : 1 + kept]
    return text._memory[0].window(rows)


def prompts_read_nothing(*_: Any) -> Any:
    return np.zeros(3, np.int32)


def nobody_is_told_what_was_used(layer: LayerSlots, chosen: Any) -> tuple[int, int]:
    needed = np.unique(chosen)
    missing = needed[layer.table.slot_of[needed] < 0]
    layer.table.commit(layer.table.reserve(missing[: layer.table.room(needed)].tolist(), needed))
    return len(needed), len(missing)


MUTANTS: dict[str, Any] = {
    **{
        observe.__name__: patch.object(_Text, "_observe", observe)
        for observe in (
            one_token_too_many_is_committed,
            one_committed_token_is_missing,
            the_head_reads_only_the_last_token,
        )
    },
    **{
        verify.__name__: patch.object(_Text, "_verify", verify)
        for verify in (rows_have_the_experts_of_the_row_before, rejected_drafts_cost_no_rows)
    },
    "prompts_read_nothing": patch.object(_Text, "read_prompt", prompts_read_nothing),
    "nobody_is_told_what_was_used": patch.object(LayerSlots, "window", nobody_is_told_what_was_used),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(
    name: str, recording: Recording, costs: CostModel, real: list[Real], report: Report
) -> None:
    killer = None
    with MUTANTS[name]:
        for number, (case, expected) in enumerate(zip(EXAMPLES, real, strict=True)):
            try:
                check_equal(replayed(recording, costs, case), expected)
            except AssertionError:
                killer = f"example {number}"
                break
    report(name, killer)


def test_a_replay_repeats(recording: Recording, costs: CostModel) -> None:
    for case in EXAMPLES:
        first, second = replayed(recording, costs, case), replayed(recording, costs, case)
        assert first.rounds == second.rounds
        assert np.array_equal(first.misses, second.misses)
        assert first.to_dict() == second.to_dict()


def test_with_everything_in_memory_nothing_is_read(recording: Recording, costs: CostModel) -> None:
    found = replay(recording, RetentionPolicy(), costs)
    assert not found.misses.any()
    assert not found.prompt_misses.any()
    assert found.tokens == recording.positions
    assert found.by_document().sum(axis=0) == pytest.approx([found.tokens, found.seconds])
    assert found.tokens_per_second == pytest.approx(found.tokens / found.seconds)
    full = replay(recording, RetentionPolicy(), costs, slots=EXPERTS)
    assert full.rounds == found.rounds


def test_virtual_seconds_are_those_of_the_cost_model(recording: Recording, costs: CostModel) -> None:
    found = replay(recording, RetentionPolicy(), costs, steps=2, slots=6)
    document = -1
    for i, (each, missed) in enumerate(zip(found.rounds, found.misses, strict=True)):
        last = found.rounds[i - 1]
        if found.document[i] != document:
            document, last = int(found.document[i]), Round((), 0, 0, 1, 0.0, 0.0, 0.0)
        replayed_state = last.committed < last.rows
        verify = COSTS.verify[each.retained] + COSTS.rollback * replayed_state + COSTS.miss * int(missed[:2].sum())
        assert each.verify_seconds == pytest.approx(verify)
        if each.drafted:
            draft = COSTS.draft[each.drafted - 1] + COSTS.catch_up * (last.committed - 1)
            assert each.draft_seconds == pytest.approx(draft + COSTS.head_miss * int(missed[2]))


def test_slower_storage_takes_longer_and_changes_nothing_else(recording: Recording, costs: CostModel) -> None:
    runs = [replay(recording, RetentionPolicy(), costs, slots=6, storage=storage) for storage in STORAGES]
    assert [run.seconds for run in runs] == sorted(run.seconds for run in runs)
    assert len({run.seconds for run in runs}) == len(runs)
    assert len({str([(each.retained, each.committed) for each in run.rounds]) for run in runs}) == 1
    hidden = replace(costs, pair=1e9)  # whatever reads take, computing takes longer
    slow = Storage("slow", 1.0, 1e9)
    assert (
        replay(recording, RetentionPolicy(), hidden, slots=6, storage=slow).seconds
        < replay(recording, RetentionPolicy(), costs, slots=6, storage=slow).seconds
    )


def test_a_policy_that_learns_is_told_every_round(recording: Recording, costs: CostModel) -> None:
    told: list[list[Round]] = []

    class Learns(Scripted):
        def start(self) -> "Learns":
            result = Learns(self.script)
            told.append(result.learned)
            return result

    found = replay(recording, Learns([(2, 2), (0, 0)]), costs)
    assert [each for of_document in told for each in of_document] == list(found.rounds)
    assert len(told) == len(recording.documents)


def test_wrong_arguments_are_refused(recording: Recording, costs: CostModel) -> None:
    policy = RetentionPolicy()
    with refuses(InputError, "steps is 8"):
        replay(recording, policy, costs, steps=8)
    with refuses(InputError, "drafting is 'x'"):
        replay(recording, policy, costs, drafting="x")
    with refuses(InputError, "3 slots", f"{TOP_K} experts"):
        replay(recording, policy, costs, slots=3)
    with refuses(InputError, "slots are given for 2 layers", "3"):
        replay(recording, policy, costs, slots=(5, 5))
    with refuses(InputError, "eviction is 'x'"):
        replay(recording, policy, costs, slots=5, eviction="x")
    with refuses(InputError, "not measured", "streams"):
        replay(recording, policy, replace(costs, streamed=None), slots=5)
    with refuses(InputError, "windows of up to 2 rows"):
        replay(recording, policy, replace(costs, resident=replace(COSTS, verify=(1.0, 1.0))))
    with refuses(InputError, "knows up to 1 drafts"):
        replay(recording, policy, replace(costs, resident=replace(COSTS, draft=(1.0,))))
