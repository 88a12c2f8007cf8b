"""Amounts of memory as people write them."""

import reprlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx.errors import InputError
from strata_mlx.experts.sizes import UNITS, format_size, parse_size
from tests.errors import may_refuse, refuses

sizes = st.integers(1, 10**15)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("12GB", 12_000_000_000),
        ("12 GiB", 12 * 2**30),
        ("12g", 12_000_000_000),
        (" 900mb ", 900_000_000),
        ("0.5 GiB", 2**29),
        (".5MiB", 2**19),
        ("1.5k", 1500),
        ("3 B", 3),
        ("1.9999B", 1),
    ],
)
def test_an_amount_is_read_as_it_is_meant(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "mention"),
    [
        ("", "not an amount"),
        ("GB", "not an amount"),
        ("-1GB", "not an amount"),
        ("1e9", "not an amount"),
        ("1,5GB", "not an amount"),
        ("12 XB", "unit 'XB'"),
        ("twelve", "not an amount"),
        ("nan", "not an amount"),
        ("inf", "not an amount"),
        ("\u0661\u0662GB", "not an amount"),
        ("0", "more than nothing"),
        ("0.0001KB", "more than nothing"),
        ("9999999999TB", "at most"),
        ("1 2GB", "not an amount"),
        ("9" * 5000, "not an amount"),
    ],
)
def test_what_is_no_amount_is_refused_with_what_would_be_one(text: str, mention: str) -> None:
    with refuses(InputError, "memory", reprlib.repr(text), mention):
        parse_size(text)


@given(sizes, st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_whole_numbers_of_every_unit_are_exact(count: int, unit: str, space: str) -> None:
    count %= 1000
    assert parse_size(f"{count + 1}{space}{unit.lower()}") == (count + 1) * UNITS[unit]


@given(sizes)
def test_what_is_shown_can_be_read_and_is_close(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= size * 5e-4


@given(sizes)
def test_rounded_up_is_never_less(size: int) -> None:
    assert size <= parse_size(format_size(size, up=True)) <= size * 1.001 + 1


@given(st.text())
def test_any_text_is_an_amount_or_is_refused(text: str) -> None:
    with may_refuse("memory"):
        assert parse_size(text) > 0


def test_an_option_that_is_no_budget_is_named_and_not_told_of_auto() -> None:
    with refuses(InputError, "--max-body: 'auto' is not an amount", "8GiB or a number of bytes"):
        parse_size("auto", "--max-body")
