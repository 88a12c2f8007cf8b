"""Decoding, compared with mlx_lm's on tiny models of every family."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import GenerationResponse as ReferenceResponse
from mlx_lm.generate import generate_step as reference_step
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from strata_mlx import Fault, GenerationResponse, InputError, generate, load, stream_generate
from strata_mlx.engine import encode, generate_step, summary
from strata_mlx.prefill import make_cache, prefill
from strata_mlx.prompt_cache import load_prompt_cache, save_prompt_cache
from tests.errors import refuses
from tests.tiny import EOS, FAMILIES, START, TINY, make_checkpoint

PROMPT = mx.array([72, 3, 200, 3, 15, 99, 0, 31, 72, 3, 120, 41])
Pair = tuple[nn.Module, TokenizerWrapper]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(root / family, family, "stacked") for family in FAMILIES}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Pair]:
    return {family: load(path) for family, path in folders.items()}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, loaded: dict[str, Pair]) -> nn.Module:
    return loaded[request.param][0]


@pytest.fixture(scope="module")
def pair(loaded: dict[str, Pair]) -> Pair:
    return loaded["qwen3_next"]


@pytest.fixture(scope="module")
def dense(loaded: dict[str, Pair]) -> nn.Module:
    """A model with attention in every layer."""
    return loaded["qwen3_moe"][0]


def script(tokens: Iterable[int]) -> Callable[[mx.array], mx.array]:
    """A sampler that takes these tokens, then the end of the text."""
    left = chain(tokens, repeat(EOS))
    return lambda _: mx.array([next(left)])


def collect(steps: Iterator[tuple[Any, mx.array]]) -> tuple[list[int], np.ndarray[Any, Any]]:
    pairs = list(steps)
    return [int(token) for token, _ in pairs], np.array([np.array(logprobs) for _, logprobs in pairs])


def same_as_mlx_lm(model: nn.Module, prompt: mx.array = PROMPT, max_tokens: int = 12, **options: Any) -> None:
    """Both decode the same tokens with the same log-probabilities, to the last bit."""
    mx.random.seed(7)
    tokens, logprobs = collect(generate_step(prompt, model, max_tokens=max_tokens, **options))
    mx.random.seed(7)
    expected, expected_logprobs = collect(reference_step(prompt, model, max_tokens=max_tokens, **options))
    assert tokens == expected
    np.testing.assert_array_equal(logprobs, expected_logprobs)


# Against mlx_lm


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_mlx_lm_with_its_own_loader(
    family: str, folders: dict[str, Path], loaded: dict[str, Pair]
) -> None:
    tokens, logprobs = collect(generate_step(PROMPT, loaded[family][0], max_tokens=24))
    expected, expected_logprobs = collect(reference_step(PROMPT, mlx_lm.load(str(folders[family]))[0], max_tokens=24))
    assert tokens == expected
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1], PROMPT[:2]], ids=["long", "one token", "two tokens"])
def test_greedy_decoding_equals_mlx_lms_for_every_family(model: nn.Module, prompt: mx.array) -> None:
    same_as_mlx_lm(model, prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"temp": 1.0},
        {"temp": 0.7, "top_p": 0.8},
        {"temp": 1.5, "top_k": 5},
        {"temp": 1.0, "min_p": 0.1, "min_tokens_to_keep": 3},
        {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    ],
    ids=lambda options: ",".join(options),
)
def test_sampled_tokens_equal_mlx_lms_under_the_same_seed(model: nn.Module, options: dict[str, Any]) -> None:
    same_as_mlx_lm(model, sampler=make_sampler(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 1.3, "repetition_context_size": 3},
        {"presence_penalty": 0.9, "frequency_penalty": 0.5},
        {"logit_bias": {5: 30.0, 0: -math.inf}},
    ],
    ids=lambda options: ",".join(options),
)
def test_logits_processors_see_the_same_tokens_as_in_mlx_lm(model: nn.Module, options: dict[str, Any]) -> None:
    same_as_mlx_lm(model, logits_processors=make_logits_processors(**options))
    same_as_mlx_lm(model, logits_processors=make_logits_processors(**options), prefill_step_size=4)


@pytest.mark.parametrize("start", [0, 10, 14, 100])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_kv_cache_gives_the_tokens_of_mlx_lm(model: nn.Module, bits: int, start: int) -> None:
    options: dict[str, Any] = {
        "kv_bits": bits,
        "kv_group_size": 32,
        "quantized_kv_start": start,
        "prefill_step_size": 5,
    }
    if TINY[model.model_type].quantises:
        same_as_mlx_lm(model, **options)
    else:
        with refuses(InputError, "kv_bits"):
            collect(generate_step(PROMPT, model, **options))


@pytest.mark.parametrize("step", [1, 3, 2048])
@pytest.mark.parametrize("size", [5, 8, 13, 64])
def test_a_bounded_cache_gives_the_tokens_of_mlx_lm(dense: nn.Module, size: int, step: int) -> None:
    same_as_mlx_lm(dense, max_kv_size=size, prefill_step_size=step, max_tokens=16)


@pytest.mark.parametrize("size", [5, 9])
def test_a_bounded_cache_bounds_the_attention_of_hybrid_models_too(loaded: dict[str, Pair], size: int) -> None:
    for family in ("qwen3_next", "qwen3_5_moe"):
        model = loaded[family][0]
        cache = make_cache(model, size)
        collect(generate_step(PROMPT, model, max_tokens=20, prompt_cache=cache))
        attention = [layer for layer in cache if isinstance(layer, RotatingKVCache)]
        assert [layer.keys.shape[2] for layer in attention] == [size]
        assert len(attention) < len(cache)


def test_a_bound_that_is_not_reached_changes_nothing(model: nn.Module) -> None:
    free = collect(generate_step(PROMPT, model, max_tokens=12))
    bounded = collect(generate_step(PROMPT, model, max_tokens=12, max_kv_size=64))
    assert bounded[0] == free[0]
    np.testing.assert_allclose(bounded[1], free[1], atol=1e-4)


def test_a_response_has_the_fields_of_mlx_lms_response() -> None:
    def fields(kind: Any) -> list[tuple[str, Any]]:
        return [(field.name, field.default) for field in dataclasses.fields(kind)]

    assert fields(GenerationResponse) == [*fields(ReferenceResponse), ("speculation", None), ("experts", None)]


def test_responses_equal_those_of_mlx_lm_in_all_but_time(pair: Pair) -> None:
    ids = [*pair[1].encode("¡Olé! 日本 🙂 "), EOS]
    for limit in (len(ids) - 6, len(ids), 500):
        ours = list(stream_generate(*pair, "x", max_tokens=limit, sampler=script(ids)))
        theirs = list(mlx_lm.stream_generate(*pair, "x", max_tokens=limit, sampler=script(ids)))
        for one, other in zip(ours, theirs, strict=True):
            for name in ("text", "token", "from_draft", "prompt_tokens", "generation_tokens", "finish_reason"):
                assert getattr(one, name) == getattr(other, name), name
            assert one.logprobs.shape == other.logprobs.shape


# Chunks of the prompt


@settings(max_examples=20, deadline=None, derandomize=True)
@given(length=st.integers(1, 40), step=st.integers(1, 45))
def test_the_size_of_prefill_chunks_does_not_matter(model: nn.Module, length: int, step: int) -> None:
    prompt = mx.arange(length) * 37 % 250
    whole, chunked = (
        collect(generate_step(prompt, model, max_tokens=3, sampler=script([9, 8, 7]), prefill_step_size=size))[1]
        for size in (2048, step)
    )
    np.testing.assert_allclose(chunked, whole, atol=2e-4)


def test_progress_is_reported_as_mlx_lm_reports_it(dense: nn.Module) -> None:
    for prompt, step in ((PROMPT, 4), (PROMPT, 2048), (PROMPT[:1], 4)):
        ours: list[tuple[int, int]] = []
        theirs: list[tuple[int, int]] = []
        for function, calls in ((generate_step, ours), (reference_step, theirs)):
            options: Any = {"prompt_progress_callback": lambda *call, calls=calls: calls.append(call)}
            collect(function(prompt, dense, max_tokens=2, prefill_step_size=step, **options))
        assert ours == theirs


# How long it goes on


@pytest.mark.parametrize("count", [1, 2, 7])
def test_exactly_max_tokens_come_and_the_last_is_not_run_through_the_model(
    dense: nn.Module, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    call = type(dense).__call__

    def counting(self: nn.Module, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        widths.append(tokens.shape[1])
        result: mx.array = call(self, tokens, *args, **kwargs)
        return result

    monkeypatch.setattr(type(dense), "__call__", counting)
    cache = make_cache(dense)
    tokens, _ = collect(generate_step(PROMPT, dense, max_tokens=count, prompt_cache=cache))
    assert len(tokens) == count
    assert widths == [PROMPT.size - 1] + [1] * count
    assert cache[0].offset == PROMPT.size + count - 1


@pytest.mark.parametrize(
    ("limit", "before", "reason"), [(-1, 5, "stop"), (-1, 0, "stop"), (5, 0, "stop"), (6, 5, "stop"), (5, 5, "length")]
)
def test_the_text_ends_at_the_end_token_or_the_limit(pair: Pair, limit: int, before: int, reason: str) -> None:
    ids = pair[1].encode("abcdefg")[:before]
    expected = [*ids, EOS]
    responses = list(stream_generate(*pair, "x", max_tokens=limit, sampler=script(ids)))
    assert [response.token for response in responses] == (expected if limit == -1 else expected[:limit])
    assert [response.finish_reason for response in responses] == [None] * (len(responses) - 1) + [reason]
    assert "".join(response.text for response in responses) == "abcdefg"[:before]
    assert responses[-1].generation_tokens == len(responses)
    assert responses[-1].prompt_tokens == 1


def test_without_a_limit_generate_step_goes_on_past_the_end_token(dense: nn.Module) -> None:
    tokens = [token for token, _ in islice(generate_step(PROMPT, dense, max_tokens=-1, sampler=script([])), 100)]
    assert tokens == [EOS] * 100


# Text


@settings(max_examples=40, deadline=None, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12))
def test_segments_join_to_the_text_even_where_tokens_split_a_character(pair: Pair, text: str) -> None:
    """mlx_lm's detokenizer drops one space at the beginning, and writes the zero byte as U+0100."""
    ids = pair[1].encode(text)
    responses = list(stream_generate(*pair, [1], sampler=script(ids)))
    assert len(responses) == len(text.encode()) + 1
    assert pair[1].decode(ids) == text
    assert "".join(response.text for response in responses) == text.removeprefix(" ")


def test_no_segment_holds_half_a_character(pair: Pair) -> None:
    segments = [response.text for response in stream_generate(*pair, [1], sampler=script(pair[1].encode("🙂é")))]
    assert [segment for segment in segments if segment] == ["🙂", "é"]


def test_bytes_that_are_no_text_become_replacement_characters(pair: Pair) -> None:
    cut = pair[1].encode("a🙂")[:-1]
    assert generate(*pair, [1], sampler=script(cut)) == "a�"


def test_text_list_and_array_are_the_same_prompt(pair: Pair) -> None:
    ids = pair[1].encode("hello")
    prompts: tuple[Any, ...] = ("hello", ids, tuple(ids), np.array(ids), mx.array(ids), mx.array(ids, dtype=mx.uint8))
    assert len({generate(*pair, prompt, max_tokens=8) for prompt in prompts}) == 1


def test_a_plain_transformers_tokenizer_will_do(pair: Pair) -> None:
    model, tokenizer = pair
    assert generate(model, tokenizer._tokenizer, "hello", max_tokens=8) == generate(*pair, "hello", max_tokens=8)


def test_the_beginning_of_sequence_token_comes_once(tmp_path: Path) -> None:
    tokenizer = load(with_bos(make_checkpoint(tmp_path / "bos", "qwen3_moe", "stacked")))[1]
    bos = tokenizer.bos_token_id
    assert encode(tokenizer, "hi")[0].item() == bos
    assert encode(tokenizer, f"{START}hi").tolist() == encode(tokenizer, "hi").tolist()
    assert encode(tokenizer, [5]).tolist() == [5]


def with_bos(path: Path) -> Path:
    """Let the checkpoint's tokenizer begin every text with a token."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{", f'{{"bos_token": "{START}", ', 1))
    return path


def test_verbose_prints_the_text_and_the_speeds_as_mlx_lm_does(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    text = generate(*pair, "hello", verbose=True, max_tokens=5)
    ours = capsys.readouterr().out
    mlx_lm.generate(*pair, "hello", verbose=True, max_tokens=5)
    theirs = capsys.readouterr().out
    assert ours.startswith(text)
    words = [[word for word in output.split() if not word[0].isdigit()] for output in (ours, theirs)]
    assert words[0][-11:] == words[1][-11:]


def test_speeds_are_those_of_the_response() -> None:
    response = GenerationResponse("", 0, mx.array(0), False, 12, 345.6789, 5, 0.12345, 1.5)
    assert summary(response).splitlines() == [
        "Prompt: 12 tokens, 345.679 tokens-per-sec",
        "Generation: 5 tokens, 0.123 tokens-per-sec",
        "Peak memory: 1.500 GB",
    ]


# Prompt caches


@pytest.mark.parametrize("saved", [False, True], ids=["in memory", "saved and loaded"])
@pytest.mark.parametrize("kind", [{}, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}], ids=["plain", "q"])
@pytest.mark.parametrize("cut", [1, 6, 11])
def test_continuing_a_prompt_cache_equals_one_long_prompt(
    model: nn.Module, cut: int, kind: dict[str, Any], saved: bool, tmp_path: Path
) -> None:
    if kind and not TINY[model.model_type].quantises:
        return
    cache = make_cache(model)
    prefill(PROMPT[:cut], model, cache, **kind)
    assert any(isinstance(layer, QuantizedKVCache) for layer in cache) == bool(kind)
    if saved:
        save_prompt_cache(tmp_path / "p.safetensors", cache, "model")
        cache, _ = load_prompt_cache(tmp_path / "p.safetensors", "model")
    continued = collect(generate_step(PROMPT[cut:], model, max_tokens=12, prompt_cache=cache))
    # The quantised state of the first part is read by the second, so the long prompt is read in the same parts.
    reference = make_cache(model)
    if kind:
        for part in (PROMPT[:cut], PROMPT[cut:-1]):
            if part.size:
                prefill(part, model, reference, **kind)
        whole = collect(generate_step(PROMPT[-1:], model, max_tokens=12, prompt_cache=reference))
    else:
        whole = collect(generate_step(PROMPT, model, max_tokens=12))
    assert continued[0] == whole[0]
    np.testing.assert_allclose(continued[1], whole[1], atol=1e-4)


def test_the_cache_afterwards_continues_where_the_text_stopped(model: nn.Module) -> None:
    expected, _ = collect(generate_step(PROMPT, model, max_tokens=10))
    cache = make_cache(model)
    first, _ = collect(generate_step(PROMPT, model, max_tokens=4, prompt_cache=cache))
    second, _ = collect(generate_step(mx.array(first[-1:]), model, max_tokens=6, prompt_cache=cache))
    assert first + second == expected


# What cannot be done


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([], {}, "prompt is empty"),
        ("", {}, "prompt is empty"),
        ([3, 259], {}, "token id 259"),
        ([3, 2**40], {}, "token id 1099511627776"),
        ([3, 2**70], {}, "prompt"),
        ([-1, 3], {}, "token id -1"),
        ([1.5, 2.0], {}, "float32"),
        ([True], {}, "bool"),
        ([[1, 2]], {}, "(1, 2)"),
        (mx.array(3), {}, "token ids"),
        (["a"], {}, "token ids"),
        ([1, None], {}, "token ids"),
        (7, {}, "token ids"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"max_tokens": -2}, "max_tokens is -2"),
        ([1], {"prefill_step_size": 0}, "prefill_step_size is 0"),
        ([1], {"prefill_step_size": -5}, "prefill_step_size is -5"),
        ([1], {"kv_bits": 7}, "7 bits"),
        ([1], {"kv_bits": 4, "kv_group_size": 48}, "groups of 48"),
        ([1], {"kv_bits": 4, "kv_group_size": 64}, "head dimension 32"),
        ([1], {"kv_bits": 4, "kv_group_size": 32, "max_kv_size": 8}, "not both"),
        ([1], {"max_kv_size": 4}, "max_kv_size is 4"),
        ([1], {"max_kv_size": 0}, "max_kv_size is 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_out_of_range_are_refused_in_one_line(
    pair: Pair, prompt: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError) as caught:
        list(stream_generate(*pair, prompt, **options))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_prompt_that_is_one_number_is_refused(dense: nn.Module) -> None:
    with pytest.raises(InputError, match="shape"):
        next(generate_step(mx.array(3), dense))


def test_a_cache_in_another_precision_than_asked_for_is_refused(dense: nn.Module) -> None:
    cache = make_cache(dense)
    prefill(PROMPT, dense, cache, kv_bits=4, kv_group_size=32, quantized_kv_start=0)
    with pytest.raises(InputError, match="4 bits in groups of 32"):
        next(generate_step(PROMPT, dense, prompt_cache=cache, kv_bits=8, kv_group_size=32))
    collect(generate_step(PROMPT, dense, max_tokens=1, prompt_cache=cache, kv_bits=4, kv_group_size=32))
    collect(generate_step(PROMPT, dense, max_tokens=1, prompt_cache=cache))


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("column", [0, 100])
def test_a_logit_that_is_not_finite_is_a_fault_that_names_the_token(
    model: nn.Module, value: float, count: int, column: int
) -> None:
    calls = []

    def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(tokens.size)
        spoilt = mx.arange(logits.shape[-1]) == column
        return mx.where(spoilt, value, logits) if len(calls) >= count else logits

    steps = generate_step(PROMPT, model, max_tokens=6, logits_processors=[spoil])
    assert len(list(islice(steps, count - 1))) == count - 1
    with pytest.raises(Fault, match=f"token {count} are not finite"):
        next(steps)


def test_broken_weights_are_a_fault(tmp_path: Path) -> None:
    model, _ = load(make_checkpoint(tmp_path / "nan", "qwen3_moe", "stacked"))
    model.model.layers[0].self_attn.q_proj.weight = mx.full((64, 64), math.nan)
    with pytest.raises(Fault, match="token 1 are not finite"):
        collect(generate_step(PROMPT, model, max_tokens=3))


def test_work_that_the_device_cannot_do_is_a_fault(dense: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    monkeypatch.setattr(mx, "async_eval", fail)
    with pytest.raises(Fault, match=r"computing token 1: \[malloc\]"):
        collect(generate_step(PROMPT, dense, max_tokens=3))


# Generators


def test_a_generator_that_is_closed_early_leaves_model_and_cache_usable(model: nn.Module) -> None:
    expected, _ = collect(generate_step(PROMPT, model, max_tokens=8))
    cache = make_cache(model)
    steps = generate_step(PROMPT, model, max_tokens=-1, prompt_cache=cache)
    first = [token for token, _ in islice(steps, 3)]
    steps.close()  # type: ignore[attr-defined]
    assert first == expected[:3]
    assert collect(generate_step(PROMPT, model, max_tokens=8))[0] == expected
    rest, _ = collect(generate_step(mx.array(expected[3:4]), model, max_tokens=4, prompt_cache=cache))
    assert rest == expected[4:]


def test_two_generators_at_a_time_do_not_disturb_each_other(pair: Pair) -> None:
    texts = ("hello", "日本")
    alone = [generate(*pair, text, max_tokens=12) for text in texts]
    both = [[response.text for response in stream_generate(*pair, text, max_tokens=12)] for text in texts]
    mixed: list[str] = ["", ""]
    for responses in zip(*(stream_generate(*pair, text, max_tokens=12) for text in texts), strict=True):
        for i, response in enumerate(responses):
            mixed[i] += response.text
    assert mixed == ["".join(segments) for segments in both] == alone
