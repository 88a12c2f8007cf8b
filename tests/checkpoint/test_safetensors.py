"""Headers of safetensors files: sound ones give exactly the bytes, broken ones exactly one error."""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_mlx.checkpoint import read_header
from strata_mlx.errors import CheckpointError
from tests.errors import may_refuse, refuses

DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "F16": mx.float16,
    "BF16": mx.bfloat16, "U32": mx.uint32, "I32": mx.int32, "F32": mx.float32, "U64": mx.uint64, "I64": mx.int64,
}  # fmt: skip
PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def raw_bytes(array: mx.array) -> bytes:
    return np.array(array.reshape(-1).view(mx.uint8)).tobytes() if array.size else b""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=4)),
        max_size=5,
    ),
    st.sampled_from([None, {"format": "mlx"}]),
)
def test_every_tensor_that_mlx_saves_is_found_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None
) -> None:
    file = tmp_path_factory.mktemp("saved") / "model.safetensors"
    rng = np.random.default_rng(0)
    arrays = {n: mx.array(rng.integers(0, 2, shape)).astype(DTYPES[dtype]) for n, (dtype, shape) in drawn.items()}
    mx.save_safetensors(str(file), arrays, metadata)
    entries, data = read_header(file), file.read_bytes()
    assert entries.keys() == arrays.keys()
    for name, entry in entries.items():
        array = arrays[name]
        assert (entry.dtype, entry.shape) == (drawn[name][0], array.shape)
        assert (entry.size, entry.nbytes, entry.file) == (array.size, array.nbytes, file)
        assert data[entry.start : entry.stop] == raw_bytes(array)


def test_a_scalar_and_an_empty_tensor_have_their_places(file: Path) -> None:
    scalar = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    empty = {"dtype": "F32", "shape": [3, 0], "data_offsets": [4, 4]}
    entries = read_header(write(file, {"scalar": scalar, "empty": empty}, b"abcd"))
    assert file.read_bytes()[entries["scalar"].start : entries["scalar"].stop] == b"abcd"
    assert entries["empty"].nbytes == entries["empty"].size == 0


@pytest.mark.parametrize(
    ("header", "says"),
    {
        "not JSON": (b'{"a":', "not valid JSON"),
        "not UTF-8": (b'{"\xff": 1}', "not valid JSON"),
        "UTF-16": (json.dumps({"a": PAIR}).encode("utf-16"), "not valid JSON"),
        "a list": ([PAIR], "not an object"),
        "too deep": (b"[" * 100_000, "not valid JSON"),
        "a huge number": (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        "the same name twice": (b'{"a": %b, "a": %b}' % ((json.dumps(PAIR).encode(),) * 2), "'a' occurs twice"),
        "no entry": ({"a": None}, "'a' is malformed"),
        "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, "'a' is malformed"),
        "metadata that MLX refuses": ({"__metadata__": {"step": 1}, "a": PAIR}, "__metadata__"),
        "unknown dtype": ({"a": {**PAIR, "dtype": "Q4_K"}}, "'a' has dtype 'Q4_K'"),
        "a dtype that MLX lacks": ({"a": {**PAIR, "dtype": "F64", "shape": [1]}}, "'a' has dtype 'F64'"),
        "a list for a dtype": ({"a": {**PAIR, "dtype": ["F32"]}}, "'a' is malformed"),
        "text for a shape": ({"a": {**PAIR, "shape": "22"}}, "'a' is malformed"),
        "negative size": ({"a": {**PAIR, "shape": [-1, -2]}}, "'a' is malformed"),
        "fractional size": ({"a": {**PAIR, "shape": [2.0]}}, "'a' is malformed"),
        "negative offset": ({"a": {**PAIR, "data_offsets": [-8, 0]}}, "'a' is malformed"),
        "boolean offset": ({"a": {**PAIR, "data_offsets": [False, 8]}}, "'a' is malformed"),
        "fractional offset": ({"a": {**PAIR, "data_offsets": [0.0, 8.0]}}, "'a' is malformed"),
        "reversed offsets": ({"a": {**PAIR, "data_offsets": [8, 0]}}, "'a' is malformed"),
        "three offsets": ({"a": {**PAIR, "data_offsets": [0, 8, 8]}}, "'a' is malformed"),
        "an offset beyond any file": ({"a": {**PAIR, "data_offsets": [0, 10**400]}}, "'a' is malformed"),
        "wrong byte count": ({"a": {**PAIR, "shape": [3]}}, "'a' of shape [3] and dtype F32 needs 12 bytes"),
        "overlap": ({"a": PAIR, "b": {**PAIR, "data_offsets": [4, 12]}}, "'b' overlaps that of 'a'"),
        "the same bytes twice": ({"a": PAIR, "b": PAIR}, "overlaps"),
        "a gap before": ({"a": {**PAIR, "data_offsets": [4, 12]}}, "4 stray bytes before tensor 'a'"),
        "a gap between": ({"a": PAIR, "b": {**PAIR, "data_offsets": [12, 20]}}, "4 stray bytes before tensor 'b'"),
        "truncated data": ({"a": {**PAIR, "shape": [9], "data_offsets": [0, 36]}}, "truncated: tensor 'a'"),
        "trailing bytes": ({"a": PAIR}, "24 stray bytes after the last tensor, 'a'"),
        "only data": ({}, "32 stray bytes"),
    }.values(),
)
def test_a_broken_header_gives_one_error_that_names_the_file(file: Path, header: Any, says: str) -> None:
    with refuses(CheckpointError, file, says):
        read_header(write(file, header, bytes(32)))


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 1000, 200_000_000], ids=str)
def test_a_header_larger_than_the_file_is_not_read(file: Path, length: int) -> None:
    with refuses(CheckpointError, file, "not a complete safetensors file"):
        read_header(write(file, {"a": PAIR}, bytes(8), length))


@pytest.mark.parametrize("size", range(9))
def test_a_download_cut_within_the_first_bytes_is_recognised(file: Path, size: int) -> None:
    sound = write(file, {"a": PAIR}, bytes(8)).read_bytes()
    file.write_bytes(sound[:size])
    with refuses(CheckpointError, file, "not a complete safetensors file"):
        read_header(file)


@given(st.data())
def test_no_cut_and_no_flipped_byte_of_a_header_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("hurt") / "model.safetensors"
    raw = bytearray(write(file, {"a": PAIR, "b": {**PAIR, "data_offsets": [8, 16]}}, bytes(16)).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    with may_refuse(file):
        entries = read_header(file)
        assert max(entry.stop for entry in entries.values()) == file.stat().st_size


def test_a_folder_a_missing_file_and_a_link_to_nowhere_are_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for name, says in (("", "Is a directory"), ("gone", "No such file"), ("link", "No such file")):
        with refuses(CheckpointError, tmp_path / name, says):
            read_header(tmp_path / name)


def test_a_file_without_permission_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(13, os.strerror(13), str(file))

    monkeypatch.setattr("builtins.open", denied)  # chmod would not stop root
    with refuses(CheckpointError, file, "Permission denied"):
        read_header(file)
