"""Whatever is in memory, logits are those of the resident model to the last bit; whatever fails, the next are too."""

from __future__ import annotations

import errno
import itertools
import struct
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from strata_mlx import Fault, load, stream_generate
from strata_mlx.experts.slots import UnifiedSlots
from strata_mlx.experts.stream import KERNEL_CHANGES, StreamedExperts
from strata_mlx.experts.streaming import streaming_of
from strata_mlx.experts.table import SlotTable
from tests.experts.staged import STAGED
from tests.experts.streamed import EXPERTS, TOP_K, checkpoint, logits, reads, same, splitting, streamed
from tests.tiny import TINY, read, save

CHECKPOINTS = [
    (family, layout)
    for family, tiny in TINY.items()
    for layout in tiny.layouts
    if (family, layout) not in (("qwen3_5_moe", "separate"), ("qwen3_moe", "stacked"))
]
FEW = (1, 2, 9, 1)  # windows of a short run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("stream") / "model", layout="stacked")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    return logits(load(folder)[0])


@pytest.fixture(scope="module")
def few_expected(folder: Path) -> list[Any]:
    return logits(load(folder)[0], FEW)


@pytest.mark.parametrize(("family", "layout"), CHECKPOINTS)
def test_every_family_and_layout_gives_the_bits_of_the_resident_model(family: str, layout: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", family, layout, dtype=mx.bfloat16)
    mtp = bool(TINY[family].heads)
    plain = logits(load(path, mtp=mtp)[0])
    for slots in (TOP_K, TOP_K + 3):
        model = streamed(path, slots, mtp=mtp)
        assert same(logits(model), plain)
        assert same(logits(model), plain)  # with other experts in memory than at first


@pytest.mark.parametrize("split", [False, True], ids=["at once", "apart"])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("kind", [UnifiedSlots, *STAGED])
def test_no_slot_count_or_thread_changes_a_bit(
    folder: Path, expected: list[Any], kind: Callable[..., Any], threads: int, split: bool
) -> None:
    with splitting(split):
        for slots, eviction in ((TOP_K, "lru"), (TOP_K + 1, "frequency"), (8, "lru"), (EXPERTS - 1, "frequency")):
            model = streamed(folder, slots, kind=kind, threads=threads, eviction=eviction)
            assert same(logits(model), expected)
            assert same(logits(model), expected)


class OnAGPU(UnifiedSlots):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pads = True


@pytest.mark.parametrize("kind", [OnAGPU, pytest.param(UnifiedSlots, marks=pytest.mark.xfail(strict=True))])
def test_a_part_of_a_window_is_computed_by_the_kernel_of_all_of_it(folder: Path, kind: Callable[..., Any]) -> None:
    """Where another number of pairs means another kernel, whose results have other bits: here, quite other values."""
    original = SwitchGLU.__call__

    def by_count(self: SwitchGLU, x: mx.array, indices: mx.array) -> mx.array:
        return original(self, x, indices) * (1.0 + 0.25 * sum(indices.size >= pairs for pairs in KERNEL_CHANGES))

    with patch.object(SwitchGLU, "__call__", by_count), splitting(True):
        expected = logits(load(folder)[0])
        assert all(same(logits(streamed(folder, slots, kind=kind)), expected) for slots in (TOP_K, 8, EXPERTS - 1))


@pytest.mark.parametrize("splits", [True, False])
def test_few_rows_are_computed_in_groups_where_that_pays(splits: bool, folder: Path, expected: list[Any]) -> None:
    """A prompt's rows are in any case, where reads are slow."""
    rows = []
    in_groups = StreamedExperts._in_groups

    def recorded(self: StreamedExperts, x: mx.array, *rest: Any) -> mx.array:
        rows.append(x.shape[1])
        return in_groups(self, x, *rest)

    model = streamed(folder, EXPERTS - 1)
    found = streaming_of(model)
    assert found is not None
    for layer in found.layers.values():
        layer._pool.splits = splits
    with splitting(True), patch.object(StreamedExperts, "_in_groups", recorded):
        assert same(logits(model), expected)
    assert (min(rows) <= 4) == splits
    assert max(rows) > 16


def test_slots_may_differ_by_layer(folder: Path, expected: list[Any]) -> None:
    model = streamed(folder, [EXPERTS, 5])
    assert same(logits(model), expected)
    found = streaming_of(model)
    assert found is not None
    assert list(found.layers) == [1]


def test_pinned_experts_stay(folder: Path, expected: list[Any]) -> None:
    model = streamed(folder, TOP_K + 2)
    found = streaming_of(model)
    assert found is not None
    for layer in found.layers.values():
        layer.table = SlotTable(EXPERTS, TOP_K + 2, layer.table.eviction, pinned=(3, 5))
    assert same(logits(model), expected)
    assert all(table.resident[[3, 5]].all() for table in found.tables.values())


@pytest.mark.parametrize("split", [False, True], ids=["at once", "apart"])
def test_speculative_text_is_the_plain_one(tmp_path: Path, split: bool) -> None:
    path = checkpoint(tmp_path / "model", layout="stacked")
    plain, tokenizer = load(path, mtp=True)
    expected = [r.token for r in stream_generate(plain, tokenizer, "some text", 24, mtp=False)]
    with splitting(split):
        for mtp in (True, False):
            model = streamed(path, TOP_K + 1, mtp=True)
            assert [r.token for r in stream_generate(model, tokenizer, "some text", 24, mtp=mtp)] == expected


def test_a_changed_expert_changes_the_logits(tmp_path: Path, expected: list[Any]) -> None:
    """What is read from disk is what computes: else nothing here would say anything."""
    path = checkpoint(tmp_path / "model", layout="stacked")
    for file in path.glob("model-*.safetensors"):
        tensors = read(file)
        for name, array in tensors.items():
            if name.endswith("layers.1.mlp.switch_mlp.down_proj.weight"):
                tensors[name] = mx.concatenate([array[:6], array[6:7] * 1.01, array[7:]])
        save(file, tensors)
    assert not same(logits(streamed(path, TOP_K)), expected)


@pytest.mark.parametrize("kind", [Fault, KeyboardInterrupt, MemoryError], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("threads", [1, 3])
def test_after_a_failure_at_any_read_the_same_request_gives_the_same_bits(
    folder: Path, few_expected: list[Any], threads: int, kind: type[BaseException]
) -> None:
    model = streamed(folder, TOP_K + 1, threads=threads)
    for number in itertools.count():
        reached = False

        def act(read: int, number: int = number) -> None:
            nonlocal reached
            # Ctrl-C comes to the main thread alone: at that read, or at its next one.
            main = threading.current_thread() is threading.main_thread()
            if not reached and (read == number if kind is not KeyboardInterrupt else main and read >= number):
                reached = True
                raise OSError(errno.EIO, "Input/output error") if kind is Fault else kind()

        with reads(act):
            says = "safetensors: tensor .*Input/output error" if kind is Fault else None
            try:
                with pytest.raises(kind, match=says):
                    done = logits(model, FEW)
            except pytest.fail.Exception:  # the run has fewer reads
                assert not reached
                assert same(done, few_expected)
                break
        check_consistent(model)
        assert same(logits(model, FEW), few_expected)
    assert number > 50


def check_consistent(model: nn.Module) -> None:
    """Every expert that is called resident lies whole in its slot."""
    found = streaming_of(model)
    assert found is not None
    found.store.drain()
    for layer in found.layers.values():
        table = layer.table
        assert (table.resident == (table.slot_of >= 0)).all()
        assert table.free + np.count_nonzero(table.resident) == table.slots, "a slot is lost"
        for expert in np.flatnonzero(table.resident):
            held = layer._pool.write([int(table.slot_of[expert])])[0]
            truth = [np.empty_like(target) for target in held]
            found.store.read(layer.place, int(expert), truth)
            assert all((a == b).all() for a, b in zip(held, truth, strict=True))


@pytest.mark.parametrize("split", [False, True], ids=["at once", "apart"])
def test_ctrl_c_at_any_line_leaves_a_model_that_works(folder: Path, few_expected: list[Any], split: bool) -> None:
    watched = tuple(f"{name}.py" for name in ("stream", "ahead", "table", "slots", "eviction"))

    def interrupted(model: nn.Module, line: int) -> int:
        """Run until the line'th line of these files; the number of lines that were passed."""
        passed = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal passed
            if not (frame.f_code.co_filename.endswith(watched) and "experts" in frame.f_code.co_filename):
                return None
            if event == "line":
                passed += 1
                if passed == line:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            logits(model, FEW)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return passed

    with splitting(split):
        model = streamed(folder, TOP_K + 1)
        total = interrupted(model, -1)
        for line in range(1, total, 23):
            assert interrupted(model, line) <= line
            assert same(logits(model, (1, 2)), few_expected[:2])
        check_consistent(model)
        assert same(logits(model, FEW), few_expected)


def test_traffic_counts_what_went_over_the_disk(folder: Path) -> None:
    model = streamed(folder, 8)
    found = streaming_of(model)
    assert found is not None
    before = found.traffic()
    logits(model)
    now = found.traffic()
    layers, rows = 2, 40 + 1 + 1 + 1 + 4 + 2 + 1 + 3 + 17 + 1
    assert now.windows == 10 * layers
    assert now.picks == rows * TOP_K * layers
    assert now.bytes == now.misses * found.store.expert_bytes(0)
    assert 0 < now.misses < now.hits + now.misses < now.picks
    assert min(now.read_seconds, now.host_seconds, now.compute_seconds) > 0
    assert now.stall_seconds >= 0
    assert (now - before) == now


def wrong_order(original: Callable[..., Any], self: Any, *args: Any) -> Any:
    return original(self, *args)[:, :, ::-1]


def drops_a_wave(original: Callable[..., Any], self: Any, x: Any, chosen: Any, missing: Any, *rest: Any) -> Any:
    return original(self, x, chosen, missing[1:] if len(missing) > 1 else missing, *rest)


def repeats_a_wave(original: Callable[..., Any], self: Any, x: Any, chosen: Any, missing: Any, *rest: Any) -> Any:
    return original(self, x, chosen, np.concatenate([missing[:1], missing]), *rest)


def evicts_what_is_needed(original: Callable[..., Any], self: Any, experts: Any, keep: Any, *rest: Any) -> Any:
    return original(self, experts, keep[:0], *rest)


def resident_before_the_read(original: Callable[..., Any], self: Any, experts: Any, keep: Any) -> Any:
    pairs = original(self, experts, keep)
    for expert, slot in pairs:
        self.slot_of[expert], self.resident[expert] = slot, True
    return pairs


def not_recovered(original: Callable[..., Any], self: Any) -> None:
    del original
    self._open = False


def one_slot_off(original: Callable[..., Any], self: Any, pairs: Any) -> None:
    slots = [slot for _, slot in pairs]
    self._reserved = dict(zip(slots[1:] + slots[:1], [expert for expert, _ in pairs], strict=True))
    original(self, [(expert, slot) for (expert, _), slot in zip(pairs, slots[1:] + slots[:1], strict=True)])


MUTANTS: dict[Callable[..., Any], tuple[type, str]] = {
    wrong_order: (StreamedExperts, "_in_groups"),
    drops_a_wave: (StreamedExperts, "_in_groups"),
    repeats_a_wave: (StreamedExperts, "_in_groups"),
    evicts_what_is_needed: (StreamedExperts, "_fetch"),
    resident_before_the_read: (SlotTable, "reserve"),
    not_recovered: (StreamedExperts, "_recover"),
    one_slot_off: (SlotTable, "commit"),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_die(
    folder: Path, expected: list[Any], mutant: Any, record_property: Callable[[str, object], None]
) -> None:
    owner, name = MUTANTS[mutant]
    original = getattr(owner, name)

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        return mutant(partial(original, **options), self, *args)

    def once(read: int) -> None:
        if read == 30:
            raise OSError(errno.EIO, "Input/output error")

    with patch.object(owner, name, broken):
        try:
            model = streamed(folder, TOP_K + 1)
            with reads(once), pytest.raises(Fault):
                logits(model)
            for _ in range(2):
                assert same(logits(model), expected), "other logits"
            check_consistent(model)
        except (AssertionError, ValueError, KeyError, IndexError, struct.error) as error:
            record_property("killed_by", f"{type(error).__name__}: {error}".splitlines()[0][:80])
        else:
            pytest.fail("the mutant lives")
