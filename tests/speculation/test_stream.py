"""stream_generate() with drafts: the same responses, and who may draft."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import mlx.nn as nn
import pytest

from strata_mlx import GenerationResponse, InputError, generate, stream_generate
from strata_mlx.prefill import make_cache
from tests.errors import refuses
from tests.speculation.caches import difference

PROMPT = "def quick"


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe"])
def pair(request: pytest.FixtureRequest, pairs: dict[str, Any]) -> Any:
    return pairs[request.param]


def stream(pair: Any, count: int = 20, **options: Any) -> Iterator[GenerationResponse]:
    model, tokenizer = pair
    return stream_generate(model, tokenizer, PROMPT, count, **options)


@pytest.mark.parametrize("mtp", [True, "auto"])
def test_responses_are_those_of_plain_decoding(pair: Any, mtp: bool | str) -> None:
    ours, plain = list(stream(pair, mtp=mtp)), list(stream(pair, mtp=False))
    for name in ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason"):
        assert [getattr(each, name) for each in ours] == [getattr(each, name) for each in plain]
    assert plain[-1].speculation is None
    summary = ours[-1].speculation
    assert summary is not None
    assert sum(each.from_draft for each in ours) == summary.accepted
    assert summary.rounds + summary.accepted == 20


def test_from_draft_marks_the_accepted_drafts(embedded: Any) -> None:
    model, tokenizer = embedded
    responses = list(stream_generate(model, tokenizer, "class Stack:", 40, mtp=True))
    summary = responses[-1].speculation
    assert summary is not None
    assert sum(each.from_draft for each in responses) == summary.accepted > 15
    assert not responses[0].from_draft
    expected = generate(model, tokenizer, "class Stack:", max_tokens=40, mtp=False)
    assert "".join(each.text for each in responses) == expected


def test_drafts_are_accepted_about_as_often_as_the_head_was_right_in_training(embedded: Any) -> None:
    model, tokenizer = embedded
    last = list(stream_generate(model, tokenizer, "import os\n\n\ndef ", 100, mtp=True, max_steps=1))[-1].speculation
    assert last is not None
    assert last.accepted / last.drafted > 0.6


def test_a_stream_that_is_closed_leaves_the_cache_as_plain_decoding_does(pair: Any) -> None:
    model, tokenizer = pair
    cache, expected = make_cache(model), make_cache(model)
    responses = stream(pair, prompt_cache=cache, mtp=True)
    taken = [each.token for each in islice(responses, 7)]
    responses.close()  # type: ignore[attr-defined]
    prompt = tokenizer.encode(PROMPT)
    list(stream_generate(model, tokenizer, prompt + taken[:-1], 1, mtp=False, prompt_cache=expected))
    assert difference(cache, expected) <= 1e-5


@pytest.mark.parametrize("options", [{"max_kv_size": 64}, {"kv_bits": 4, "kv_group_size": 32}], ids=str)
def test_caches_that_cannot_be_rolled_back_are_refused_or_leave_auto_off(pair: Any, options: dict[str, Any]) -> None:
    with refuses(InputError, next(iter(options)), "mtp=False"):
        next(stream(pair, mtp=True, **options))
    assert next(stream(pair, mtp="auto", **options)).speculation is None
    assert list(stream(pair, mtp="auto", **options))[-1].text == list(stream(pair, mtp=False, **options))[-1].text


def test_a_rotating_prompt_cache_is_refused(pair: Any) -> None:
    with refuses(InputError, "RotatingKVCache"):
        next(stream(pair, mtp=True, prompt_cache=make_cache(pair[0], 64)))


def test_a_model_without_its_head_decodes_plainly_unless_drafts_are_asked_for(pair: Any) -> None:
    model: nn.Module = pair[0]
    head = model.pop("mtp")
    responses = list(stream(pair))
    with refuses(InputError, "mtp=True"):
        next(stream(pair, mtp=True))
    model.mtp = head
    assert responses[-1].speculation is None


@pytest.mark.parametrize("mtp", ["on", "yes", 2, None])
def test_another_word_for_mtp_is_refused(pair: Any, mtp: Any) -> None:
    with refuses(InputError, repr(mtp), "True, False or 'auto'"):
        next(stream(pair, mtp=mtp))
