"""What may be asked of the engine."""

import math
from typing import Any

import pytest

from strata_mlx import InputError
from strata_mlx.server.jobs import Busy, Job, JobError


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("prompt", (), "the prompt is empty"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", 2.5, "a whole number"),
        ("max_tokens", True, "a whole number"),
        ("temperature", -0.1, "0 to 100"),
        ("temperature", math.nan, "a finite number"),
        ("temperature", "hot", "a number"),
        ("top_p", 1.1, "0 to 1"),
        ("min_p", -1, "0 to 1"),
        ("top_k", -1, "at least 0"),
        ("seed", 2**64, "expected"),
        ("seed", "x", "a whole number"),
        ("repetition_penalty", 0, "more than 0"),
        ("presence_penalty", 2.1, "-2 to 2"),
        ("frequency_penalty", -3, "-2 to 2"),
        ("logit_bias", {5: 101}, "logit_bias[5] is 101"),
        ("logit_bias", {5: math.inf}, "finite"),
        ("top_logprobs", 21, "0 to 20"),
        ("stop", ("",), "not empty"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(field: str, value: Any, said: str) -> None:
    values: dict[str, Any] = {"prompt": (1, 2), "max_tokens": 5, field: value}
    with pytest.raises(InputError) as caught:
        Job(**values)
    assert isinstance(caught.value, JobError)
    assert caught.value.field == field
    assert said in str(caught.value)


def test_extremes_that_are_allowed() -> None:
    Job((0,), 1, temperature=2, top_p=0, min_p=1, top_k=7, seed=-1, logit_bias={3: -100}, top_logprobs=0)
    Job((0,), 10**9, seed=2**64 - 1, stop=("\n",), top_logprobs=20)


def test_a_full_queue_says_when_to_come_back() -> None:
    assert Busy(7).retry_after == 7
    assert "7 s" in str(Busy(7))
