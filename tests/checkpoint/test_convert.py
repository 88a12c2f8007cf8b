"""Conversion: what is written, how much memory it takes, and what an interruption leaves."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_config

from strata_mlx.checkpoint import Checkpoint
from strata_mlx.checkpoint.convert import Conversion, convert
from strata_mlx.checkpoint.precision import DEFAULTS, ROUTER, Precision, PrecisionPlan
from strata_mlx.errors import Fault, InputError
from strata_mlx.loading import load, load_model
from strata_mlx.models.plan import ModelPlan, plan_model
from tests.errors import refuses
from tests.tiny import make_checkpoint, read

Q4 = PrecisionPlan(Precision.make(), {"router": ROUTER})


def plan(folder: Path) -> ModelPlan:
    return plan_model(Checkpoint.open(folder))


def conversion(folder: Path, **options: Any) -> Conversion:
    return Conversion(plan(folder), **options)


def write(folder: Path, name: str = "converted", **options: Any) -> Path:
    return convert(conversion(folder, **options), folder.with_name(name), progress=False)


def contents(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def logits(folder: Path) -> np.ndarray[Any, Any]:
    return np.array(load_model(plan(folder), "float32")(mx.array([[1, 2, 3, 4]])))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", mtp="separate")


# What is written


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": mx.bfloat16},
        {"precision": Q4},
        {"precision": Q4, "dtype": mx.bfloat16},
        {"precision": PrecisionPlan(Precision(3, 32), {"experts.down_proj": Precision(6, 64), "lm_head": None})},
        {"pack": True},
        {"precision": Q4, "pack": True},
        *({"precision": PrecisionPlan(Precision.make(mode=mode))} for mode in DEFAULTS if mode != "affine"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("family", "layout"), [("qwen3_next", "separate"), ("qwen3_5_moe", "fused")])
def test_the_announced_sizes_are_the_written_ones(
    tmp_path: Path, family: str, layout: str, options: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path / "model", family, layout, mtp=layout, dtype=mx.bfloat16)
    plan = conversion(folder, **options)
    announced = {name: plan.nbytes(parameters) for name, parameters in plan.files().items()}
    written = write(folder, **options)
    sizes = {f.name: sum(array.nbytes for array in read(f).values()) for f in written.glob("*.safetensors")}
    assert sizes == announced


def test_the_folder_holds_a_model_and_nothing_else(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    written = write(folder)
    assert sorted(contents(written)) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors", "model.safetensors.index.json",
        "mtp.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert not written.with_name("converted.partial").exists()
    load(written, mtp=True)


def test_the_mtp_head_stays_out_of_the_files_that_mlx_lm_reads(folder: Path) -> None:
    written = write(folder)
    assert all(name.startswith("mtp.") for name in read(written / "mtp.safetensors"))
    index = json.loads((written / "model.safetensors.index.json").read_text())["weight_map"]
    assert not any("mtp" in name for name in index)
    assert not any("mtp" in name for file in written.glob("model*.safetensors") for name in read(file))


def test_each_part_gets_its_bits_and_the_router_eight(folder: Path) -> None:
    parts = {"router": ROUTER, "experts": Precision(2, 32), "mtp.experts": Precision(6, 64), "lm_head": None}
    written = write(folder, precision=PrecisionPlan(Precision.make(), parts))
    model = load_model(plan(written))
    layer, head = model.layers[1], model.mtp.layers[0]
    for moe in (layer.mlp, head.mlp):
        assert (moe.gate.bits, moe.gate.group_size, moe.shared_expert_gate.bits) == (8, 64, 8)
    assert (layer.mlp.switch_mlp.up_proj.bits, layer.mlp.switch_mlp.up_proj.group_size) == (2, 32)
    assert (head.mlp.switch_mlp.up_proj.bits, layer.self_attn.q_proj.bits) == (6, 4)
    assert "scales" not in model.lm_head
    settings = load_config(written)["quantization"]
    assert (settings["bits"], settings["group_size"], settings["mode"]) == (4, 64, "affine")
    assert settings["lm_head"] is False
    assert settings["model.layers.1.mlp.gate"] == {"bits": 8, "group_size": 64, "mode": "affine"}


def test_weights_are_quantised_as_mlx_does(folder: Path) -> None:
    before, after = (load_model(plan(path), "float32") for path in (folder, write(folder, precision=Q4)))
    expected = mx.quantize(before.layers[0].mlp.switch_mlp.down_proj.weight, 64, 4)
    made = after.layers[0].mlp.switch_mlp.down_proj
    for one, other in zip((made.weight, made.scales, made.biases), expected, strict=True):
        assert np.array_equal(np.array(one), np.array(other))


@pytest.mark.parametrize("mode", DEFAULTS)
@pytest.mark.parametrize("dtype", [None, mx.float32], ids=str)
def test_dequantising_gives_what_mlx_gives(folder: Path, mode: str, dtype: mx.Dtype | None) -> None:
    quantised = write(folder, "quantised", precision=PrecisionPlan(Precision.make(mode=mode)))
    module = load_model(plan(quantised), "float32").layers[0].mlp.switch_mlp.down_proj
    expected = mx.dequantize(
        module.weight, module.scales, module.get("biases"), module.group_size, module.bits, module.mode
    )
    plain = write(quantised, "plain", dequantise=True, dtype=dtype)
    made = load_model(plan(plain), "float32").layers[0].mlp.switch_mlp.down_proj.weight
    assert np.array_equal(np.array(made), np.array(expected.astype(dtype or mx.bfloat16).astype(mx.float32)))
    assert "quantization" not in load_config(plain)


def test_a_dequantised_model_can_be_quantised_again(folder: Path) -> None:
    quantised = write(folder, "quantised", precision=Q4)
    plain = write(quantised, "plain", dequantise=True, dtype=mx.float32)
    assert np.abs(logits(plain) - logits(quantised)).max() < 1e-4
    write(plain, "again", precision=Q4)


def test_the_decay_of_qwen3_5_keeps_its_digits(tmp_path: Path) -> None:
    written = write(make_checkpoint(tmp_path / "model", "qwen3_5_moe"), dtype=mx.bfloat16)
    dtypes = {n: a.dtype for file in written.glob("*.safetensors") for n, a in read(file).items()}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("A_log")} == {mx.float32}
    assert {dtype for name, dtype in dtypes.items() if not name.endswith("A_log")} == {mx.bfloat16}


# What is refused before anything is written


@pytest.mark.parametrize(
    ("precision", "says"),
    [
        (PrecisionPlan(Precision(4, 128)), "groups of 128 do not divide the 64 inputs"),
        (PrecisionPlan(Precision(4, 64), {"experts.down": Precision(4, 64)}), "experts.down_proj"),
        (PrecisionPlan(Precision(4, 64), {"mtp.embedding": None}), "no such part"),
    ],
)
def test_a_precision_that_the_model_cannot_have_leaves_nothing_behind(
    folder: Path, precision: PrecisionPlan, says: str
) -> None:
    with refuses(InputError, says):
        write(folder, precision=precision)
    assert list(folder.parent.iterdir()) == [folder]


def test_quantising_twice_and_dequantising_plain_weights_are_refused(folder: Path) -> None:
    quantised = write(folder, "quantised", precision=Q4)
    with refuses(InputError, quantised, "quantised already"):
        write(quantised, precision=Q4)
    with refuses(InputError, folder, "not quantised"):
        write(folder, dequantise=True)
    with refuses(InputError, "not both"):
        write(quantised, precision=Q4, dequantise=True)


def test_an_existing_target_is_left_as_it_is(folder: Path) -> None:
    target = folder.with_name("converted")
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with refuses(InputError, target, "exists already"):
        write(folder)
    assert (target / "notes.txt").read_text() == "mine"
    assert not folder.with_name("converted.partial").exists()


def test_a_link_to_nowhere_counts_as_existing(folder: Path) -> None:
    folder.with_name("converted").symlink_to("nowhere")
    with refuses(InputError, "converted exists already"):
        write(folder)


def test_somebody_elses_partial_folder_is_not_deleted(folder: Path) -> None:
    other = folder.with_name("converted.partial")
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with refuses(InputError, other, "exists already"):
        write(folder)
    assert (other / "thesis.txt").read_text() == "mine"


# Memory


@pytest.mark.parametrize("layout", ["separate", "fused", "stacked"])
def test_peak_memory_stays_under_twice_the_largest_layer(tmp_path: Path, layout: str) -> None:
    family = "qwen3_5_moe" if layout == "fused" else "qwen3_next"
    big: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32, "num_hidden_layers": 3}
    folder = make_checkpoint(tmp_path / "model", family, layout, mtp=layout, dtype=mx.bfloat16, **big)
    quantised = folder.with_name("q4")
    runs: list[tuple[Path, dict[str, Any]]] = [
        (folder, {}),
        (folder, {"dtype": mx.float32}),
        (folder, {"precision": Q4}),
        (quantised, {"dequantise": True}),
        (quantised, {"dequantise": True, "dtype": mx.float32}),
        (folder, {"pack": True}),
        (folder, {"precision": Q4, "pack": True}),
        (quantised, {"dequantise": True, "pack": True}),
    ]
    for number, (source, options) in enumerate(runs):
        job = conversion(source, **options)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        convert(job, quantised if number == 2 else folder.with_name(f"run{number}"), progress=False)
        assert mx.get_peak_memory() - before < 2 * job.largest_layer(), options
        assert job.largest_layer() > 10e6


# Interruption


class Crash(Exception):
    """Stands for whatever ends a process."""


def interrupt(folder: Path, files: int, **options: Any) -> dict[str, int]:
    """Convert until so many files are written, and return their inodes."""
    original = mx.save_safetensors
    saved: list[str] = []

    def save_safetensors(file: str, *rest: Any, **more: Any) -> None:
        if len(saved) == files:
            raise Crash
        saved.append(file)
        original(file, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "save_safetensors", save_safetensors)
        with pytest.raises(Crash):
            write(folder, **options)
    assert not folder.with_name("converted").exists()
    return inodes(folder.with_name("converted.partial"))


def inodes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in folder.glob("m*.safetensors")}


@pytest.mark.parametrize("files", range(4))
@pytest.mark.parametrize("options", [{}, {"precision": Q4}], ids=str)
def test_an_interrupted_conversion_goes_on_where_it_stopped(folder: Path, files: int, options: dict[str, Any]) -> None:
    expected = contents(write(folder, "uninterrupted", **options))
    done = interrupt(folder, files, **options)
    assert len(done) == files
    resumed = write(folder, **options)
    assert done.items() <= inodes(resumed).items()
    assert contents(resumed) == expected


@pytest.mark.parametrize(
    "changed",
    [{"precision": Q4}, {"dtype": mx.bfloat16}, {"precision": PrecisionPlan(Precision(8, 32))}, {"pack": True}],
    ids=str,
)
def test_a_changed_option_starts_over(folder: Path, changed: dict[str, Any]) -> None:
    expected = contents(write(folder, "uninterrupted", **changed))
    interrupt(folder, 2)
    assert contents(write(folder, **changed)) == expected


def test_dequantising_does_not_go_on_after_a_plain_conversion(folder: Path) -> None:
    quantised = write(folder, "quantised", precision=Q4)
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization"], config["quantization_config"]
    (quantised / "config.json").write_text(json.dumps(config))
    expected = contents(write(quantised, "uninterrupted", dequantise=True))
    interrupt(quantised, 2)
    assert contents(write(quantised, dequantise=True)) == expected


def test_a_source_that_has_changed_starts_over(folder: Path) -> None:
    interrupt(folder, 2)
    other = make_checkpoint(folder.with_name("other"), mtp="separate", seed=1)
    for file in other.glob("*.safetensors"):
        shutil.copyfile(file, folder / file.name)
        os.utime(folder / file.name, ns=(1, 1))
    assert np.array_equal(logits(write(folder)), logits(other))


def test_a_file_cut_short_by_a_power_cut_is_written_again(folder: Path) -> None:
    expected = contents(write(folder, "uninterrupted"))
    interrupt(folder, 2)
    os.truncate(folder.with_name("converted.partial") / "model-00001-of-00003.safetensors", 1000)
    assert contents(write(folder)) == expected


def python(code: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    head = "import sys; from tests.checkpoint.test_convert import *; source = Path(sys.argv[1])\n"
    return subprocess.run(
        [sys.executable, "-c", head + dedent(code), *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("renames", [1, 3, 5])
def test_a_killed_conversion_leaves_no_folder_that_looks_finished(folder: Path, renames: int) -> None:
    expected = contents(write(folder, "uninterrupted"))
    killed = python(
        f"""
        original, calls = os.replace, []
        def replace(*paths):
            calls.append(paths)
            if len(calls) == {renames}:
                os.kill(os.getpid(), signal.SIGKILL)
            original(*paths)
        os.replace = replace
        write(source)
        """,
        folder,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not folder.with_name("converted").exists()
    done = inodes(folder.with_name("converted.partial"))
    assert len(done) == renames - 1
    resumed = write(folder)
    assert done.items() <= inodes(resumed).items()
    assert contents(resumed) == expected


def test_a_disk_that_is_too_small_is_known_before_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(folder)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with refuses(Fault, "converted", "GB are free"):
        write(folder)
    assert not list(folder.parent.glob("converted*/*.safetensors"))


@pytest.mark.parametrize("limit", [0, 1000, 100_000])
def test_a_disk_that_fills_up_is_a_fault_that_says_how_to_go_on(folder: Path, limit: int) -> None:
    expected = contents(write(folder, "uninterrupted"))
    failed = python(
        f"""
        import resource
        job = conversion(source)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
        with refuses(Fault, "converted", "run the same command again"):
            convert(job, source.with_name("converted"), progress=False)
        """,
        folder,
    )
    assert failed.returncode == 0, failed.stderr
    assert not folder.with_name("converted").exists()
    assert contents(write(folder)) == expected


def test_a_source_that_vanishes_meanwhile_is_a_fault(folder: Path) -> None:
    job = conversion(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with refuses(Fault, folder):
        convert(job, folder.with_name("converted"), progress=False)
    assert not folder.with_name("converted").exists()
