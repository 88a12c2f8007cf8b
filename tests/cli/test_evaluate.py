"""strata_mlx evaluate."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number} times seven is {7 * number}")
    return tmp_path


def test_it_prints_a_price_list(run: Run, tiny: Path, texts: Path) -> None:
    options = ("--data", texts, "--tokens", "10", "--slots", "3", "4", "--route-policy", '{"moce_bonus": 3}')
    ended = run("evaluate", "--model", tiny, *options)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count("moce bonus 3.0") == ended.out.count("\nexact ") == 2
    assert "3 of 8 experts of a layer in memory" in ended.out
    result = json.loads(run("evaluate", "--model", tiny, *options, "--json").out)
    assert [(row["slots"], row["name"]) for row in result["rows"]] == [
        (3, "exact"), (3, "moce bonus 3.0"), (4, "exact"), (4, "moce bonus 3.0"),
    ]  # fmt: skip
    assert result["rows"][1]["misses"] < result["rows"][0]["misses"]
    assert result["rows"][1]["policy"]["moce_bonus"] == 3


def test_a_usual_choice_is_priced_where_none_is_given(run: Run, tiny: Path, texts: Path) -> None:
    result = json.loads(run("evaluate", "--model", tiny, "--data", texts, "--tokens", "6", "--json").out)
    assert len(result["rows"]) == 7
    assert {row["slots"] for row in result["rows"]} == {2}


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (("--memory", "1GB", "--slots", "4"), "--memory and --slots"),
        (("--slots", "8"), "slots is 8"),
        (("--slots", "4", "--eviction", "random"), "random"),
        (("--tokens", "1000"), "0 documents of 1000 tokens"),
        (("--route-policy", '{"moce_bonus": "much"}'), "moce_bonus"),
        (("--memory", "1kB"), "too small"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_error(
    run: Run, tiny: Path, texts: Path, arguments: tuple[str, ...], mention: str
) -> None:
    ended = run("evaluate", "--model", tiny, "--data", texts, "--tokens", "6", *arguments)
    assert ended.code == 2
    assert mention in ended.error
