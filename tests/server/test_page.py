"""The page: what it is made of, and what it does in a browser, where there is one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import strata_mlx.server
from strata_mlx import load
from strata_mlx.errors import Fault
from strata_mlx.experts.traffic import Traffic
from strata_mlx.server.engine import Engine
from strata_mlx.server.jobs import Busy, End, Piece, Usage
from strata_mlx.server.limits import Limits
from tests.server.browser import BROWSER, Browser, browser
from tests.server.conftest import Serve
from tests.server.scripted import WAIT, text
from tests.server.states import EXPERTS, ShownEngine, a_request, some_totals, streaming

PAGE = Path(strata_mlx.server.__file__).with_name("page")
SIZES = (1280, 375)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
ANSWER = "document.querySelector('.answer:last-of-type')"
# Of what is seen: elements beyond the right edge or with contents that are too wide, and texts with too little contrast
# to what is behind them.
WIDE = """[...document.querySelectorAll("body *")].filter((element) => element.checkVisibility())
  .filter((element) => !element.closest(".unseen, .table *, pre *"))
  .filter((element) => element.getBoundingClientRect().right > innerWidth + 0.5 ||
    (element.matches("body, main, section, #log, dialog") && element.scrollWidth > element.clientWidth))
  .map((element) => element.outerHTML.slice(0, 90))"""
FAINT = """(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => channels(colour).slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return channels(colour)[3] === 0 ? behind(element.parentElement) : colour;
  };
  const contrast = (element) => {
    const [low, high] = [getComputedStyle(element).color, behind(element)].map(luminance).sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  return [...document.querySelectorAll("body *")].filter((element) => element.checkVisibility())
    .filter((element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
    .filter((element) => contrast(element) < 4.5)
    .map((element) => `${element.outerHTML.slice(0, 90)} ${contrast(element).toFixed(2)}`);
})()"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as chromium:
        yield chromium


@pytest.fixture
def begin(serve: Serve, plain_tokenizer: TokenizerWrapper) -> Serve:
    """Start a server, and return its address. Nothing in its answers is taken for thoughts or calls."""
    return lambda engine, **settings: serve(engine, **{"tokenizer": plain_tokenizer, **settings})


@pytest.fixture
def page(started: Browser, serve: Serve) -> Iterator[Browser]:  # noqa: ARG001
    """A browser that nothing was done with, and that leaves before ``serve`` ends its servers. A test that expects
    errors in the console takes them away.
    """
    started.look(SIZES[0])
    started.errors.clear()
    started.urls.clear()
    yield started
    started.open("about:blank")
    assert started.errors == []


def begun(page: Browser, url: str) -> None:
    """Open the page and wait until it follows the engine."""
    page.open(f"{url}/")
    page.wait("document.querySelector('#status').dataset.state === 'idle'")


def ask(page: Browser, said: str) -> None:
    page.wait("document.activeElement.id === 'message' && !document.querySelector('#send').hidden")
    page.type(said)
    page.press("Enter")


def shown(page: Browser, selector: str) -> str:
    return str(page.value(f"document.querySelector({selector!r}).innerText.trim()"))


def ended(said: int = 12) -> End:
    usage = Usage(30, 20, said, 8, 6, "exact", 100, 12, 5_620_000, 0.25, 0.5)
    return End("stop", None, usage)


def test_everything_it_loads_is_served_with_headers_that_protect_it(url: str) -> None:
    answer = httpx.get(f"{url}/")
    loaded = set(re.findall(r'(?:src|href)="([^"#]+)"', answer.text))
    for module in PAGE.glob("*.js"):
        loaded |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', module.read_text())}
    assert loaded == {f"page/{file.name}" for file in PAGE.iterdir() if file.suffix != ".html"}
    for path in ("", *loaded):
        answer = httpx.get(f"{url}/{path}")
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(f"{url}/{path}", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["page/", "page/index.html", "page/../live.py", "page/%2e%2e/live.py", "page/x.js"])
def test_nothing_else_is_served(url: str, path: str) -> None:
    assert httpx.get(f"{url}/{path}").status_code == 404


def test_it_names_no_other_host_and_puts_no_text_in_as_markup() -> None:
    for file in PAGE.iterdir():
        content = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$|\s// .*$", "", content, flags=re.MULTILINE), file.name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="):
            assert word not in content, (file.name, word)


@in_browser
def test_an_answer_is_shown_as_it_comes_and_what_it_has_cost(page: Browser, begin: Serve) -> None:
    engine = ShownEngine()
    url = begin(engine)
    begun(page, url)
    assert shown(page, "#model") == "tiny"
    ask(page, "What is a stack?")
    stream = engine.stream()
    assert shown(page, ".said").endswith("What is a stack?")
    assert page.value(f"{ANSWER}.ariaBusy") == "true"
    stream.put(Piece("It keeps what came "))
    page.wait(f"{ANSWER}.innerText.includes('keeps what came')")
    assert "last" not in shown(page, ".answer")
    stream.put(Piece("last on top:\n\n```python\nstack.append(1)\n"))
    page.wait(f"{ANSWER}.querySelector('pre')?.textContent === 'stack.append(1)'")
    stream.put(Piece("```\nIt is `quick` and **short**."))
    stream.put(ended())
    page.wait(f"{ANSWER}.querySelector('.facts').textContent")
    facts = shown(page, ".answer .facts").replace("\n", " ")
    for fact in (
        "12 tokens",
        "tokens/s",
        "prompt 30, 20 cached",
        "75 % of 8 drafts accepted",
        "12 experts read, 5.62 MB",
    ):
        assert fact in facts
    assert "exact routing" in facts
    assert page.value(f"{ANSWER}.ariaBusy") == "false"
    assert page.value(f"{ANSWER}.querySelector('code:not(pre code)').textContent") == "quick"
    assert shown(page, "#announcement") == "The answer is complete, 12 tokens."
    assert {requested.removeprefix(url) for requested in page.urls if not requested.startswith(url)} <= {"about:blank"}


@in_browser
def test_what_was_said_before_goes_along_until_a_new_chat(
    page: Browser, begin: Serve, plain_tokenizer: TokenizerWrapper
) -> None:
    engine = ShownEngine(lambda job: text("Yes.", job))
    begun(page, begin(engine))
    ask(page, "First?")
    page.wait("document.querySelectorAll('.facts > *').length > 0 && !document.querySelector('#send').hidden")
    ask(page, "Second?")
    page.wait("document.querySelectorAll('.answer[aria-busy=false]').length === 2")
    first, second = (plain_tokenizer.decode(list(stream.job.prompt)) for stream in engine.streams)
    assert second.startswith(first)
    assert second.index("Yes.") < second.index("Second?")
    page.value("document.querySelector('#new').click()")
    assert page.value("document.querySelectorAll('.answer').length") == 0
    ask(page, "First?")
    page.wait("document.querySelectorAll('.answer[aria-busy=false]').length === 1")
    assert engine.job.prompt == engine.streams[0].job.prompt


@in_browser
def test_options_are_sent(page: Browser, begin: Serve, plain_tokenizer: TokenizerWrapper) -> None:
    engine = ShownEngine(lambda job: text("Yes.", job))
    begun(page, begin(engine))
    page.value("document.querySelector('#options').open = true")
    for name, value in {"temperature": "0.65", "max-tokens": "17", "seed": "3", "system": "Be brief."}.items():
        page.value(f"document.querySelector('#{name}').focus()")
        page.type(value)
    page.value("document.querySelector('#message').focus()")
    ask(page, "Why?")
    page.wait("document.querySelector('.answer[aria-busy=false]')")
    job = engine.job
    assert (job.temperature, job.max_tokens, job.seed) == (0.65, 17, 3)
    assert "Be brief." in plain_tokenizer.decode(list(job.prompt))


@in_browser
@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ("One.\n```\ncode", ["DIV", "PRE"]),
        ("```python\ncode\n```\n\nMore.\n```\ncode\n```", ["PRE", "DIV", "PRE"]),
        (" # as models go on with code\n    def push(self):\n        pass", ["PRE"]),
        ("A list:\n- one\n- two\n    more of two\n- three", ["DIV"]),
        ("\n\n", []),
    ],
)
def test_code_is_told_from_prose(page: Browser, url: str, said: str, kinds: list[str]) -> None:
    page.open(f"{url}/")
    text_of = """import("/page/prose.js").then((prose) => {
      const element = document.createElement("div");
      const said = %s;
      for (let end = 0; end <= said.length; end += 1) prose.show(element, said.slice(0, end));
      return [...element.children].map((child) => child.tagName);
    })"""
    assert page.value(text_of % json.dumps(said)) == kinds


@in_browser
def test_numbers_have_three_digits_and_units(page: Browser, url: str) -> None:
    page.open(f"{url}/")
    calls = {
        "bytes(0)": "0 B",
        "bytes(999)": "999 B",
        "bytes(15360)": "15.4 KB",
        "bytes(999600)": "1.00 MB",
        "bytes(12e9)": "12.0 GB",
        "number(7.126)": "7.13",
        "number(123.4)": "123",
        "number(1234.4)": "1,234",
        "seconds(0.0123)": "12 ms",
        "seconds(1.5)": "1.50 s",
        "seconds(150)": "2 min",
        "seconds(10800)": "3 h",
        "percent(0.1234)": "12.3 %",
        "plural(1, 'token')": "1 token",
        "plural(1234, 'token')": "1,234 tokens",
    }
    made = "import('/page/format.js').then((it) => [{}])".format(", ".join(f"it.{call}" for call in calls))
    assert dict(zip(calls, page.value(made), strict=True)) == calls


@in_browser
def test_shares_are_about_the_latest_work(page: Browser, url: str) -> None:
    page.open(f"{url}/")
    made = """import("/page/recent.js").then(({ Recent }) => {
      const recent = new Recent();
      const seen = [];
      const add = (at, tokens, requests = []) => {
        recent.add({ at, requests, totals: { completion_tokens: tokens } });
        seen.push([recent.worked, recent.sum((state) => state.totals.completion_tokens), recent.speed]);
      };
      add(0, 100); // before the page was opened
      add(10, 100); // idle
      add(12, 120, ["one"]);
      add(14, 180);
      add(1000, 180); // idle
      for (let i = 1; i <= 20; i += 1) add(1000 + 2 * i, 180 + 20 * i, ["one"]);
      add(1, 5); // the server was started again
      return seen;
    })"""
    seen = page.value(made)
    assert seen[0] == [False, 100, 0]
    assert seen[1] == [False, 100, 0]
    assert seen[2] == [True, 20, 10]
    assert seen[3] == [True, 80, 30]
    assert seen[4] == [True, 80, 0]
    assert seen[5] == [True, 100, 10]
    assert seen[24] == [True, 300, 10]  # of the latest 30 seconds
    assert seen[25] == [False, 5, 0]


@in_browser
def test_markup_in_an_answer_is_text(page: Browser, begin: Serve) -> None:
    said = "<img src=x onerror='window.hurt = 1'> <b>bold</b>\n```\n<script>window.hurt = 1</script>"
    begun(page, begin(ShownEngine(lambda job: text(said, job))))
    ask(page, "<i>Well?</i>")
    page.wait("document.querySelector('.answer[aria-busy=false]')")
    assert "<b>bold</b>" in shown(page, ".answer .prose")
    assert shown(page, ".answer pre") == "<script>window.hurt = 1</script>"
    assert page.value(
        "[document.querySelectorAll('#log img, #log b, #log i, #log script').length, window.hurt ?? 0]"
    ) == [0, 0]


@in_browser
def test_thoughts_are_told_apart_from_the_answer(page: Browser, begin: Serve, tokenizer: TokenizerWrapper) -> None:
    engine = ShownEngine(lambda job: text("Let me see.</think>It is blue.", job))
    begun(page, begin(engine, tokenizer=tokenizer))
    ask(page, "Well?")
    page.wait("document.querySelector('.answer[aria-busy=false]')")
    assert shown(page, ".answer .thought") == "Let me see."
    assert shown(page, ".answer .text") == "It is blue."


@in_browser
def test_stop_ends_the_answer_and_its_work(page: Browser, begin: Serve) -> None:
    engine = ShownEngine()
    begun(page, begin(engine))
    ask(page, "Go on.")
    stream = engine.stream()
    stream.put(Piece("One, two"))
    page.wait(f"{ANSWER}?.innerText.includes('two')")
    page.value("document.querySelector('#stop').focus()")
    page.press(" ")
    assert stream.left.wait(WAIT)
    page.wait("document.querySelector('.answer[aria-busy=false]')")
    assert shown(page, ".answer").endswith("Stopped.")


@in_browser
@pytest.mark.parametrize(
    ("refusal", "said"),
    [(Busy(7), "try again in 7 s"), (Fault("the disk is gone"), "the disk is gone")],
    ids=["busy", "fault"],
)
def test_what_went_wrong_is_said_and_can_be_sent_again(
    page: Browser, begin: Serve, refusal: Exception, said: str
) -> None:
    engine = ShownEngine(lambda job: text("Now.", job))
    begun(page, begin(engine))
    engine.refusal = refusal
    ask(page, "Well?")
    assert said in page.wait("document.querySelector('.answer [role=alert]')?.innerText")
    page.errors.clear()  # that the server refused
    engine.refusal = None
    page.wait("document.querySelector('#message').value === 'Well?' && !document.querySelector('#send').hidden")
    page.press("Enter")
    page.wait("document.querySelectorAll('.answer').length === 2 && document.querySelector('.facts > *')")
    assert engine.job.prompt == engine.streams[0].job.prompt


@in_browser
def test_a_fault_after_some_text_is_said(page: Browser, begin: Serve) -> None:
    begun(page, begin(ShownEngine(lambda _: [Piece("So far"), Fault("the logits are not finite")])))
    ask(page, "Well?")
    assert "not finite" in page.wait("document.querySelector('.answer [role=alert]')?.innerText")
    assert "So far" in shown(page, ".answer")


@in_browser
def test_the_map_follows_what_is_in_memory(page: Browser, begin: Serve) -> None:
    engine = ShownEngine(experts=streaming((0, 1, 2), (5,)))
    begun(page, begin(engine))
    assert shown(page, "#map-note") == f"40 % of {EXPERTS} × 3 experts in memory"  # noqa: RUF001

    def state(layer: int, expert: int) -> str:
        where = page.value("(({left, top, width, height}) => [left, top, width, height])(map.getBoundingClientRect())")
        left, top, width, height = where
        x, y = left + 26 + (expert + 0.5) * (width - 26) / EXPERTS, top + (layer + 0.5) * height / 3
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return str(
            page.wait("!document.querySelector('#map-tip').hidden && document.querySelector('#map-tip').innerText")
        )

    assert state(0, 2) == "layer 0, expert 2: in memory"
    assert state(0, 3) == "layer 0, expert 3: on disk"
    assert state(2, 19) == "layer 2, expert 19: in memory"
    before = page.value("map.toDataURL()")
    engine.show(experts=streaming((0, 1, 3), (5, 6), traffic=Traffic(hits=30, misses=10, bytes=4_200_000)))
    page.wait("document.querySelector('#map-note').innerText.startsWith('42 %')")
    flash = page.wait(f"(shot => shot !== {before!r} && shot)(map.toDataURL())")
    assert state(0, 2) == "layer 0, expert 2: on disk"
    assert state(0, 3) == "layer 0, expert 3: in memory"
    page.wait(f"map.toDataURL() !== {flash!r}")  # what was read fades
    assert shown(page, "#hit-rate") == "75.0"
    assert "4.20 MB" in shown(page, "#hits")


@in_browser
def test_it_says_where_nothing_streams(page: Browser, begin: Serve) -> None:
    begun(page, begin(ShownEngine()))
    assert shown(page, "#map-note") == f"all {EXPERTS} × 3 experts in memory, nothing is read from disk"  # noqa: RUF001
    assert shown(page, "#hit-rate") == "100"
    assert not page.value("document.querySelector('.legend .absent').checkVisibility()")


@in_browser
def test_the_live_view_shows_the_state(page: Browser, begin: Serve) -> None:
    engine = ShownEngine(drafting="off")
    begun(page, begin(engine))
    assert shown(page, "#drafts") == "Drafting is off."
    assert shown(page, "#time-note") == "no work yet"
    queued = a_request(id=9, phase="queued", completion_tokens=0, alone=False)
    reading = a_request(id=8, phase="prompt", read=512, completion_tokens=0, alone=False)
    engine.show(totals=some_totals(), requests=(a_request(), reading, queued), queue=1, drafting="on", mode="biased")
    page.wait("document.querySelectorAll('#requests tr').length === 3")
    rows = page.value("[...document.querySelectorAll('#requests tr')].map(row => row.innerText.split('\\t').join(' '))")
    assert rows == [
        "7 decoding alone 1,234 1,000 12 of 512 1.50 s",
        "8 reading the prompt 512 of 1,234 1,000 0 of 512 1.50 s",
        "9 waiting 1,234 1,000 0 of 512 1.50 s",
    ]
    assert shown(page, "#requests-note") == "2 of 16 running, 1 of 64 waiting"
    assert shown(page, "#drafts").split("\n") == ["draft 1", "75 % of 20", "draft 2", "40 % of 10"]
    assert shown(page, "#drafts-note") == "63 % of 30 drafted"
    assert shown(page, "#speed-facts").endswith("tokens per window\n1.60")
    assert shown(page, "#time").split("\n") == ["decoding alone", "750 ms", "75 %", "reading prompts", "250 ms", "25 %"]
    assert "96.5 MB of 128 MB" in shown(page, "#memory").replace("\n", " ") + " " + shown(page, "#memory-unit")
    assert shown(page, "#policy").split("\n")[:2] == ["mode", "biased"]
    assert page.value("document.querySelector('#status').dataset.state") == "busy"
    page.wait("parseFloat(document.querySelector('#speed').innerText) > 0")


@in_browser
def test_it_says_that_the_engine_has_stopped(page: Browser, begin: Serve) -> None:
    engine = ShownEngine()
    begun(page, begin(engine))
    engine.show(alive=False, trouble="the device is gone")
    page.wait("document.querySelector('#status').dataset.state === 'failed'")
    assert shown(page, "#status") == "Stopped: the device is gone"


@in_browser
def test_it_asks_for_the_key_once_and_again_where_it_is_wrong(page: Browser, begin: Serve) -> None:
    url = begin(ShownEngine(lambda job: text("Yes.", job)), limits=Limits(key="open sesame"))
    page.open(f"{url}/")
    page.wait("document.querySelector('#key-dialog').open")
    page.type("wrong")
    page.press("Enter")
    page.wait("document.querySelector('#key-error').innerText")
    page.press("Escape")
    page.wait("document.querySelector('#key-dialog').open && document.activeElement.id === 'key'")
    page.type("open sesame")
    page.press("Enter")
    page.wait("document.querySelector('#status').dataset.state === 'idle'")
    assert not page.value("document.querySelector('#key-dialog').open")
    page.errors.clear()  # that the server refused
    page.value("document.querySelector('#message').focus()")
    ask(page, "Well?")
    page.wait("document.querySelector('.answer[aria-busy=false]')")
    begun(page, url)
    assert not page.value("document.querySelector('#key-dialog').open")
    assert page.value("localStorage.length + document.cookie.length") == 0
    page.value("sessionStorage.clear()")


@in_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", SIZES)
def test_it_fits_and_can_be_read(page: Browser, begin: Serve, width: int, dark: bool) -> None:
    said = f"Well.\n\n```\n{'long ' * 40}\n```\n{'word' * 60}\n\n{'And so on. ' * 60}"
    engine = ShownEngine(
        lambda job: text(said, job), experts=streaming(tuple(range(8)), traffic=Traffic(hits=3, misses=1))
    )
    engine.show(totals=some_totals(), requests=(a_request(), a_request(id=8, phase="prompt")))
    page.look(width, dark=dark)
    page.open(f"{begin(engine)}/")
    page.wait("document.querySelector('#status').dataset.state === 'busy'")
    ask(page, "class Stack:")
    page.wait("document.querySelector('.answer[aria-busy=false]')")
    page.value("document.querySelector('#options').open = true")
    for part in ("chat", "engine"):
        page.value(f"location.hash = {part!r}")
        page.wait(f"document.querySelector('#{part}').checkVisibility()")
        assert page.value("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]") == [
            width,
            800,
        ]
        assert page.value(WIDE) == []
        assert page.value(FAINT) == []
    page.wait(f"map.clientWidth > {0.75 * width if width < 600 else 600} && map.clientHeight > 30")


@in_browser
@pytest.mark.parametrize("width", SIZES)
def test_the_keyboard_reaches_everything_and_one_sees_where(page: Browser, begin: Serve, width: int) -> None:
    page.look(width)
    begun(page, begin(ShownEngine(lambda job: text("Yes.\n```\ncode\n```", job))))
    ask(page, "Well?")
    page.wait("document.querySelector('.answer[aria-busy=false]') && document.activeElement.id === 'message'")
    page.value("document.querySelector('#options').open = true")
    wanted = set(
        page.value(
            """[...document.querySelectorAll("a, button, input, textarea, summary, [tabindex]")]
              .filter((element) => element.checkVisibility()).map((element) => (element.id || element.outerHTML))"""
        )
    )
    reached = set()
    for _ in range(len(wanted) + 5):
        page.press("Tab")
        name, seen = page.value(
            """((element) => {
              const { outlineStyle, outlineWidth } = getComputedStyle(element);
              if (element === document.body) return ["", true]; // past the last, and before the first
              return [element.id || element.outerHTML, outlineStyle !== "none" && parseFloat(outlineWidth) >= 2];
            })(document.activeElement)"""
        )
        assert seen, name
        reached.add(name)
    assert wanted <= reached
    unnamed = """[...document.querySelectorAll("button, input, textarea, a")].filter((element) =>
        !(element.innerText.trim() || element.labels?.length)).map((element) => element.outerHTML)"""
    assert page.value(unnamed) == []


@in_browser
def test_a_real_model_answers_and_its_experts_come_and_go(page: Browser, serve: Serve) -> None:
    model, tokenizer = load(slots=32, mtp=True)
    engine = Engine(model, tokenizer, mtp="on", prefix_bytes=8_000_000)
    url = serve(engine, tokenizer=tokenizer)
    begun(page, url)
    assert shown(page, "#map-note").startswith("0 %")
    page.value("document.querySelector('#max-tokens').value = 60")
    page.value(f"""(() => {{
      window.maps = new Set();
      const look = () => {{
        if ({ANSWER}?.ariaBusy === "true" && {ANSWER}.querySelector(".text").textContent) maps.add(map.toDataURL());
        requestAnimationFrame(look);
      }};
      look();
    }})()""")
    ask(page, "class Stack:")
    page.wait("document.querySelector('.answer[aria-busy=false]')")
    page.wait("document.querySelector('#status').innerText === 'Idle'")
    assert page.value("window.maps.size") > 3
    asked = {"messages": [{"role": "user", "content": "class Stack:"}], "max_tokens": 60}
    whole = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=WAIT).json()
    said = whole["choices"][0]["message"]["content"]
    assert page.value(f"{ANSWER}.querySelector('.text').textContent").strip() == said.strip()
    assert "60 tokens" in shown(page, ".facts")
    assert 20 <= int(shown(page, "#map-note").split()[0]) <= 25  # 32 of 128, but for a layer that is not full yet
    hits = shown(page, "#hits").split("\n")
    assert int(hits[1].replace(",", "")) > 0
    assert int(hits[3].replace(",", "")) > 0
    assert shown(page, "#drafts").startswith("draft 1")
