"""The plots of a report, as SVG to be put into HTML. Their colours are those of the page, light or dark.

matplotlib draws in colours that stand for the page's (CSS variables) and are replaced in the text that it writes. Its
words stay text, in the page's own font.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, LINE, CARD = "#010101", "#020202", "#030303", "#040404"
FIRST, SECOND, THIRD, FAINT = "#110000", "#001100", "#000011", "#111111"
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    CARD: "--card",
    FIRST: "--first",
    SECOND: "--second",
    THIRD: "--third",
    FAINT: "--faint",
}
_WIDTH = 4.6  # inches; at 72 units each, a phone shows the plot at about its own size
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "text.color": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}


def speeds(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens per second of each kind, with intervals; a line where plain decoding is."""
    plain = next(row for row in rows if row["kind"] == "plain")["tokens_per_s"]
    with rc_context(_STYLE):
        figure, axes = _figure(0.6 + 0.34 * len(rows))
        for place, row in enumerate(rows):
            rate, (low, high) = row["tokens_per_s"], row["tokens_per_s_interval"]
            color = {"plain": FAINT, "default": FAINT, "oracle": LINE}.get(row["kind"], FIRST)
            axes.barh(place, rate, color=color, height=0.62)
            axes.plot([low, high], [place, place], color=INK, lw=1.2, solid_capstyle="butt")
            inside = CARD if color == FIRST else INK
            axes.annotate(f"{rate:.0f}", (0, place), (5, -0.5), textcoords="offset points", va="center", color=inside)
        axes.axvline(plain, color=MUTED, lw=1, ls=(0, (4, 3)))
        axes.set_yticks(range(len(rows)), [row["kind"] for row in rows], color=INK)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1.04 * max(row["tokens_per_s_interval"][1] for row in rows))
        axes.set_xlabel("tokens per second")
        _grid(axes, "x")
        return _svg(figure, "speeds")


def reliability(rows: Sequence[dict[str, Any]]) -> str:
    """Of all chain positions together: how many drafts were accepted, by what was predicted."""
    together = next(row for row in rows if row["position"] == "all")
    with rc_context(_STYLE):
        figure, axes = _figure(3.5)
        axes.plot([0, 1], [0, 1], color=MUTED, lw=1, ls=(0, (4, 3)))
        for name, bins, color, marker in (
            ("the head's own confidence", together["bins_raw"], SECOND, "s"),
            ("calibrated", together["bins_fitted"], FIRST, "o"),
        ):
            x, y = ([each[key] for each in bins] for key in ("predicted", "observed"))
            axes.plot(x, y, marker=marker, color=color, label=name)
        axes.set(xlim=(0, 1.01), ylim=(0, 1.01), xlabel="predicted", ylabel="accepted")
        _grid(axes, "both")
        axes.legend(loc="upper left")
        return _svg(figure, "reliability")


def acceptance(rows: Sequence[dict[str, Any]]) -> str:
    """By chain position: drafts accepted once those before were, and what was predicted of them."""
    single = [row for row in rows if row["position"] != "all"]
    x = [row["position"] + 1 for row in single]
    with rc_context(_STYLE):
        figure, axes = _figure(3.5)
        axes.bar(x, [row["reach"] for row in single], color=FAINT, width=0.7, label="accepted, with all before it")
        axes.plot(x, [row["accepted"] for row in single], "D-", color=INK, label="accepted, once those before were")
        axes.plot(x, [row["confidence"] for row in single], "s-", color=SECOND, label="the head's own confidence")
        axes.plot(x, [row["calibrated"] for row in single], "o--", color=FIRST, label="calibrated")
        axes.set(ylim=(0, 1.5), xlabel="draft", ylabel="share")
        axes.set_xticks(x)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        _grid(axes, "y")
        axes.legend(loc="upper right")
        return _svg(figure, "acceptance")


def costs(curves: dict[str, Any]) -> str:
    """Milliseconds of windows by their rows, and of making drafts by their number."""
    with rc_context(_STYLE):
        figure, axes = _figure(3.5)
        verify, draft = curves["verify"], curves["draft"]
        axes.axhline(curves["plain"], color=MUTED, lw=1, ls=(0, (4, 3)))
        axes.plot(range(1, len(verify) + 1), verify, "o-", color=FIRST, label="verify a window, by rows")
        axes.plot(range(1, len(draft) + 1), draft, "s-", color=SECOND, label="make drafts, by number")
        axes.plot([], [], color=MUTED, lw=1, ls=(0, (4, 3)), label="plain step")
        axes.set(ylim=(0, 1.35 * max(*verify, *draft)), xlabel="rows, or drafts", ylabel="ms")
        axes.set_xticks(range(1, len(verify) + 1))
        _grid(axes, "y")
        axes.legend(loc="upper left")
        return _svg(figure, "costs")


def parts(rows: Sequence[dict[str, Any]]) -> str:
    """Milliseconds per token of each kind, by what they go to."""
    with rc_context(_STYLE):
        figure, axes = _figure(0.95 + 0.34 * len(rows))
        reads = any(row["ms_per_token"]["reading"] for row in rows)
        for place, row in enumerate(rows):
            start = 0.0
            for name, color, milliseconds in split(row):
                label = name if not place and (reads or name != "read experts") else None
                axes.barh(place, milliseconds, left=start, color=color, height=0.62, label=label)
                start += milliseconds
        axes.set_yticks(range(len(rows)), [row["kind"] for row in rows], color=INK)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("ms per token")
        _grid(axes, "x")
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=3, columnspacing=1, handlelength=1)
        return _svg(figure, "parts")


def split(row: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Name, colour and milliseconds per token of each part of a row's time."""
    ms = row["ms_per_token"]
    computing = max(0.0, ms["draft"] + ms["verify"] - ms["reading"])
    draft = min(ms["draft"], computing)
    return [("verify", FIRST, computing - draft), ("draft", SECOND, draft), ("read experts", THIRD, ms["reading"])]


def price(rows: Sequence[dict[str, Any]]) -> str:
    """Rise of the perplexity by misses per pick, of routing policies; the first row is exact routing."""
    with rc_context(_STYLE):
        figure, axes = _figure(3.5)
        exact, *biased = rows
        axes.axhline(0, color=LINE, lw=1)
        axes.plot(100 * exact["misses"], 0, "D", color=INK, label="exact", ls="")
        colors = [FIRST, SECOND, THIRD, MUTED]
        kinds = list(dict.fromkeys(row["name"].split()[0] for row in biased))
        for kind, color in zip(kinds, colors * len(kinds), strict=False):
            points = sorted(
                (row for row in biased if row["name"].split()[0] == kind), key=lambda row: float(row["misses"])
            )
            x, y = ([100 * row[key] for row in points] for key in ("misses", "price"))
            for each, row in zip(x, points, strict=True):
                axes.plot([each, each], [100 * end for end in row["price_interval"]], color=color, lw=1)
            axes.plot(x, y, "o-", color=color, label=kind)
        axes.set(xlabel="experts not in memory, % of those selected", ylabel="rise of the perplexity, %")
        axes.set_xlim(0, 1.08 * max(100 * row["misses"] for row in rows))
        _grid(axes, "both")
        axes.legend(loc="upper right")
        return _svg(figure, "price")


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    return figure, axes


def _grid(axes: Axes, axis: Any) -> None:
    axes.grid(axis=axis)
    axes.set_axisbelow(True)


def _svg(figure: Figure, name: str) -> str:
    """For HTML: without declarations and foreign names, and with identifiers that no other plot has."""
    file = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(<svg[^>]*?) (?:height|width)="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) (?:height|width)="[^"]*"', r"\1", text)
    text = re.sub(r"(font: [\d.]+px) [^;\"]*", r"\1 system-ui, sans-serif", text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    return text.strip()
