"""Casts give MLX's bits."""

from itertools import permutations
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_mlx.experts.casts import Caster
from tests.experts.memory import bits

KINDS: dict[mx.Dtype, Any] = {mx.float32: np.uint32, mx.bfloat16: np.uint16, mx.float16: np.uint16}
NUMPY: dict[mx.Dtype, Any] = {mx.float32: np.float32, mx.bfloat16: np.uint16, mx.float16: np.float16}


def cast(source: mx.array, wanted: mx.Dtype, split: int) -> NDArray[Any]:
    """Through a Caster with two fields."""
    caster = Caster(source.dtype, wanted, [(split,), (source.size - split,)], [64, 4000])
    made = np.full(source.size, 77, NUMPY[wanted])
    for room, part in zip(caster.stored, np.split(bits(source), [split]), strict=True):
        room[...] = part
    caster.deliver(np.split(made, [split]))
    return made


@pytest.mark.parametrize(("stored", "wanted"), list(permutations(KINDS, 2)), ids=str)
@given(seed=st.integers(0, 2**32 - 1), small=st.booleans())
def test_a_cast_is_mlx_s_to_the_bit(stored: mx.Dtype, wanted: mx.Dtype, seed: int, small: bool) -> None:
    rng, size = np.random.default_rng(seed), 100 if small else 20_000
    numbers = rng.integers(0, np.iinfo(KINDS[stored]).max, size, KINDS[stored], endpoint=True)
    source = mx.array(numbers).view(stored)
    ordinary = rng.standard_normal(size, np.float32) * np.float32(10.0) ** rng.integers(-12, 12, size)
    halfway = (ordinary.astype(np.float32).view(np.uint32) & 0xFFFF0000 | 0x8000).view(np.float32)
    for values in (source, mx.array(ordinary).astype(stored), mx.array(halfway).astype(stored)):
        expected, made = bits(values.astype(wanted)), cast(values, wanted, int(rng.integers(1, size)))
        nan = np.array(mx.isnan(values))
        assert np.array_equal(expected.view(KINDS[wanted])[~nan], made.view(KINDS[wanted])[~nan])
        assert np.all(np.array(mx.isnan(mx.array(made).view(wanted)))[nan])


def test_a_second_use_leaves_nothing_of_the_first() -> None:
    for values in (mx.full((8,), 1e9), mx.full((8,), 0.5)):
        made = cast(values.astype(mx.bfloat16), mx.float32, 3)
        assert made.tolist() == np.array(values.astype(mx.bfloat16).astype(mx.float32)).tolist()
