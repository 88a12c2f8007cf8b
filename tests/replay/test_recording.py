"""A recording holds what the decoder would meet at every position, and a broken file is found out."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from strata_mlx import Fault, InputError, load
from strata_mlx.engine import generate_step
from strata_mlx.models.moe import blocks
from strata_mlx.models.trunk import Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.replay.recording import Recording, record
from strata_mlx.routing import Routing
from tests.errors import refuses
from tests.experts.streamed import EXPERTS, TOP_K, checkpoint, streamed
from tests.replay.conftest import PROMPTS, TOKENS


def equal(a: Recording, b: Recording) -> bool:
    return a.header == b.header and all(
        np.array_equal(x, y) and x.dtype == y.dtype if isinstance(x, np.ndarray) else x == y
        for one, other in zip(a.documents, b.documents, strict=True)
        for x, y in zip(vars(one).values(), vars(other).values(), strict=True)
    )


def test_the_text_is_that_of_plain_decoding(recording: Recording, model: nn.Module) -> None:
    for document, prompt in zip(recording.documents, PROMPTS, strict=True):
        plain = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=TOKENS)]
        assert document.tokens.tolist() == prompt + plain
        assert (document.prompt, document.positions) == (len(prompt), TOKENS - 1)


def test_a_draft_agrees_where_it_is_the_texts_token(recording: Recording) -> None:
    for document in recording.documents:
        last = document.positions - 1
        assert not document.agree[last, 1:].any()  # beyond the end
        assert ((document.p > 0) & (document.p <= 1)).all()
    assert 0.05 < np.mean([document.agree[:, 0].mean() for document in recording.documents]) < 1


def test_the_first_row_of_each_window_has_the_experts_of_plain_decoding(recording: Recording, model: nn.Module) -> None:
    seen: dict[int, list[Any]] = {}
    before = [block.routing for block in blocks(model)]
    try:
        for block in blocks(model):
            block.routing = Routing(observer=lambda layer, ids: seen.setdefault(layer, []).append(ids))
        for document in recording.documents:
            seen.clear()
            trunk, cache = Trunk(model), make_cache(model)
            trunk(mx.array(document.tokens[None, :-1]), cache)
            for index, layer in enumerate(recording.header.layers):
                rows = np.array(seen[layer][0])[0]
                assert np.array_equal(rows[: document.prompt], document.prompt_experts[:, index])
                assert np.array_equal(rows[document.prompt :], document.experts[:, 0, index])
    finally:
        for block, routing in zip(blocks(model), before, strict=True):
            block.routing = routing


def test_rows_of_right_drafts_have_the_experts_of_the_tokens_that_they_become(recording: Recording) -> None:
    pairs = 0
    for document in recording.documents:
        right = np.cumprod(document.agree, axis=1).sum(axis=1)
        for t in range(document.positions):
            for row in range(1, min(right[t], document.positions - 1 - t) + 1):
                assert np.array_equal(document.experts[t, row], document.experts[t + row, 0])
                pairs += 1
    assert pairs > 10


def test_recording_leaves_the_model_as_it_was(folder: Path) -> None:
    model, _ = load(folder, mtp=True)
    routing = Routing()
    for block in blocks(model):
        block.routing = routing
    with pytest.raises(ZeroDivisionError):
        record(model, None, PROMPTS[:1], 4, report=lambda: 1 // 0)
    assert all(block.routing is routing for block in blocks(model))


def test_what_streams_is_recorded_alike(recording: Recording, folder: Path) -> None:
    assert equal(record(streamed(folder, TOP_K, mtp=True), None, PROMPTS, TOKENS), recording)


def test_an_end_token_ends_a_document(recording: Recording, model: nn.Module) -> None:
    text = recording.documents[0].tokens[recording.documents[0].prompt :].tolist()
    stop = text[8]
    tokenizer = SimpleNamespace(eos_token_ids={stop})
    short = record(model, tokenizer, PROMPTS[:1], TOKENS)
    if text.index(stop) == 0:
        assert not short.documents
    else:
        assert short.documents[0].tokens.tolist() == PROMPTS[0] + text[: text.index(stop) + 1]


def test_a_file_gives_back_what_was_saved(recording: Recording, model: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "recording.npz"
    recording.save(file)
    found = Recording.load(file)
    assert equal(found, recording)
    found.check_model(model)
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name]
    assert found.of([1]).documents[0].name == "1"


def test_another_model_is_told_from_the_one_that_was_recorded(recording: Recording, tmp_path: Path) -> None:
    others: dict[str, dict[str, Any]] = {"weights": {"seed": 1}, "configuration": {"seed": 5, "norm_topk_prob": False}}
    for name, changes in others.items():
        other, _ = load(
            checkpoint(tmp_path / name, layout="stacked", vocab_size=5, eos_token_id=None, **changes), mtp=True
        )
        with refuses(InputError, "another model", "record again"):
            recording.check_model(other)


def rewrite(file: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """Let ``change`` have header and arrays of a file."""
    with np.load(file) as stored:
        arrays = {name: stored[name] for name in stored.files}
    header = json.loads(arrays.pop("header").tobytes())
    change(header, arrays)
    np.savez(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)


BROKEN: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "another version": (lambda header, _: header.update(version=2), "has version 2, this program reads 1"),
    "another format": (lambda header, _: header.update(format="x"), "not a recording"),
    "no steps": (lambda header, _: header.pop("steps"), "header is broken"),
    "negative steps": (lambda header, _: header.update(steps=-1), "header is broken"),
    "layers of no kind": (lambda header, _: header.update(layers="x"), "header is broken"),
    "a missing array": (lambda _, arrays: arrays.pop("1/p"), "document 1 has no array '1/p'"),
    "a short array": (lambda _, arrays: arrays.update({"0/agree": arrays["0/agree"][1:]}), "document 0: agree is bool"),
    "another type": (lambda _, arrays: arrays.update({"0/p": arrays["0/p"].astype(float)}), "document 0: p is float64"),
    "a wrong expert": (lambda _, arrays: arrays["2/experts"].fill(EXPERTS), f"names expert {EXPERTS} of {EXPERTS}"),
    "no positions": (lambda _, arrays: arrays.update({"0/p": arrays["0/p"][:0]}), "document 0"),
    "a number": (lambda _, arrays: arrays.update({"0/p": np.float32(1)}), "document 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_found_out(name: str, recording: Recording, tmp_path: Path) -> None:
    change, message = BROKEN[name]
    file = tmp_path / "recording.npz"
    recording.save(file)
    rewrite(file, change)
    with refuses(InputError, file, message):
        Recording.load(file)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"{}", b"\x93NUMPY"])
def test_what_is_no_recording_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file.npz"
    file.write_bytes(content)
    with refuses(InputError, file, "not a recording"):
        Recording.load(file)


def test_a_file_that_is_cut_short_is_refused(recording: Recording, tmp_path: Path) -> None:
    file = tmp_path / "recording.npz"
    recording.save(file)
    content = file.read_bytes()
    for end in (10, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:end])
        with refuses(InputError, file):
            Recording.load(file)
    array = tmp_path / "array.npy"
    np.save(array, np.zeros(3))
    with refuses(InputError, array, "not a recording"):
        Recording.load(array)
    with refuses(InputError, "missing.npz", "cannot be read"):
        Recording.load(tmp_path / "missing.npz")


def test_a_file_that_cannot_be_written_is_a_fault(recording: Recording, tmp_path: Path) -> None:
    with refuses(Fault, "missing", "cannot be written"):
        recording.save(tmp_path / "missing" / "recording.npz")


def test_wrong_arguments_are_refused(model: nn.Module, folder: Path) -> None:
    with refuses(InputError, "steps is 9"):
        record(model, None, PROMPTS, 4, steps=9)
    with refuses(InputError, "tokens is 1"):
        record(model, None, PROMPTS, 1)
    with refuses(InputError, "at least two tokens"):
        record(model, None, [[1]], 4)
    with refuses(InputError, "token id 9"):
        record(model, None, [[1, 9]], 4)
    with refuses(InputError, "without an MTP head"):
        record(load(folder)[0], None, PROMPTS, 4)


def test_names_and_steps_are_kept(model: nn.Module) -> None:
    found = record(model, None, PROMPTS[:1], 3, names=["first"], steps=1)
    assert found.documents[0].name == "first"
    assert found.documents[0].p.shape == (2, 1)
    assert found.documents[0].chain_experts.shape == (2, 0, 1, TOP_K)
    assert replace(found.header, steps=7).steps == 7
