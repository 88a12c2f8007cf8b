"""Texts come from a user's files or from installed packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata_mlx import load
from strata_mlx.errors import InputError
from strata_mlx.texts import beginnings, installed, prompts, read
from tests.errors import refuses
from tests.tiny import make_checkpoint


def test_a_folder_gives_its_texts_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, content in {
        "b.txt": b"two",
        "a.py": b"one",
        "sub/c": "drei \u00fc".encode(),
        "picture": b"\xff\x00\x01",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".hidden" / "d.txt").write_text("hidden")
    (tmp_path / "empty").write_text(" \n")
    texts = read([tmp_path])
    assert [(text.name, text.text) for text in texts] == [("a.py", "one"), ("b.txt", "two"), ("sub/c", "drei ü")]
    assert not any(text.prompt for text in texts)


def test_lines_of_jsonl_are_prompts(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b", "answer": 1}\n')
    assert [(text.name, text.text, text.prompt) for text in read([file])] == [
        ("p.jsonl:1", "a", True),
        ("p.jsonl:3", "b", True),
    ]
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with refuses(InputError, file, "line 2"):
        read([file])


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with refuses(InputError, tmp_path / "bytes", "UTF-8"):
        read([tmp_path / "bytes"])
    with refuses(InputError, tmp_path / "none"):
        read([tmp_path / "none"])
    (tmp_path / "folder").mkdir()
    with refuses(InputError, tmp_path / "folder", "no text"):
        read([tmp_path / "folder"])


def test_prompts_are_whole_and_texts_have_a_beginning(tmp_path: Path) -> None:
    tokenizer = load(make_checkpoint(tmp_path / "model", layout="stacked"))[1]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "why?"}))
    (tmp_path / "long.txt").write_text("x" * 100)
    (tmp_path / "short.txt").write_text("x")
    texts = read([tmp_path / "p.jsonl", tmp_path / "short.txt", tmp_path / "long.txt"])
    found = prompts(texts, tokenizer, 9, 10)
    assert [(each.name, len(each.ids)) for each in found[1:]] == [("long.txt", 10)]
    assert "why?" in tokenizer.decode(found[0].ids)
    assert "assistant" in tokenizer.decode(found[0].ids)
    assert [each.name for each in beginnings(texts, tokenizer, 9, 10)] == ["long.txt"]
    assert len(prompts(texts, tokenizer, 1, 10)) == 1


def test_installed_packages_alternate_and_must_be_there() -> None:
    packages = ("mlx_lm", "huggingface_hub")
    names = [text.name.split("/")[0] for _, text in zip(range(4), installed(packages), strict=False)]
    assert names == [*packages, *packages]
    with refuses(InputError, "no_such_package"):
        next(iter(installed(["no_such_package"])))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_no_more_than_were_asked_for(count: int, tmp_path: Path) -> None:
    tokenizer = load(make_checkpoint(tmp_path / "model", layout="stacked"))[1]
    assert len(beginnings(installed(["mlx_lm"]), tokenizer, count, 20)) == count
