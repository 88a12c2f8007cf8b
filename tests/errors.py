"""What every deliberate error must be like: of one kind, in one line, with the name of what is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from strata_mlx.errors import StrataError


@contextmanager
def refuses(kind: type[StrataError], *mentions: Path | str) -> Iterator[None]:
    """The block raises exactly ``kind``, with each of ``mentions`` in its message."""
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    _check(caught.value, mentions)


@contextmanager
def may_refuse(*mentions: Path | str) -> Iterator[None]:
    """The block succeeds or raises some StrataError with each of ``mentions`` in its message, and nothing else."""
    try:
        yield
    except StrataError as error:
        _check(error, mentions)


def _check(error: StrataError, mentions: tuple[Path | str, ...]) -> None:
    message = str(error)
    assert "\n" not in message
    assert 10 < len(message) < 1000
    for mention in mentions:
        assert str(mention) in message
