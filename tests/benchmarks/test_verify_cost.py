"""The benchmark of verify windows measures every window of every part, and takes each window back."""

import json
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from benchmarks import gpu_verify_cost
from benchmarks.gpu_verify_cost import Ours, Theirs
from strata_mlx import load
from strata_mlx.hub import EMBEDDED


def test_every_window_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_verify_cost, "ROWS", (1, 2, 4))
    monkeypatch.setattr(sys, "argv", ["gpu_verify_cost.py", "--json", "--turns", "2", "--context", "16"])
    gpu_verify_cost.main()
    result = json.loads(capsys.readouterr().out)
    assert [row["part"] for row in result["rows"]] == ["ours", "mlx_lm", "our layers", "our head"]
    for row in result["rows"]:
        assert row["cost"].keys() == row["ms"].keys() == {"1", "2", "4"}
        assert row["cost"]["1"] == 1
        assert min(row["ms"].values()) > 0


def arrays(measured: Ours | Theirs) -> list[np.ndarray[Any, Any]]:
    """What the caches hold, without the room that they have for more tokens."""
    states = [
        layer.cache if isinstance(layer, ArraysCache) else [x[:, :, : layer.offset] for x in (layer.keys, layer.values)]
        for layer in measured.cache
    ]
    return [np.array(array) for state in states for array in state]


@pytest.mark.parametrize("kind", [Ours, Theirs])
def test_windows_are_taken_back(kind: type[Ours] | type[Theirs]) -> None:
    model, tokens = load(EMBEDDED)[0], mx.arange(40)
    measured = kind(model, tokens[:20])
    before = arrays(measured)
    for rows in (1, 4):
        measured.window(tokens[20 : 20 + rows])
    after = arrays(measured)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
