"""The report is one well-formed page that needs nothing else, and says what the results say."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from strata_mlx.report import page
from tests.report.results import KINDS, results

pytest.importorskip("matplotlib")

VOID = {"meta", "link", "br"}
PLOTS = ("speeds", "parts", "reliability", "acceptance", "costs")
CASES = {
    "pays": results(),
    "does not pay": results(pays=False),
    "streams": results(streams=True),
    "priced": results(evaluation=True),
}


class Page(HTMLParser):
    """What is in a page. Raises AssertionError where an element is not closed, or closed twice."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, tag
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.tags if name in (attributes.get("class") or "").split()]


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def text(case: str) -> str:
    return page(CASES[case])


def test_it_is_well_formed_and_identifiers_are_unique(text: str) -> None:
    shown = Page(text)
    assert len(shown.ids) == len(set(shown.ids))


def test_it_loads_nothing(text: str) -> None:
    assert "http:" not in text
    assert "https:" not in text
    assert "<script" not in text
    assert "@import" not in text
    assert "@font-face" not in text
    for tag, attributes in Page(text).tags:
        for name in ("src", "href", "data", "action", "poster", "srcset", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_references_lead_somewhere(text: str) -> None:
    shown = Page(text)
    targets = [value[1:] for _, attributes in shown.tags if (value := attributes.get("href")) and value[0] == "#"]
    targets += [target.strip("#'\"") for target in re.findall(r"url\(([^)]*)\)", text)]
    targets += [
        target
        for _, attributes in shown.tags
        for name in ("aria-labelledby", "aria-describedby")
        for target in (attributes.get(name) or "").split()
    ]
    assert targets
    assert set(targets) <= set(shown.ids)


def test_every_plot_is_there_with_words_for_it(text: str, case: str) -> None:
    shown = Page(text)
    names = [*PLOTS, *(["price"] if case == "priced" else [])]
    assert sorted(id_ for id_ in shown.ids if id_ in {*PLOTS, "price"}) == sorted(names)
    assert text.count("<svg") == len(names)
    for plot in shown.with_class("plot"):
        assert plot["role"] == "img"
        assert plot["aria-labelledby"]
        assert plot["aria-describedby"]
    for name in names:
        words = re.search(rf'id="{name}-alt">([^<]*)<', text)
        assert words
        assert re.search(r"\d", words[1])


def test_plots_have_the_colours_of_the_page(text: str) -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) == set()
    used = set(re.findall(r"var\((--\w+)\)", text))
    light, dark = (set(re.findall(r"(--\w+):", block)) for block in re.findall(r":root \{(.*?)\}", text, re.DOTALL))
    assert used <= light == dark


def test_numbers_are_in_tables_too(text: str, case: str) -> None:
    words = " ".join(Page(text).words.split())
    for place, kind in enumerate(KINDS):
        assert f"{100 + 10 * place:.1f}" in words
        assert kind in words
    assert str(CASES[case]["recommendation"]) in words
    assert "a <model> & more" in words
    assert "--policy policy.json" in words


def test_what_was_not_priced_is_said(text: str, case: str) -> None:
    assert ("No biased routing policy was given" in text) == (case != "priced")


def test_the_same_results_give_the_same_page(text: str, case: str) -> None:
    assert page(CASES[case]) == text
