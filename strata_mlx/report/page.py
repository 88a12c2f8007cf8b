"""Turns the results of ``strata_mlx tune`` into a page, which shows what is in them and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from . import plots

BUSY = 0.1  # error of the cost model above which its measurement was disturbed
_KINDS = {
    "plain": "no drafts",
    "flat": "each draft's confidence must reach one floor",
    "schedule": "a floor for each place in the chain",
    "cumulative": "the product of the confidences must reach a floor",
    "composed": "a schedule, and a floor for the product",
    "economic": "as many drafts as are worth their time, by calibrated chances and measured costs; follows each text",
    "default": "what generate does without a policy",
    "oracle": "knows which drafts will be accepted: a ceiling, not a choice",
}


def page(result: dict[str, Any]) -> str:
    """The report as HTML, complete in itself: it loads nothing, and needs no script.

    result: what ``strata_mlx tune --json`` prints.
    """
    rows = _with_reach(result["calibration"])
    evaluation = result["evaluation"]
    drawn = {
        "speeds": plots.speeds(result["rows"]),
        "reliability": plots.reliability(rows),
        "acceptance": plots.acceptance(rows),
        "costs": plots.costs(result["costs"]),
        "parts": plots.parts(result["rows"]),
    }
    prices = _first_slots(evaluation["rows"]) if evaluation else []
    if prices:
        drawn["price"] = plots.price(prices)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"signed": _signed, "percent": _percent}
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        result=result,
        plots={name: Markup(svg) for name, svg in drawn.items()},
        alt=_alt(result, rows, prices),
        kinds=_KINDS,
        calibration=rows,
        together=next(row for row in rows if row["position"] == "all"),
        prices=prices,
        split=plots.split,
        machine=result["measured_on"],
        busy=(result["costs"]["error"] or 0.0) > BUSY,
    )


def _with_reach(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the share of chains in which a draft and all before it are accepted."""
    result, reach = [], 1.0
    for row in rows:
        if row["position"] != "all":
            reach *= row["accepted"]
        result.append({**row, "reach": None if row["position"] == "all" else reach})
    return result


def _first_slots(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["slots"] == rows[0]["slots"]]


def _alt(result: dict[str, Any], rows: list[dict[str, Any]], prices: list[dict[str, Any]]) -> dict[str, str]:
    """What each plot shows, in words, for those who do not see it."""
    speeds = ", ".join(f"{row['kind']} {row['tokens_per_s']:.0f}" for row in result["rows"])
    together = next(row for row in rows if row["position"] == "all")
    accepted = ", ".join(f"{row['accepted']:.0%}" for row in rows if row["position"] != "all")
    costs = result["costs"]
    parts = "; ".join(
        f"{row['kind']} {', '.join(f'{name} {ms:.1f}' for name, _, ms in plots.split(row) if ms)}"
        for row in result["rows"]
    )
    return {
        "speeds": f"Bars: tokens per second by policy. {speeds}.",
        "reliability": "Lines: share of drafts accepted, by predicted probability. On average the head's own "
        f"confidence is off by {together['ece_raw']:.3f}, the calibrated one by {together['ece_fitted']:.3f}.",
        "acceptance": f"Share of drafts accepted by place in the chain, once those before were: {accepted}.",
        "costs": f"Lines: a window of one row takes {costs['verify'][0]:.1f} ms, of {len(costs['verify'])} rows "
        f"{costs['verify'][-1]:.1f} ms; one draft {costs['draft'][0]:.1f} ms, {len(costs['draft'])} drafts "
        f"{costs['draft'][-1]:.1f} ms.",
        "parts": f"Stacked bars: milliseconds per token. {parts}.",
        "price": "Points: rise of the perplexity by share of experts that were not in memory. "
        + "; ".join(f"{row['name']}: {row['misses']:.0%} not in memory, {row['price']:+.1%}" for row in prices),
    }


def _signed(value: float) -> str:
    return f"{100 * value:+.2f} %"


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} %"  # noqa: RUF001
