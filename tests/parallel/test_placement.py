"""Every expert has one rank, the ranks equally many, and by a profile about as much to do."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx.parallel.placement import Placement, balanced, even, load, share


@given(st.integers(1, 40), st.integers(1, 9), st.data())
def test_ranks_have_equally_many_experts_up_to_one(experts: int, ranks: int, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    placement = balanced({3: counts}, experts, ranks)
    for owners in (placement.of(3), placement.of(0), even(experts, ranks).of(0)):
        held = np.bincount(owners, minlength=ranks)
        assert held.sum() == experts
        assert held.max() - held.min() <= 1
        assert held.max() == share(experts, ranks)
    again = Placement.from_dict(json.loads(json.dumps(placement.to_dict())))
    assert (again.of(3) == placement.of(3)).all()
    assert (again.of(0) == placement.of(0)).all()


def test_a_profile_balances_the_load() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        counts = rng.zipf(1.5, 128).clip(max=10_000)
        by_profile = load(counts, balanced({0: counts}, 128, 4).of(0), 4)
        assert by_profile.max() <= load(counts, even(128, 4).of(0), 4).max()
        # Who has the most got its last expert when it had no more than anybody.
        assert by_profile.max() <= counts.sum() / 4 + counts.max()


def test_the_layer_that_is_not_in_a_profile_is_shared_out_evenly() -> None:
    assert (balanced({0: [5, 1, 1]}, 3, 2).of(7) == even(3, 2).of(7)).all()
