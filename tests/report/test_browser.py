"""The report in a browser, where there is one: no errors, and nothing wider than the screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from strata_mlx.report import page
from tests.report.results import results

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr",
    "--virtual-time-budget=10000", "--dump-dom",
)  # fmt: skip
WIDTHS = (1280, 390)
# A window may not become as narrow as a phone; a frame does.
FRAMES = """<!doctype html><title>report</title>{frames}<pre id="measured"></pre><script>
addEventListener("load", () => {{
  const measured = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument.documentElement, width = page.clientWidth;
    const wide = [...page.querySelectorAll("body *")].filter(element => !element.closest(".table *, .unseen"))
      .filter(element => element.getBoundingClientRect().right > width + 0.5)
      .map(element => element.outerHTML.slice(0, 80));
    const plots = [...page.querySelectorAll(".plot svg")].map(plot => plot.getBoundingClientRect());
    const shown = plots.filter(box => box.width > 200 && box.height > 80).length;
    return {{width, scroll: page.scrollWidth, wide, plots: shown}};
  }});
  document.querySelector("#measured").textContent = JSON.stringify(measured);
}});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_desktop_and_a_phone_without_errors(tmp_path: Path, dark: bool) -> None:
    assert BROWSER is not None
    text = page(results(streams=True, evaluation=True))
    frames = "".join(
        f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{escape(text)}"></iframe>'
        for width in WIDTHS
    )
    file = tmp_path / "frames.html"
    file.write_text(FRAMES.format(frames=frames))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    ended = subprocess.run(
        [BROWSER, *FLAGS, scheme, f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stderr.splitlines() if "CONSOLE" in line] == []
    found = re.search(r'<pre id="measured">(.*?)</pre>', ended.stdout, re.DOTALL)
    assert found, ended.stdout[-2000:]
    measured = json.loads(unescape(found[1]))
    assert [each["width"] for each in measured] == list(WIDTHS)
    for each in measured:
        assert each["scroll"] == each["width"]
        assert each["wide"] == []
        assert each["plots"] == 6
