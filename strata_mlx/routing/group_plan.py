"""The group plan of a window: which (token, rank) entries each expert serves, so that it is read once."""

from dataclasses import dataclass

import mlx.core as mx

from strata_mlx import kernels
from strata_mlx.errors import InputError
from strata_mlx.routing.executors import default_executor, select_kernel


@dataclass(frozen=True)
class GroupPlan:
    """Entries of a window in groups, one group per distinct expert. All arrays are uint32 and lazy.

    How many groups there are depends on the ids, and to know it is to evaluate them. So the group arrays have
    the fixed size ``G = min(T * K, E)`` (``T * K`` where no residency map tells E). The first ``groups``
    places are used, and the others are empty groups: expert 0, offset ``T * K``, count 0.

    Attributes:
        experts: ``[G]``, the expert of each group.
        offsets: ``[G]``, where a group's entries begin.
        counts: ``[G]``, how many they are.
        entries: ``[T * K]``, ``token * K + rank``, ascending within a group.
        groups: scalar, the number of groups.
    """

    experts: mx.array
    offsets: mx.array
    counts: mx.array
    entries: mx.array
    groups: mx.array


def plan(ids: mx.array, resident: mx.array | None, split: bool = True) -> GroupPlan:
    """Groups the selections of a window by expert.

    Args:
        ids: uint32 ``[T, K]``, distinct within a row and below E.
        resident: bool ``[E]``, or None where residency is not known.
        split: resident groups first, then missing ones; without it, or without a map, one ascending run.

    Raises:
        InputError: an argument of the wrong type or shape.
    """
    if ids.ndim != 2 or ids.dtype != mx.uint32:
        raise InputError(f"plan: expected ids uint32 [T, K], found {ids.dtype} {ids.shape}")
    if resident is not None and (resident.ndim != 1 or resident.dtype != mx.bool_):
        raise InputError(f"plan: expected resident bool [E], found {resident.dtype} {resident.shape}")
    if resident is not None and default_executor() is select_kernel:
        packed = kernels.group_plan(ids, resident, expert_count=resident.size, split=split)
        return GroupPlan(*kernels.unpack_plan(packed, resident.size, ids.size))
    return plan_ops(ids, resident, split)


def plan_ops(ids: mx.array, resident: mx.array | None, split: bool) -> GroupPlan:
    """``plan`` as MLX ops, for arguments that are checked."""
    flat = ids.reshape(-1)
    size = flat.size
    if size == 0:
        empty = mx.zeros((0,), mx.uint32)
        return GroupPlan(empty, empty, empty, empty, mx.array(0, mx.uint32))

    keys = flat.astype(mx.uint64)  # (missing, expert, entry), all different: any sort is a stable one
    if split and resident is not None:
        keys = keys | mx.where(resident[flat], 0, 1 << 32).astype(mx.uint64)
    keys = mx.sort(keys * size + mx.arange(size, dtype=mx.uint64))
    entries = (keys % size).astype(mx.uint32)
    experts = flat[entries]

    first = mx.concatenate([mx.array([True]), experts[1:] != experts[:-1]])
    limit = size if resident is None else min(size, resident.size)
    offsets = mx.sort(mx.where(first, mx.arange(size, dtype=mx.uint32), size).astype(mx.uint32))
    ends = mx.concatenate([offsets[1:], mx.array([size], mx.uint32)])
    used = offsets < size
    named = mx.where(used, experts[mx.minimum(offsets, size - 1)], 0)
    return GroupPlan(
        experts=named[:limit],
        offsets=offsets[:limit],
        counts=(ends - offsets)[:limit],
        entries=entries,
        groups=first.sum().astype(mx.uint32),
    )
