"""Speculative decoding writes what plain decoding writes, and leaves the caches as plain decoding leaves them."""

from collections.abc import Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from strata_mlx import Fault, InputError, RetentionPolicy
from strata_mlx.engine import generate_step
from strata_mlx.models.moe import set_routing
from strata_mlx.models.trunk import Hidden, Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.routing import Residency, Routing, RoutingPolicy, select_ops, verify_window
from strata_mlx.speculation import decoder
from strata_mlx.speculation.decoder import SpeculativeDecoder
from strata_mlx.speculation.draft import MTPDrafter, PromptLookupDrafter, Step
from strata_mlx.speculation.sampling import Sampling
from strata_mlx.speculation.window import Window
from tests.errors import refuses
from tests.speculation.caches import difference

PROMPT = mx.array([72, 3, 200, 3, 15, 99, 0, 31, 72, 3, 120, 41])
COUNT = 24
TOLERANCE = 1e-5
POLICIES = {
    "flat": RetentionPolicy(0.005),
    "schedule": RetentionPolicy(schedule=(0.0, 0.008, 0.006)),
    "cumulative": RetentionPolicy(min_cum_p=1e-5),
    "both": RetentionPolicy(schedule=(0.004,), min_cum_p=1e-6),
    "every draft": RetentionPolicy(),
}


def plain(model: nn.Module, count: int = COUNT, **options: Any) -> list[int]:
    return [token for token, _ in generate_step(PROMPT, model, max_tokens=count, **options)]


def decode(model: nn.Module, tokenizer: Any = None, max_tokens: int = COUNT, **options: Any) -> list[int]:
    options = {"prompt": PROMPT, "max_steps": 3, **options}
    return [each.token for each in SpeculativeDecoder(model, tokenizer, max_tokens=max_tokens, **options)]


def ends_with(token: int) -> Any:
    return SimpleNamespace(eos_token_ids={token})


class Script:
    """Drafts ``text``, in each round so many right tokens as ``right`` says and then wrong ones."""

    def __init__(self, text: list[int], *right: int, head: MTPDrafter | None = None):
        self.text, self.right, self.position, self.round, self.head = text, right, -int(PROMPT.size) + 1, 0, head

    def observe(self, tokens: mx.array, hidden: Hidden) -> None:
        self.position += tokens.size
        if self.head:
            self.head.observe(tokens, hidden)

    def catch_up(self) -> list[mx.array]:
        return self.head.catch_up() if self.head else []

    def steps(self) -> Iterator[Step]:
        own = self.head.steps() if self.head else iter(())
        right = self.right[min(self.round, len(self.right) - 1)]
        self.round += 1
        for i in range(8):
            next(own, None)
            token = self.text[self.position + i] if self.position + i < len(self.text) else 0
            yield Step(mx.array([token if i < right else token ^ 1], mx.uint32), mx.array(0.5))


def after(model: nn.Module, tokens: list[int]) -> list[Any]:
    """The cache after the prompt and ``tokens``, one by one."""
    cache = make_cache(model)
    model(PROMPT[None, :-1], cache=cache)
    for token in [PROMPT[-1], *map(mx.array, tokens)]:
        model(token[None, None], cache=cache)
    return cache


# The text


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafting", ["chained", "stepwise"])
@pytest.mark.parametrize("max_steps", [1, 2, 3, 7, 8])
def test_the_head_does_not_change_the_text(model: nn.Module, max_steps: int, drafting: str, policy: str) -> None:
    options: Any = {"max_steps": max_steps, "drafting": drafting, "retention": POLICIES[policy]}
    assert decode(model, **options) == plain(model)


@pytest.mark.parametrize("right", range(9))
def test_right_drafts_give_the_same_text_in_fewer_rounds(model: nn.Module, right: int) -> None:
    text = plain(model)
    decoder = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=COUNT, max_steps=8, drafter=Script(text, right))
    tokens = list(decoder)
    assert [each.token for each in tokens] == text
    assert sum(each.accepted for each in decoder.rounds) == sum(each.from_draft for each in tokens)
    assert decoder.rounds[1].accepted == right
    assert sum(each.committed for each in decoder.rounds) == COUNT
    assert not right or len(decoder.rounds) <= 2 + COUNT // right


def test_logprobs_are_those_of_plain_decoding(model: nn.Module) -> None:
    expected = [logprobs for _, logprobs in generate_step(PROMPT, model, max_tokens=COUNT)]
    script = Script(plain(model), 0, 3, 1, 7)
    decoder = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=COUNT, drafter=script)
    for token, wanted in zip(decoder, expected, strict=True):
        assert token.logprobs.shape == wanted.shape
        assert mx.abs(token.logprobs - wanted).max() < 1e-4


def test_only_gates_wait_for_confidences(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all drafts are kept, the window is launched while they are still being made."""
    told: list[str] = []
    for name in ("_confidence", "_launch"):
        owner = decoder if name == "_confidence" else SpeculativeDecoder
        own = getattr(owner, name)

        def tell(*args: Any, own: Any = own, name: str = name, **kwargs: Any) -> Any:
            told.append(name)
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, tell)
    for retention, first in ((RetentionPolicy(), "_launch"), (RetentionPolicy(1e-9), "_confidence")):
        told.clear()
        decode(model, max_tokens=5, max_steps=2, retention=retention)
        assert told[0] == "_launch"  # of the prompt's last token
        assert told[1] == first
        assert "_confidence" in told


@pytest.mark.parametrize("count", range(14))
def test_max_tokens_is_exact(model: nn.Module, count: int) -> None:
    text = plain(model)
    assert decode(model, max_tokens=count, drafter=Script(text, 4), max_steps=4) == text[:count]


@pytest.mark.parametrize("place", range(12))
def test_the_text_ends_at_a_stop_token_inside_a_window(model: nn.Module, place: int) -> None:
    text = plain(model)
    end = text.index(text[place]) + 1
    script = Script(text, 5)
    decoder = SpeculativeDecoder(
        model, ends_with(text[place]), prompt=PROMPT, max_tokens=-1, max_steps=5, drafter=script
    )
    assert [each.token for each in decoder] == text[:end]
    assert difference(decoder.cache, after(model, text[: end - 1])) <= TOLERANCE


def test_short_prompts_are_enough(model: nn.Module) -> None:
    for prompt in (PROMPT[:1], PROMPT[:2]):
        expected = [token for token, _ in generate_step(prompt, model, max_tokens=8)]
        assert decode(model, prompt=prompt, max_tokens=8) == expected


@pytest.mark.parametrize("step_size", [1, 3, 100])
def test_the_prompt_may_be_read_in_pieces(model: nn.Module, step_size: int) -> None:
    seen: list[tuple[int, int]] = []
    options: Any = {"prefill_step_size": step_size, "prompt_progress_callback": lambda *done: seen.append(done)}
    assert decode(model, **options) == plain(model)
    assert seen[0] == (0, 12)
    assert seen[-1] == (12, 12)


def test_two_texts_at_once_do_not_disturb_each_other(model: nn.Module) -> None:
    text = plain(model)
    one = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=COUNT, drafter=Script(text, 2, 0, 1))
    two = SpeculativeDecoder(model, prompt=PROMPT[:7], max_tokens=COUNT)
    pairs = list(zip(one, two, strict=True))
    assert [each.token for each, _ in pairs] == text
    assert [each.token for _, each in pairs] == decode(model, prompt=PROMPT[:7])


# Caches


@pytest.mark.parametrize("right", range(8))
def test_caches_are_as_after_plain_decoding_for_every_accepted_length(model: nn.Module, right: int) -> None:
    text, head = plain(model, 40), MTPDrafter(model)
    script = Script(text, right, head=head)
    decoder = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=40, max_steps=7, drafter=script)
    tokens = [each.token for each in islice(decoder, 2 + right)]
    assert tokens == text[: 2 + right]
    assert (decoder.rounds[1].rows, decoder.rounds[1].accepted) == (8, right)
    assert difference(decoder.cache, after(model, tokens[:-1])) <= TOLERANCE
    assert difference(caught_up(head), true_head_cache(model, tokens)) <= TOLERANCE


def test_caches_stay_right_over_many_rounds(model: nn.Module) -> None:
    text, head = plain(model, 60), MTPDrafter(model)
    script = Script(text, 0, 7, 1, 3, 2, 0, 5, 6, 4, head=head)
    decoder = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=50, max_steps=8, drafter=script)
    tokens = [each.token for each in decoder]
    assert tokens == text[:50]
    assert difference(decoder.cache, after(model, tokens[:-1])) <= TOLERANCE
    assert difference(caught_up(head), true_head_cache(model, tokens)) <= TOLERANCE


def caught_up(head: MTPDrafter) -> list[Any]:
    head.catch_up()
    return head.cache


def true_head_cache(model: nn.Module, tokens: list[int]) -> list[Any]:
    """Of the head, when it reads the prompt and the tokens that plain decoding gives at one go."""
    trunk, text = Trunk(model), mx.concatenate([PROMPT, mx.array(tokens)])[None]
    cache = MTPDrafter(model).cache
    model.mtp(trunk.embed(text[:, 1:]), trunk(text[:, :-1], make_cache(model)).after, cache)
    return cache


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("taken", range(1, 12))
def test_a_text_that_is_closed_early_leaves_what_was_taken(model: nn.Module, taken: int, auto: bool) -> None:
    text = plain(model)
    decoder = SpeculativeDecoder(
        model, prompt=PROMPT, max_tokens=COUNT, max_steps=5, auto=auto, drafter=Script(text, 4, 1)
    )
    assert [each.token for each in islice(decoder, taken)] == text[:taken]
    decoder.close()
    assert difference(decoder.cache, after(model, text[: taken - 1])) <= TOLERANCE
    assert list(decoder) == []


def test_a_cache_is_continued(model: nn.Module) -> None:
    text, cache = plain(model), make_cache(model)
    first = decode(model, max_tokens=9, prompt_cache=cache, drafter=Script(text, 2))
    rest = SpeculativeDecoder(model, prompt=first[-1:], max_tokens=COUNT - 9, prompt_cache=cache)
    assert first + [each.token for each in rest] == text


# Processors and samplers


@pytest.mark.parametrize("right", [0, 2, 5])
def test_logits_processors_give_the_text_of_plain_decoding(model: nn.Module, right: int) -> None:
    def processors() -> Any:
        return make_logits_processors(repetition_penalty=1.6, presence_penalty=0.5, frequency_penalty=0.3)

    text = plain(model, logits_processors=processors())
    assert text != plain(model)
    assert decode(model, drafter=Script(text, right), max_steps=5, logits_processors=processors()) == text


def test_logits_processors_see_committed_tokens_only(model: nn.Module) -> None:
    text = plain(model)
    seen: list[list[int]] = []

    def watch(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append([int(token) for token in tokens.tolist()])  # type: ignore[union-attr, arg-type]
        return logits

    for token in SpeculativeDecoder(
        model, prompt=PROMPT, max_tokens=8, drafter=Script(text, 2), logits_processors=[watch], max_steps=3
    ):
        assert token.token in text
    right = [[int(t) for t in PROMPT.tolist()] + text[:n] for n in range(9)]  # type: ignore[union-attr, arg-type]
    for number in range(8):
        assert right[number] in seen  # every committed token was chosen from logits that saw just what is before it


@pytest.mark.parametrize("sampler", [Sampling(0), Sampling(1e-4), Sampling(2.0, top_k=1), Sampling(1.0, top_p=1e-6)])
def test_sampling_with_one_choice_is_greedy(model: nn.Module, sampler: Sampling) -> None:
    text = plain(model)
    assert decode(model, sampler=sampler) == text
    assert decode(model, sampler=sampler, drafter=Script(text, 3)) == text


SAMPLERS = [Sampling(0.8, top_p=0.9), Sampling(1.5, top_k=5), Sampling(1.0, min_p=0.2), make_sampler(0.7)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["top-p", "top-k", "min-p", "a function"])
@pytest.mark.parametrize("drafting", ["chained", "stepwise"])
def test_a_seed_repeats_a_sampled_text(model: nn.Module, sampler: Any, drafting: str) -> None:
    def seeded(seed: int) -> list[int]:
        mx.random.seed(seed)
        return decode(model, sampler=sampler, drafting=drafting)

    assert seeded(1) == seeded(1)
    assert len({tuple(seeded(seed)) for seed in range(4)}) > 1


def test_any_sampler_confirms_the_drafts_that_it_repeats(model: nn.Module) -> None:
    def second(logprobs: mx.array) -> mx.array:
        return mx.argsort(logprobs, axis=-1)[:, -2]

    text = plain(model, sampler=second)
    options: Any = {"drafter": Script(text, 3), "sampler": second, "max_steps": 3}
    decoder = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=COUNT, **options)
    assert [each.token for each in decoder] == text
    assert decoder.summary.accepted > COUNT // 2


# Prompt lookup


def song(tokens: mx.array, logits: mx.array) -> mx.array:
    """A logits processor that makes a text of a refrain."""
    return mx.where(mx.arange(logits.shape[-1]) == 50 + tokens.size % 6, logits + 100, logits)


@pytest.mark.parametrize("role", ["drafter", "filler"])
def test_lookup_drafts_what_followed_before(model: nn.Module, role: str) -> None:
    options: Any = {role: PromptLookupDrafter(), "logits_processors": [song], "retention": RetentionPolicy(0.5)}
    options["max_steps"] = 3
    decoder = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=COUNT, **options)
    assert [each.token for each in decoder] == plain(model, logits_processors=[song])
    assert decoder.summary.accepted > COUNT // 3


def test_a_filler_fills_where_the_drafter_has_nothing(model: nn.Module) -> None:
    class Silent(Script):
        def steps(self) -> Iterator[Step]:
            return iter(())

    text = plain(model)
    options: Any = {"drafter": Silent([], 0), "filler": Script(text, 2), "max_steps": 3}
    decoder = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=COUNT, **options)
    assert [each.token for each in decoder] == text
    assert decoder.summary.drafted >= decoder.summary.retained > decoder.summary.accepted > COUNT // 3


def test_a_filler_that_disagrees_adds_nothing(model: nn.Module) -> None:
    text = plain(model)
    options: Any = {"drafter": Script(text, 1), "filler": Script(text, 0), "retention": RetentionPolicy(0.9)}
    one = SpeculativeDecoder(model, prompt=PROMPT, max_tokens=COUNT, max_steps=3, drafting="stepwise", **options)
    assert [each.token for each in one] == text
    assert {each.retained for each in one.rounds} <= {0, 1}  # stepwise drafting keeps its first draft of all


def test_a_model_without_a_head_can_look_up(model: nn.Module) -> None:
    head = model.pop("mtp")
    text = decode(model, drafter=PromptLookupDrafter(), logits_processors=[song])
    model.mtp = head
    assert text == plain(model, logits_processors=[song])


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], [8, 1, 2, 3]),  # the latest of two
        ([0, 1, 2, 3, 9, 7, 1, 2, 3, 8, 0, 1, 2, 3], [9, 7, 1, 2, 3, 8, 0, 1, 2, 3]),  # the longest first
        ([1, 2, 9, 1, 2], []),  # too short
        ([5, 5, 5, 5], [5]),
        ([1, 2, 3], []),
        ([], []),
    ],
)
def test_the_longest_repeated_suffix_is_found(context: list[int], expected: list[int]) -> None:
    drafter, nothing = PromptLookupDrafter(), Hidden(mx.zeros((1, 0, 1)), mx.zeros((1, 0, 1)))
    for token in context:
        drafter.observe(mx.array([token], mx.uint32), nothing)
    assert [int(step.token.item()) for step in drafter.steps()] == expected  # type: ignore[arg-type]


# Routing


def test_the_rows_of_a_window_after_the_first_are_routed_as_drafts(model: nn.Module) -> None:
    kinds: list[list[bool]] = []

    def watch(logits: mx.array, resident: Any, tables: Any, draft_rows: mx.array, **options: Any) -> Any:
        kinds.append(draft_rows.tolist())  # type: ignore[arg-type]
        return select_ops(logits, resident, tables, draft_rows, **options)

    text = plain(model)
    everything = Residency({layer: np.ones(8, bool) for layer in range(8)})  # the bonus then favours nobody
    set_routing(model, Routing(RoutingPolicy(0.5), everything, executor=watch))
    decode(model, drafter=Script(text, 7), max_tokens=4, max_steps=2)
    set_routing(model, Routing())
    rows = {len(each): each for each in kinds}
    assert rows == {11: [False] * 11, 1: [False], 3: [False, True, True]}


def test_rows_are_routed_by_how_sure_the_head_is_of_what_follows(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the row of the last draft that is retained, too, where the head made another one."""
    told: list[list[float]] = []

    def watch(confidences: Sequence[mx.array] = ()) -> Any:
        told.append([float(np.array(each)) for each in confidences])
        return verify_window(confidences)

    monkeypatch.setattr(decoder, "verify_window", watch)
    floor = 0.0
    for some_are_left_out in (False, True):
        told.clear()
        text = SpeculativeDecoder(model, prompt=PROMPT, max_steps=3, max_tokens=COUNT, retention=RetentionPolicy(floor))
        assert len(list(text)) == COUNT
        expected = [list(each.confidences[: each.retained + 1]) for each in text.rounds]
        assert told == expected
        assert any(told)
        assert any(each.retained < len(each.confidences) for each in text.rounds) == some_are_left_out
        floor = float(np.median([p for each in text.rounds for p in each.confidences]))
    told.clear()
    decode(model, drafter=PromptLookupDrafter())
    assert not any(told)  # it looks at no probability


# What is refused


def test_a_model_that_was_loaded_without_its_head_is_refused(model: nn.Module) -> None:
    head = model.pop("mtp")
    with refuses(InputError, "mtp=True"):
        SpeculativeDecoder(model, prompt=PROMPT)
    model.mtp = head


def test_a_cache_that_cannot_be_rolled_back_is_refused_before_prefill(model: nn.Module) -> None:
    cache = make_cache(model, max_kv_size=64)
    assert any(isinstance(layer, RotatingKVCache) for layer in cache)
    with refuses(InputError, "RotatingKVCache", "max_kv_size", "mtp=False"):
        SpeculativeDecoder(model, prompt=PROMPT, prompt_cache=cache)
    assert all(layer.empty() for layer in cache)


@pytest.mark.parametrize(
    ("options", "mention"),
    [
        ({"max_steps": 0}, "max_steps is 0"),
        ({"max_steps": 9}, "max_steps is 9"),
        ({"max_tokens": -2}, "max_tokens is -2"),
        ({"drafting": "parallel"}, "'parallel'"),
        ({"prompt": []}, "empty"),
        ({"prompt": [259]}, "259"),
    ],
)
def test_arguments_out_of_range_are_named(model: nn.Module, options: dict[str, Any], mention: str) -> None:
    with refuses(InputError, mention):
        SpeculativeDecoder(model, **{"prompt": PROMPT, **options})


def test_logits_that_are_not_finite_are_a_fault(model: nn.Module) -> None:
    def breaks(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits * (mx.nan if tokens.size == PROMPT.size + 3 else 1)

    decoder = SpeculativeDecoder(model, prompt=PROMPT, drafter=Script(plain(model), 0), logits_processors=[breaks])
    with refuses(Fault, "not finite"):
        list(decoder)


# Mutants


def _one_more(self: Window, kept: int) -> None:
    COMMIT(self, min(kept + 1, self.rows))


def _one_less(self: Window, kept: int) -> None:
    COMMIT(self, max(kept - 1, 0))


def _everything(self: Window, kept: int) -> None:  # noqa: ARG001
    COMMIT(self, self.rows)


COMMIT = Window.commit


@pytest.mark.parametrize("mutant", [_one_more, _one_less, _everything])
def test_a_wrong_commit_would_be_seen(model: nn.Module, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Window, "commit", mutant)
    with pytest.raises(AssertionError):
        test_caches_are_as_after_plain_decoding_for_every_accepted_length(model, 3)


def _never_trimmed(self: MTPDrafter) -> list[mx.array]:
    self._chain = None
    return CATCH_UP(self)


def _not_caught_up(self: MTPDrafter) -> list[mx.array]:
    self._observed = [(tokens[-1:], hidden[:, -1:]) for tokens, hidden in self._observed]
    return CATCH_UP(self)


def _wrong_hidden(self: MTPDrafter) -> list[mx.array]:
    self._observed = [(tokens, hidden * 0) for tokens, hidden in self._observed]
    return CATCH_UP(self)


CATCH_UP = MTPDrafter.catch_up


@pytest.mark.parametrize("mutant", [_never_trimmed, _not_caught_up, _wrong_hidden])
def test_a_head_that_is_behind_would_be_seen(model: nn.Module, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MTPDrafter, "catch_up", mutant)
    with pytest.raises(AssertionError):
        test_caches_stay_right_over_many_rounds(model)
