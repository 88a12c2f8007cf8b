"""Stop strings, whatever pieces the text comes in."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx.server.stops import StopStrings

LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What comes before the stop string that is complete first, and that string."""
    for end in range(1, len(text) + 1):
        if ended := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(LETTERS, STOPS, st.lists(st.integers(0, 30)))
def test_pieces_do_not_matter_and_no_part_of_a_stop_string_is_given(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    expected, met = reference(text, stops)
    strings, given_so_far = StopStrings(stops), ""
    for start, end in pairwise(sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})):
        given_so_far += strings.feed(text[start:end])
        assert expected.startswith(given_so_far), "a part of a stop string was given"
    if strings.met is None:
        given_so_far += strings.rest()
    assert (given_so_far, strings.met) == (expected, met)


def test_text_that_begins_no_stop_string_is_not_held_back() -> None:
    strings = StopStrings(["\n\nclass"])
    assert strings.feed("x = 1\n") == "x = 1"
    assert strings.feed("y = 2") == "\ny = 2"


def test_nothing_follows_a_stop_string() -> None:
    strings = StopStrings(["END"])
    assert strings.feed("one END two") == "one "
    assert strings.feed("three") == ""
    assert strings.rest() == ""


@pytest.mark.parametrize("piece", ["", "text"])
def test_without_stop_strings_text_passes_as_it_is(piece: str) -> None:
    assert StopStrings([]).feed(piece) == piece
