"""What the store reads is what loading reads, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from strata_mlx.checkpoint.convert import Conversion, convert
from strata_mlx.checkpoint.precision import ROUTER, Precision, PrecisionPlan
from strata_mlx.experts import DiskSettings, ExpertStore, files, ranges
from strata_mlx.experts.casts import Caster
from strata_mlx.hub import EMBEDDED
from strata_mlx.loading import load_model
from tests.experts.memory import bits, equal, expert_of, loaded, make_room, plan
from tests.tiny import make_checkpoint

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "separate": {"layout": "separate", "mtp": "separate"},
    "stacked": {"layout": "stacked", "mtp": "stacked"},
    "mixed": {"layout": "stacked", "mtp": "separate"},
    "fused": {"family": "qwen3_5_moe", "layout": "fused", "mtp": "fused"},
    "no head": {"family": "qwen3_moe", "layout": "separate", "shards": 1},
}
PRECISIONS: dict[str, PrecisionPlan | None] = {
    "plain": None,
    "affine 4": PrecisionPlan(Precision.make(), {"router": ROUTER}),
    "affine 8 and 3": PrecisionPlan(Precision.make(8), {"experts.down_proj": Precision(3, 32)}),
    "mxfp4": PrecisionPlan(Precision.make(mode="mxfp4")),
    "nvfp4": PrecisionPlan(Precision.make(mode="nvfp4")),
}
SETTINGS = [DiskSettings(), DiskSettings(3), DiskSettings(1, direct=True), DiskSettings(3, direct=True)]


def check_all(folder: Path, cast: mx.Dtype | None, settings: DiskSettings = SETTINGS[0]) -> None:
    """Every expert of every layer, through start() and through read()."""
    model = plan(folder)
    parameters = loaded(model, cast)
    with ExpertStore.open(model, cast, settings) as store:
        assert store.layers == (*(f"{layer}.mlp" for layer in _decoders(folder, model.mtp_layers)),)
        total = 0
        for layer in range(len(store.layers)):
            jobs = [(expert, make_room(store, layer)) for expert in range(model.args.num_experts)]
            reads = store.start(layer, jobs)
            reads.wait()
            assert reads.failed == []
            total += reads.nbytes
            for expert, into in jobs:
                assert sum(array.nbytes for array in into) == store.expert_bytes(layer)
                assert all(map(equal, into, expert_of(store, layer, expert, parameters)))
            again = make_room(store, layer)
            total -= len(jobs) * store.read(layer, 5, again)
            assert all(map(equal, again, expert_of(store, layer, 5, parameters)))
        assert total == 0


def _decoders(folder: Path, mtp_layers: int) -> list[str]:
    trunk = "language_model.model" if plan(folder).family.model_type == "qwen3_5_moe" else "model"
    return [*(f"{trunk}.layers.{n}" for n in range(2)), *(f"mtp.layers.{n}" for n in range(mtp_layers))]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_expert_is_the_loaded_one(tmp_path: Path, checkpoint: str, precision: str) -> None:
    folder = make_checkpoint(tmp_path / "model", dtype=mx.bfloat16, **CHECKPOINTS[checkpoint])
    if PRECISIONS[precision]:
        folder = convert(Conversion(plan(folder), PRECISIONS[precision]), tmp_path / "quantised", progress=False)
    packed = convert(Conversion(plan(folder), pack=True), tmp_path / "packed", progress=False)
    for path in (folder, packed):
        for cast in (mx.float32, None, mx.float16):
            check_all(path, cast)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("pack", [False, True])
def test_every_way_of_reading_gives_the_same(tmp_path: Path, settings: DiskSettings, pack: bool) -> None:
    folder = make_checkpoint(tmp_path / "model", dtype=mx.float16, mtp="separate")
    job = Conversion(plan(folder), PRECISIONS["affine 4"], pack=pack)
    check_all(convert(job, tmp_path / "quantised", progress=False), mx.float32, settings)


def test_the_embedded_model_s_experts_are_the_loaded_ones() -> None:
    model = plan(EMBEDDED)
    load_model(model, "float32")
    modules = dict(model.model.named_modules())
    with ExpertStore.open(model, mx.float32) as store:
        assert len(store.layers) == 9
        for layer, path in enumerate(store.layers):
            names = [field.name.split(".") for field in store.fields(layer)]
            expected = [bits(modules[f"{path}.switch_mlp.{module}"][kind]) for module, kind in names]
            jobs = [(expert, make_room(store, layer)) for expert in range(128)]
            store.start(layer, jobs).wait()
            for expert, into in jobs:
                assert all(equal(made, parameter[expert]) for made, parameter in zip(into, expected, strict=True))


@pytest.fixture
def count_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    calls = []
    original = files.pread_into

    def pread_into(*arguments: Any) -> int:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(files, "pread_into", pread_into)
    return lambda: len(calls)


@pytest.mark.parametrize(("pack", "expected"), [(False, 9), (True, 1)])
@pytest.mark.parametrize("direct", [False, True])
def test_a_packed_expert_takes_one_read(
    tmp_path: Path, pack: bool, expected: int, direct: bool, count_reads: Callable[[], int]
) -> None:
    folder = make_checkpoint(tmp_path / "model", dtype=mx.bfloat16)
    job = Conversion(plan(folder), PRECISIONS["affine 4"], pack=pack)
    folder = convert(job, tmp_path / "quantised", progress=False)
    with ExpertStore.open(plan(folder), mx.float32, DiskSettings(direct=direct)) as store:
        store.read(1, 3, make_room(store, 1))
    assert count_reads() == expected


def test_neighbouring_halves_take_one_read(tmp_path: Path, count_reads: Callable[[], int]) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_5_moe", "fused")
    with ExpertStore.open(plan(folder), mx.float32) as store:
        store.read(0, 3, make_room(store, 0))
    assert count_reads() == 2  # gate_up_proj and down_proj


@pytest.mark.parametrize("layout", ["separate", "stacked"])
@pytest.mark.parametrize("pack", [False, True])
def test_places_are_those_of_the_files(tmp_path: Path, layout: str, pack: bool) -> None:
    folder = make_checkpoint(tmp_path / "model", layout=layout)
    folder = convert(Conversion(plan(folder), pack=pack), tmp_path / "converted", progress=False) if pack else folder
    model = plan(folder)
    with ExpertStore.open(model, mx.float32) as store:
        for field in store.fields(1):
            place = field.place
            recipe = model.recipes[f"{store.layers[1]}.switch_mlp.{field.name}"]
            starts = {model.checkpoint.tensors[source].start for source in recipe.sources}
            assert 0 <= place < files.PAGE
            if len({start % 64 for start in starts}) == 1:
                assert (place - min(starts)) % 64 in (0, 61, 62, 63)  # elements are aligned, files need not be
            if pack:
                assert place == min(starts) % files.PAGE
            assert place % 4 == 0
    with ExpertStore.open(model, mx.float16) as store:
        assert {field.place for field in store.fields(1)} == {0}  # cast: slots are not what is read into


# Mistakes that these tests must find.


def _next_expert(pieces: list[ranges.Piece], expert: int) -> ranges.Piece:
    return pieces[(expert + 1) % len(pieces)]


def _coalesce_all(pieces: list[ranges.Piece]) -> tuple[ranges.Run, ...]:
    """As if the fields always followed each other."""
    order = tuple(sorted(range(len(pieces)), key=lambda i: pieces[i].offset))
    return (ranges._run([pieces[i] for i in order], ranges._picker(order)),)


def _first_half(entry: Any, file: int, half: int | None, stacked: bool) -> ranges.Piece:
    return _PIECE(entry, file, half and 0, stacked)


def _no_stride(entry: Any, file: int, half: int | None, stacked: bool) -> ranges.Piece:
    return _PIECE(entry, file, half, stacked)._replace(stride=0)


def _stale(caster: Caster, into: Any) -> None:
    for array, source in zip(into, caster.stored, strict=True):
        array[...] = source


_PIECE = ranges._piece
MUTANTS: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "reads the next expert": (ranges, "_of_expert", _next_expert, CHECKPOINTS["separate"]),
    "takes fields for neighbours": (ranges, "_coalesce", _coalesce_all, CHECKPOINTS["stacked"]),
    "takes the first half for the second": (ranges, "_piece", _first_half, CHECKPOINTS["fused"]),
    "always reads expert 0": (ranges, "_piece", _no_stride, CHECKPOINTS["stacked"]),
    "takes bfloat16 for integers": (Caster, "deliver", _stale, CHECKPOINTS["separate"]),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_dies(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    place, attribute, mutant, options = MUTANTS[name]
    folder = make_checkpoint(tmp_path / "model", dtype=mx.bfloat16, **options)
    check_all(folder, mx.float32)
    monkeypatch.setattr(place, attribute, mutant)
    with pytest.raises(AssertionError):
        check_all(folder, mx.float32)
    record_property("killed_by", "every expert is the loaded one")
