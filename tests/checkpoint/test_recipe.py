"""The shape that a recipe announces is the shape that it builds, and what it does to the values."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx.checkpoint import Recipe

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def tensors(shape: tuple[int, ...], count: int, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    rng = np.random.default_rng(len(shape) + count)
    return {f"t{i}": mx.array(rng.standard_normal(shape)).astype(dtype) for i in range(count)}


@given(SHAPES, st.integers(1, 4), st.sampled_from([None, 0, 1]), st.booleans(), st.booleans())
def test_the_announced_shape_is_the_built_one(
    shape: tuple[int, ...], count: int, half: int | None, swap: bool, shift: bool
) -> None:
    sources = tensors(shape, count)
    recipe = Recipe(tuple(sources), half, swap=swap, shift=shift)
    try:
        announced = recipe.shape([shape] * count)
    except ValueError:
        axes = len(shape) + (count > 1)
        height = ([count, *shape] if count > 1 else list(shape))[-2] if axes > 1 else 1
        assert (half is not None and (axes < 2 or height % 2)) or (swap and axes < 2)
    else:
        assert recipe.build(sources.__getitem__).shape == announced


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.data())
def test_the_rows_of_each_head_are_taken_apart(heads: int, height: int, width: int, data: st.DataObject) -> None:
    sources = tensors((heads * height, width), 1)
    first = data.draw(st.integers(0, height - 1))
    last = data.draw(st.integers(first + 1, height))
    swap = data.draw(st.booleans())
    recipe = Recipe(("t0",), heads=heads, rows=(first, last), swap=swap)
    expected = np.array(sources["t0"]).reshape(heads, height, width)[:, first:last]
    built = recipe.build(sources.__getitem__)
    assert np.array_equal(np.array(built), expected.swapaxes(1, 2) if swap else expected)
    assert built.shape == recipe.shape([(heads * height, width)])
    assert recipe.share([(heads * height, width)]) * height == last - first


@pytest.mark.parametrize(
    ("shape", "says"), [((7, 3), "into 2 heads"), ((4, 3), "has 2 rows for each head"), ((4,), "heads")]
)
def test_a_matrix_without_room_for_all_heads_is_refused(shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Recipe(("t0",), heads=2, rows=(1, 3)).shape([shape])


@given(SHAPES, SHAPES)
def test_experts_of_different_shapes_are_not_stacked(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    if one == other:
        assert Recipe(("a", "b")).shape([one, other]) == (2, *one)
    else:
        with pytest.raises(ValueError, match="differ"):
            Recipe(("a", "b")).shape([one, other])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_the_halves_of_a_fused_tensor_together_are_the_tensor(experts: int, height: int, width: int) -> None:
    sources = tensors((experts, 2 * height, width), 1)
    halves = [Recipe(("t0",), half=half).build(sources.__getitem__) for half in (0, 1)]
    assert np.array_equal(np.array(mx.concatenate(halves, axis=-2)), np.array(sources["t0"]))


def test_stacked_experts_keep_their_numbers() -> None:
    sources = tensors((2, 3), 12)
    built = Recipe(tuple(f"t{i}" for i in range(12))).build(sources.__getitem__)
    for i in range(12):
        assert np.array_equal(np.array(built[i]), np.array(sources[f"t{i}"]))


def test_a_norm_is_shifted_in_the_type_it_is_cast_to() -> None:
    sources = {"norm": mx.array([0.00390625, -0.0078125]).astype(mx.bfloat16)}  # 1 + w is not a bfloat16
    recipe = Recipe(("norm",), shift=True)
    assert recipe.build(sources.__getitem__, mx.float32).tolist() == [1.00390625, 0.9921875]
    assert recipe.build(sources.__getitem__).dtype == mx.bfloat16


@pytest.mark.parametrize("dtype", [mx.uint32, mx.uint8, mx.int32])
def test_packed_weights_are_never_cast(dtype: mx.Dtype) -> None:
    packed: dict[str, Any] = {"w": mx.array([[1, 255]]).astype(dtype)}
    assert Recipe(("w",)).build(packed.__getitem__, mx.float32).dtype == dtype
