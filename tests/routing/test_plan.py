"""The group plan: complete, unique, ordered, resident-first, and equal to a stable sort."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_mlx.errors import InputError
from strata_mlx.routing import plan, reference
from tests.strategies import windows

Window = tuple[NDArray[np.uint32], NDArray[np.bool_]]


@given(window=windows(), split=st.booleans(), known=st.booleans())
def test_the_plan_is_the_stable_sort(window: Window, split: bool, known: bool) -> None:
    ids, resident = window
    groups = plan(mx.array(ids), mx.array(resident) if known else None, split)
    experts, offsets, counts, entries = reference.plan(ids, resident if known else None, split)
    used = int(groups.groups)
    assert used == len(experts)
    assert np.array(groups.experts)[:used].tolist() == experts.tolist()
    assert np.array(groups.offsets)[:used].tolist() == offsets.tolist()
    assert np.array(groups.counts)[:used].tolist() == counts.tolist()
    assert np.array(groups.entries).tolist() == entries.tolist()


@given(window=windows(), split=st.booleans())
def test_every_entry_is_once_in_its_experts_group(window: Window, split: bool) -> None:
    ids, resident = window
    groups = plan(mx.array(ids), mx.array(resident), split)
    entries = np.array(groups.entries)
    assert sorted(entries.tolist()) == list(range(ids.size))
    assert int(groups.counts.sum()) == ids.size
    experts, offsets, counts = (np.array(each) for each in (groups.experts, groups.offsets, groups.counts))
    for expert, offset, count in zip(experts, offsets, counts, strict=True):
        members = entries[offset : offset + count]
        assert (ids.reshape(-1)[members] == expert).all()
        assert (np.diff(members.astype(int)) > 0).all()  # by token, then rank


@given(window=windows())
def test_resident_groups_come_first_and_each_part_ascends(window: Window) -> None:
    ids, resident = window
    groups = plan(mx.array(ids), mx.array(resident))
    experts = np.array(groups.experts)[: int(groups.groups)].astype(int)
    missing = ~resident[experts]
    assert (np.diff(missing.astype(int)) >= 0).all()
    assert (np.diff(experts[missing]) > 0).all()
    assert (np.diff(experts[~missing]) > 0).all()


@given(window=windows())
def test_unused_places_are_empty_groups(window: Window) -> None:
    ids, resident = window
    groups = plan(mx.array(ids), mx.array(resident))
    used = int(groups.groups)
    assert groups.experts.shape == (min(ids.size, resident.size),)
    assert not np.array(groups.experts)[used:].any()
    assert not np.array(groups.counts)[used:].any()
    assert (np.array(groups.offsets)[used:] == ids.size).all()
    assert all(each.dtype == mx.uint32 for each in vars(groups).values())


@pytest.mark.parametrize("ids", [mx.zeros((4,), mx.uint32), mx.zeros((2, 2), mx.int32)])
def test_ids_of_another_shape_or_type_are_refused(ids: mx.array) -> None:
    with pytest.raises(InputError, match="expected ids"):
        plan(ids, None)


@pytest.mark.parametrize("resident", [mx.zeros((2, 4), mx.bool_), mx.zeros((4,), mx.uint8)])
def test_a_residency_map_of_another_shape_or_type_is_refused(resident: mx.array) -> None:
    with pytest.raises(InputError, match="expected resident"):
        plan(mx.zeros((1, 2), mx.uint32), resident)
