"""Requests that are served together: each text is the one that its request gets alone, and nobody waits for long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

from strata_mlx import Fault, InputError, Policy, RetentionPolicy, generate, load, stream_generate
from strata_mlx.server import scheduler as scheduling
from strata_mlx.server.jobs import Job
from strata_mlx.server.sequences import Sequence
from strata_mlx.server.streams import Item
from tests.server.served import Served, end_of, prompt, text_of, tokens_of, told, usage_of
from tests.tiny import FAMILIES, TINY, make_checkpoint

Pair = tuple[nn.Module, TokenizerWrapper]
SIZES = (5, 1, 40, 2, 17, 33, 64, 9)
SOURCE = (
    'class Matrix:\n    """A dense matrix of floats; rows are lists."""\n\n'
    "    def transpose(self):\n        return Matrix([list(column) for"
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    root = tmp_path_factory.mktemp("models")
    folders = {
        family: make_checkpoint(root / family, family, "stacked", mtp="stacked" if TINY[family].heads else None)
        for family in FAMILIES
    }
    return {family: load(path, mtp="auto") for family, path in folders.items()}


@pytest.fixture(scope="module")
def embedded() -> Pair:
    return load(mtp=True)


@pytest.fixture
def pair(loaded: dict[str, Pair]) -> Pair:
    return loaded["qwen3_next"]


def jobs(count: int = 8, tokens: int = 12, **options: object) -> list[Job]:
    return [Job(prompt(n, SIZES[n % 8]), tokens + 5 * (n % 3), **options) for n in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_together_get_the_texts_that_each_gets_alone(loaded: dict[str, Pair], family: str) -> None:
    model, tokenizer = loaded[family]
    asked = jobs(top_logprobs=3)
    together = Served(model, tokenizer).together(asked)
    alone = Served(model, tokenizer).one_by_one(asked)
    if family == "mimo_v2_flash":  # the rows of a window lie in another order in a batch, so that sums differ
        assert [text_of(items) for items in together] == [text_of(items) for items in alone]
    else:
        assert [told(items) for items in together] == [told(items) for items in alone]
    for job, items in zip(asked, alone, strict=True):
        expected = generate(model, tokenizer, list(job.prompt), max_tokens=job.max_tokens, mtp=False)
        assert text_of(items) == expected


def test_requests_that_come_and_go_at_any_time_get_the_same_texts(pair: Pair) -> None:
    asked = jobs(10, 20)
    alone = Served(*pair).one_by_one(asked)
    served = Served(*pair)
    sequences: list[Sequence] = []
    for number, job in enumerate(asked):
        sequences.append(served.add(job))
        served.until(sequences[max(0, number - 2)], 1 + number % 4)
    served.finish()
    assert [told(list(sequence.stream)) for sequence in sequences] == [told(items) for items in alone]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_chunks_of_a_prompt_do_not_matter(pair: Pair, size: int) -> None:
    expected = [told(items) for items in Served(*pair).together(jobs(4))]
    assert [told(items) for items in Served(*pair, step_size=size).together(jobs(4))] == expected


@pytest.mark.parametrize("others_after", [0, 1, 2, 5])
def test_a_request_that_drafts_goes_on_together_with_those_that_come(pair: Pair, others_after: int) -> None:
    asked = jobs(4, 24, top_logprobs=1)
    alone = Served(*pair).one_by_one(asked)
    served = Served(*pair, mtp="on")
    first = served.add(asked[0])
    served.until(first, others_after)
    others = [served.add(job) for job in asked[1:]]
    served.finish()
    items = [list(sequence.stream) for sequence in (first, *others)]
    assert [told(each) for each in items[1:]] == [told(each) for each in alone[1:]]
    assert text_of(items[0]) == text_of(alone[0])
    drafted, plain = tokens_of(items[0]), tokens_of(alone[0])
    assert [token.id for token in drafted] == [token.id for token in plain]
    # The logits of a verify window are those of plain steps up to rounding.
    assert [token.logprob for token in drafted] == pytest.approx([token.logprob for token in plain], abs=1e-5)
    assert all(usage_of(each).drafted == 0 for each in items[1:])


def test_one_that_is_no_longer_alone_when_it_has_been_read_does_not_draft(pair: Pair) -> None:
    served = Served(*pair, mtp="on", step_size=8)
    long = served.add(Job(prompt(1, 100), 20))
    served.scheduler.turn()
    short = served.add(Job(prompt(2, 5), 1000))
    served.until(long, 1)
    before = len(short.tokens)
    served.until(long, 11)
    assert len(short.tokens) == before + 10
    assert long.drafted == 0


def test_a_request_alone_drafts_and_says_how_many_were_accepted(embedded: Pair) -> None:
    policy = Policy(RetentionPolicy(), mtp="on", max_steps=3)
    served = Served(*embedded, mtp="on", policy=policy)
    job = Job(tuple(embedded[1].encode(SOURCE)), 20)
    items = served.together([job])[0]
    assert told(items) == told(Served(*embedded).together([job])[0])
    usage, totals = usage_of(items), served.totals
    assert usage.drafted > usage.accepted > 6
    assert totals.drafted == usage.drafted
    assert sum(totals.verified) == usage.drafted  # without gates
    assert sum(totals.accepted) == usage.accepted
    assert totals.verified[3:] == [0] * 5
    *_, last = stream_generate(*embedded, list(job.prompt), 20, mtp=True, max_steps=3)
    assert last.speculation
    assert (usage.drafted, usage.accepted) == (last.speculation.drafted, last.speculation.accepted)


def test_a_model_without_a_head_never_drafts_and_refuses_to(loaded: dict[str, Pair]) -> None:
    model, tokenizer = loaded["qwen3_moe"]
    assert usage_of(Served(model, tokenizer, mtp="auto").together(jobs(1))[0]).drafted == 0
    with pytest.raises(InputError, match="without an MTP head"):
        Served(model, tokenizer, mtp="on")


@pytest.mark.parametrize("mtp", ["off", "on"])
def test_a_seed_repeats_a_sampled_text_in_any_company(pair: Pair, mtp: str) -> None:
    job = Job(prompt(3, 20), 20, temperature=1.5, top_p=0.9, top_k=50, min_p=0.01, seed=11)
    alone = told(Served(*pair, mtp=mtp).together([job])[0])
    company = [replace(other, temperature=1.0) for other in jobs(5)]
    served = Served(*pair, mtp=mtp)
    first = served.add(company[0])
    served.until(first, 2)
    sequences = [served.add(each) for each in (company[1], job, replace(job, seed=12), job, company[2])]
    served.finish()
    texts = [told(list(sequence.stream)) for sequence in sequences]
    assert texts[1] == texts[3] == alone
    assert texts[2] != alone


def test_the_tokens_of_a_seed_are_drawn_one_by_one(pair: Pair) -> None:
    sequence = Served(*pair).add(Job((1,), 50, temperature=1.0, seed=3))
    uniform = mx.full((1, 259), -np.log(259))
    assert len({sequence.draw(uniform).item() for _ in range(20)}) > 15


def test_without_a_seed_texts_differ(pair: Pair) -> None:
    job = Job(prompt(3, 20), 20, temperature=1.5)
    assert len({text_of(items) for items in Served(*pair).together([job] * 4)}) == 4


def test_top_p_of_zero_takes_the_likeliest_token(pair: Pair) -> None:
    job = Job(prompt(3, 20), 20)
    expected = told(Served(*pair).together([job])[0])
    assert told(Served(*pair).together([replace(job, temperature=2.0, top_p=0.0)])[0]) == expected


@pytest.mark.parametrize("mtp", ["off", "on"])
def test_penalties_and_bias_are_mlx_lms_in_the_batch_and_alone(pair: Pair, mtp: str) -> None:
    model, tokenizer = pair
    ids = prompt(5, 30)
    last = np.array(model(mx.array(ids)[None])[0, -1])
    likeliest = tuple(int(token) for token in np.argsort(-last)[:18])  # penalties are about these from the beginning
    job = Job(
        (*ids, *likeliest, ids[-1]),
        25,
        repetition_penalty=3.0,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        logit_bias={65: 0.5},
    )
    processors = make_logits_processors({65: 0.5}, 3.0, 20, 2.0, 20, 2.0, 20)
    expected = generate(model, tokenizer, list(job.prompt), max_tokens=25, mtp=False, logits_processors=processors)
    plain = generate(model, tokenizer, list(job.prompt), max_tokens=25, mtp=False)
    assert expected != plain
    assert text_of(Served(model, tokenizer, mtp=mtp).together([job])[0]) == expected
    mixed = Served(model, tokenizer, mtp=mtp).together([*jobs(3), job, Job(job.prompt, 25)])
    assert [text_of(items) for items in mixed[3:]] == [expected, plain]


def test_logprobs_are_the_models_own(pair: Pair) -> None:
    model, tokenizer = pair
    job = Job(prompt(1, 10), 6, temperature=1.7, seed=5, top_logprobs=4)
    items = Served(model, tokenizer).together([job])[0]
    tokens = told(items)[1]
    ids = [*job.prompt, *(token.id for token in tokens)]
    logits = model(mx.array(ids)[None])[0]
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for place, token in enumerate(tokens, len(job.prompt) - 1):
        assert token.logprob == pytest.approx(logprobs[place, token.id], abs=1e-5)
        best = np.argsort(-logprobs[place])[:4].tolist()
        assert [other for other, _, _ in token.top] == best
        assert [value for _, _, value in token.top] == pytest.approx(logprobs[place, best], abs=1e-5)
        assert token.text == tokenizer.decode([token.id])


def test_a_stop_string_ends_the_text_before_it(pair: Pair) -> None:
    job = Job(prompt(2, 20), 30)
    whole = text_of(Served(*pair).together([job])[0])
    stop = whole[8:11]
    for mtp in ("off", "on"):
        items = Served(*pair, mtp=mtp).together([replace(job, stop=("never there", stop)), *jobs(2)])[0]
        assert text_of(items) == whole[: whole.index(stop)]
        assert (end_of(items).reason, end_of(items).stop) == ("stop", stop)


def test_the_end_of_the_text_is_no_part_of_it(pair: Pair) -> None:
    model, tokenizer = pair
    job = Job(prompt(2, 20), 30, top_logprobs=0)
    ids = [token.id for token in told(Served(model, tokenizer).together([job])[0])[1]]
    with patch.object(type(tokenizer), "eos_token_ids", {ids[5]}, create=True):
        for mtp in ("off", "on"):
            items = Served(model, tokenizer, mtp=mtp).together([job, *jobs(2)])[0]
            _, tokens, reason, stop, completed = told(items)
            assert (reason, stop, completed) == ("stop", None, ids.index(ids[5]) + 1)
            assert [token.id for token in tokens] == ids[: ids.index(ids[5])]


def test_between_two_chunks_of_a_long_prompt_the_others_get_a_token(pair: Pair) -> None:
    with patch.object(scheduling, "_BESIDE_CPU", 8):
        served = Served(*pair)
    first = served.add(Job(prompt(0, 5), 100))
    served.until(first, 3)
    long = served.add(Job(prompt(1, 200), 5))
    while not long.tokens:
        before = len(first.tokens), long.read
        served.scheduler.turn()
        assert len(first.tokens) == before[0] + 1
        assert long.read - before[1] <= 8


def test_a_short_prompt_does_not_wait_for_a_long_one(pair: Pair) -> None:
    served = Served(*pair, step_size=8)
    long = served.add(Job(prompt(1, 400), 5))
    served.scheduler.turn()
    short = served.add(Job(prompt(2, 10), 2))
    served.until(short, 2)
    assert long.read < 60


@pytest.mark.parametrize("mtp", ["off", "on"])
@pytest.mark.parametrize("phase", ["queued", "prompt", "decoding"])
def test_one_that_is_cancelled_is_gone_after_one_turn(pair: Pair, mtp: str, phase: str) -> None:
    served = Served(*pair, mtp=mtp, step_size=8)
    sequence = served.add(Job(prompt(1, 100), 50))
    if phase == "prompt":
        served.scheduler.turn()
    elif phase == "decoding":
        served.until(sequence, 3)
    sequence.stream.cancel()
    served.scheduler.turn()
    assert not served.scheduler.busy
    assert end_of(list(sequence.stream)).reason == "cancelled"


def test_those_beside_one_that_is_cancelled_go_on_unchanged(pair: Pair) -> None:
    asked = jobs(4, 20)
    alone = [told(items) for items in Served(*pair).one_by_one(asked)]
    served = Served(*pair)
    sequences = [served.add(job) for job in asked]
    served.until(sequences[3], 4)
    sequences[1].stream.cancel()
    served.finish()
    items = [list(sequence.stream) for sequence in sequences]
    assert [told(items[n]) for n in (0, 2, 3)] == [alone[n] for n in (0, 2, 3)]
    assert end_of(items[1]).reason == "cancelled"


@pytest.fixture
def broken(pair: Pair) -> Iterator[int]:
    """A token that the model computes no finite logits from."""
    model, _ = pair
    weight = model.model.embed_tokens.weight
    changed = mx.array(np.array(weight))
    changed[250] = mx.nan
    model.model.embed_tokens.weight = changed
    yield 250
    model.model.embed_tokens.weight = weight


@pytest.mark.parametrize("mtp", ["off", "on"])
def test_logits_that_are_not_finite_end_that_request_alone(pair: Pair, broken: int, mtp: str) -> None:
    good = [replace(job, prompt=tuple(t for t in job.prompt if t != broken)) for job in jobs(3, 10)]
    alone = [told(items) for items in Served(*pair).one_by_one(good)]
    served = Served(*pair, mtp=mtp)
    bad = served.add(Job((1, 2, broken, 3), 10))
    sequences = [served.add(job) for job in good]
    served.finish()
    with pytest.raises(Fault, match=r"logits.* not finite"):
        list(bad.stream)
    assert [told(list(sequence.stream)) for sequence in sequences] == alone


@pytest.mark.parametrize("company", [False, True])
def test_turns_of_a_chat_and_of_another_between_them_are_not_read_again(pair: Pair, company: bool) -> None:
    served, cold = Served(*pair, prefix_bytes=10**9), Served(*pair)
    if company:
        served.until(served.add(Job(prompt(7, 20), 10_000)), 3)
    chats = [prompt(n, 40) for n in range(2)]
    for turn in range(3):
        for number, chat in enumerate(chats):
            job = Job(chat, 12, top_logprobs=0)
            sequence = served.add(job)
            served.until(sequence, 12)
            items = list(sequence.stream)
            assert told(items) == told(cold.together([job])[0])
            decoded = tuple(token.id for token in told(items)[1])
            if turn:
                assert usage_of(items).cached_tokens == len(chat) - 9 - 1
            chats[number] = (*chat, *decoded, *prompt(10 + turn, 9))


@pytest.mark.parametrize("together", [False, True])
def test_a_beginning_that_prompts_share_is_read_twice_and_then_no_more(pair: Pair, together: bool) -> None:
    served, cold = Served(*pair, prefix_bytes=10**9), Served(*pair)
    shared = prompt(0, 50)
    asked = [Job((*shared, *prompt(n, 20)), 8) for n in range(1, 5)]
    results = served.one_by_one(asked[:2])
    results += served.together(asked[2:]) if together else served.one_by_one(asked[2:])
    assert [usage_of(items).cached_tokens for items in results] == [0, 0, 50, 50]
    assert [told(items) for items in results] == [told(items) for items in cold.one_by_one(asked)]


def test_the_same_prompt_again_is_read_but_for_its_last_token(pair: Pair) -> None:
    served = Served(*pair, prefix_bytes=10**9)
    job = Job(prompt(0, 50), 8)
    first, second, *rest = served.one_by_one([job, job]) + served.together([job, job, job])
    assert told(first) == told(second)
    assert all(told(items) == told(first) and usage_of(items).cached_tokens == 49 for items in [second, *rest])
    assert served.totals.cached_tokens == 4 * 49
    assert served.totals.prompt_tokens == 5 * 50


def test_a_head_drafts_after_a_known_prompt_as_after_one_that_was_read(embedded: Pair) -> None:
    policy = Policy(mtp="on", max_steps=2)
    served = Served(*embedded, mtp="on", prefix_bytes=10**9, policy=policy)
    ids = tuple(embedded[1].encode(SOURCE))
    first, second = served.one_by_one([Job(ids, 16)] * 2)
    assert usage_of(second).cached_tokens == len(ids) - 1
    assert _drafts(first) == _drafts(second)
    longer = Job((*ids, *ids[:20]), 16)
    [warm], [cold] = served.together([longer]), Served(*embedded, mtp="on", policy=policy).together([longer])
    assert usage_of(warm).cached_tokens == len(ids) - 1
    assert told(warm) == told(cold)
    assert _drafts(warm) == _drafts(cold)


def test_a_head_knows_a_text_that_it_has_drafted_for(embedded: Pair) -> None:
    policy = Policy(mtp="on", max_steps=2)
    served = Served(*embedded, mtp="on", prefix_bytes=10**9, policy=policy)
    ids = tuple(embedded[1].encode(SOURCE))
    [items] = served.together([Job(ids, 16, top_logprobs=0)])
    decoded = tuple(token.id for token in told(items)[1])
    longer = Job((*ids, *decoded, *ids[:20]), 16)
    [warm], [cold] = served.together([longer]), Served(*embedded, mtp="on", policy=policy).together([longer])
    assert usage_of(warm).cached_tokens == len(ids) + len(decoded) - 1
    assert told(warm) == told(cold)
    assert usage_of(warm).accepted >= usage_of(cold).accepted - 1


def _drafts(items: list[Item]) -> tuple[int, int]:
    return usage_of(items).drafted, usage_of(items).accepted
