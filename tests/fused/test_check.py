"""What is found out about kernels on a device where nobody has tried them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from strata_mlx import load
from strata_mlx.fused import layer
from strata_mlx.fused.layer import FusedLayer, fuse
from tests.experts.streamed import checkpoint
from tests.host.compiler import KernelError
from tests.host.host import HostBuild

SILENT = "y[at] = Y(RESIDUAL ? value + float(residual[at]) : value);"


def test_kernels_that_agree_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _on_metal(tmp_path, monkeypatch, HostBuild())
    assert all(isinstance(each, FusedLayer) for each in model.layers)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [((SILENT, "y[at] = Y(value);"), "layer 0 gives other values"), ((SILENT, "y[at] = nothing;"), "they do not run")],
)
def test_kernels_that_compute_something_else_or_do_not_run_are_not_used(
    edit: tuple[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(**kernel: Any) -> Any:
        built = HostBuild(edits=(edit,) if "project" in kernel["name"] else ())(**kernel)

        def run(**launch: Any) -> Any:
            try:
                return built(**launch)
            except KernelError as error:
                raise RuntimeError(str(error)) from error  # as MLX does

        return run

    with pytest.warns(RuntimeWarning, match=reason):
        model = _on_metal(tmp_path, monkeypatch, build)
    assert not any(isinstance(each, FusedLayer) for each in model.layers)
    assert model(mx.array([[1, 2, 3]])).shape == (1, 3, 259)


def _on_metal(path: Path, monkeypatch: pytest.MonkeyPatch, build: Any) -> Any:
    """A model as it is loaded where Metal is, with kernels that run on the test host."""
    model, _ = load(checkpoint(path / "model", "qwen3_next", "stacked"))
    own = layer.FusedLayer
    monkeypatch.setattr(layer, "FusedLayer", lambda each, _: own(each, build))
    monkeypatch.setattr(layer, "_taken_over", lambda module, _: module)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    fuse(model)
    return model
