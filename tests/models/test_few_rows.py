"""The product of a few rows by NumPy."""

from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx import load
from strata_mlx.models import few_rows
from strata_mlx.models import trunk as trunks
from strata_mlx.models.few_rows import multiply
from strata_mlx.models.trunk import Trunk


@given(
    batch=st.integers(1, 3),
    rows=st.integers(1, 9),
    inputs=st.integers(1, 300),
    outputs=st.one_of(st.integers(1, 70), st.integers(1, 3000)),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_the_product(batch: int, rows: int, inputs: int, outputs: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, weight = random.standard_normal((batch, rows, inputs)), random.standard_normal((inputs, outputs))
    found = multiply(mx.array(x, mx.float32), mx.array(weight.T, mx.float32))
    assert found.shape == (batch, rows, outputs)
    np.testing.assert_allclose(np.array(found), x @ weight, atol=2e-4)


def other_heads() -> list[nn.Module]:
    """Those that must be left to MLX."""
    biased = nn.Linear(256, 8192)
    half = nn.Linear(256, 8192, bias=False)
    half.weight = half.weight.astype(mx.bfloat16)
    return [biased, half, nn.QuantizedLinear(256, 8192, bias=False), type("Adapted", (nn.Linear,), {})(256, 8192)]


def test_logits_of_a_window_are_exact_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load()[0]
    hidden = mx.array(np.random.default_rng(0).standard_normal((1, 4, 256)), mx.float32)
    used = Mock(side_effect=multiply)
    monkeypatch.setattr(trunks, "multiply", used)
    exact = Trunk(model).logits(hidden)
    assert not used.called
    np.testing.assert_allclose(np.array(Trunk(model).rounded_logits(hidden)), np.array(exact), atol=1e-5)
    assert used.call_count == 1
    for other in other_heads():
        model.lm_head = other
        trunk = Trunk(model)
        assert mx.array_equal(trunk.rounded_logits(hidden), trunk.logits(hidden))
    assert used.call_count == 1


def test_a_gpu_multiplies_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "on_cpu", lambda: False)
    trunk = Trunk(load()[0])
    hidden = mx.ones((1, 4, 256))
    assert mx.array_equal(trunk.rounded_logits(hidden), trunk.logits(hidden))
