"""strata_mlx inspect: what a checkpoint holds."""

import json
from pathlib import Path

import pytest

from strata_mlx.experts import disk
from tests.cli.conftest import Run
from tests.tiny import make_checkpoint

KEYS = {
    "path": str, "family": str, "layout": str, "layers": dict, "experts": int, "top_k": int, "shared_expert": bool,
    "moe_layers": int, "mtp_layers": int, "parameters": int, "active_parameters": int, "bytes": int, "parts": dict,
    "context": int, "memory_bytes": dict,
}  # fmt: skip


def test_json_says_what_the_checkpoint_holds(run: Run, tiny: Path) -> None:
    ended = run("inspect", "--model", tiny, "--json")
    report = json.loads(ended.out)
    assert (ended.code, ended.err) == (0, "")
    assert {name: type(value) for name, value in report.items()} == KEYS
    assert report["family"] == "qwen3_next"
    assert report["layout"] == "MLX"
    assert report["layers"] == {"count": 2, "kinds": {"linear_attention": 1, "full_attention": 1}}
    assert (report["experts"], report["top_k"], report["moe_layers"], report["mtp_layers"]) == (8, 2, 2, 1)
    assert report["shared_expert"] is True
    assert sum(part["bytes"] for part in report["parts"].values()) == report["bytes"]
    tensors = [header(file) for file in tiny.glob("*.safetensors")]
    assert report["bytes"] == sum(
        end - start for file in tensors for start, end in (fields["data_offsets"] for fields in file)
    )
    assert all(size >= 0 for size in report["memory_bytes"].values())


def header(file: Path) -> list[dict[str, list[int]]]:
    raw = file.read_bytes()
    fields = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return [value for name, value in fields.items() if name != "__metadata__"]


def test_people_read_the_same(run: Run, tiny: Path) -> None:
    shown = run("inspect", "--model", tiny)
    assert (shown.code, shown.err) == (0, "")
    lines = {line.split("  ")[0]: line for line in shown.out.partition("\n\n")[0].splitlines()}
    assert lines["family"].split() == ["family", "qwen3_next"]
    assert lines["layers"].split(maxsplit=1)[1] == "2 (1 linear attention, 1 full attention)"
    assert lines["experts"].split(maxsplit=1)[1].startswith("8, top-2 and a shared expert")
    assert lines["MTP"].split() == ["MTP", "1", "layer"]
    assert shown.out.splitlines()[-1].startswith("Memory on this device with 4096 tokens of context: ")


def test_a_longer_context_needs_more_memory_for_keys_and_values_alone(run: Run, tiny: Path) -> None:
    short, long = (
        json.loads(run("inspect", "--model", tiny, "--json", "--context", str(context)).out)["memory_bytes"]
        for context in (256, 256 * 1000)
    )
    assert long.pop("kv_cache") == 1000 * short.pop("kv_cache")
    assert long == short


def test_no_weights_are_read(run: Run, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", "qwen3_moe", "separate", shards=1)
    file = model / "model.safetensors"
    size = file.stat().st_size
    with open(file, "r+b") as weights:
        length = int.from_bytes(weights.read(8), "little")
        weights.truncate(8 + length)
        weights.truncate(size)  # nothing but zeros after the header
    shown = run("inspect", "--model", model)
    assert shown.code == 0
    assert "none" in next(line for line in shown.out.splitlines() if line.startswith("MTP"))


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_a_context_out_of_range_is_refused(value: str, run: Run, tiny: Path) -> None:
    ended = run("inspect", "--model", tiny, "--context", value)
    assert (ended.code, ended.out) == (2, "")
    assert "--context" in ended.error


def test_the_disk_is_measured_shown_and_remembered(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(disk, "_LONG", 0.02)
    ended = run("inspect", "--model", tiny, "--disk", "--json")
    report = json.loads(ended.out)["disk"]
    assert (ended.code, ended.err) == (0, "")
    assert json.loads((tmp_path / "strata_mlx" / "disks.json").read_text()) == {report["device"]: report["rates"]}
    assert report["chosen"] == {"threads": 1, "direct": False}
    shown = run("inspect", "--model", tiny, "--disk")
    assert shown.code == 0
    assert "past the page cache" in shown.out
    assert shown.out.splitlines()[-1].startswith("For reads of 16 KiB: 1 thread, through the page cache: ")
