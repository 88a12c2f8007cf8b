"""Misses per pick and perplexity on held-out text, over routing policy, bonus, eviction and cache size.

    python benchmarks/residency_tradeoff.py --json --plot
    python benchmarks/residency_tradeoff.py --set card         # 6 documents, as in the demo model's card

Documents are decoded token by token with the embedded model in float32, each with caches and slot tables of its own
that begin empty. Tables and eviction are those of streaming, and so is the routing. All weights stay in memory and
nothing is read: what is counted is the picks whose expert a table does not hold; of these, ``evicting`` leaves out
those that fill an empty slot, as the card does. Documents go through the model together, one token of each at a time,
and NumPy multiplies (benchmarks/lockstep.py); that changes no semantics, only rounding. Where a policy asks how sure
the MTP head is, the head reads along, from slots like those of any other layer: its misses count, its picks do not. The
settings were chosen on the documents of ``--set tune``; ``--set report`` shares none with them.

A price is the rise of the perplexity over exact routing. Its interval is a bootstrap over documents, of 95 %.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import heldout, report
from benchmarks.lockstep import log_likelihood, multiply_with_numpy
from benchmarks.models import embedded_as_float32
from strata_mlx import RoutingPolicy, load
from strata_mlx.experts.eviction import make_eviction
from strata_mlx.experts.table import SlotTable
from strata_mlx.models.moe import blocks
from strata_mlx.models.trunk import Hidden, Trunk
from strata_mlx.prefill import make_cache
from strata_mlx.routing.additive import LogitRange, margins, select_additive, select_margin
from strata_mlx.routing.ops import Selection, plain_router, select_ops
from strata_mlx.routing.price import distance
from strata_mlx.routing.residency import LiveResidency
from strata_mlx.routing.router import Router

EXACT = RoutingPolicy()
SETS = ("card", "tune", "report")
RESAMPLES = 2000


@dataclass(frozen=True)
class Setting:
    """What is compared: a routing policy over slot tables of one size and eviction policy."""

    policy: RoutingPolicy
    eviction: str
    slots: int

    @property
    def line(self) -> str:
        """Settings of one line of the plot differ in the strength of their policy only."""
        values = json.loads(self.policy.to_json())
        protect = f" protect {values['protect']}" if values["protect"] != 1 else ""
        sure = " and how sure a head is" if "sure_margin" in values else ""
        return f"{values['kind']}{sure}{protect}, {self.eviction}"

    @property
    def strength(self) -> float:
        policy = self.policy
        values = (policy.moce_bonus, policy.prior_lambda, policy.margin, policy.sure_margin or 0, policy.max_rank or 0)
        return float(max(values))


def settings(slots: Sequence[int]) -> list[Setting]:
    """The usual comparison: the card's plain bonus over LRU, and other policies over what evicts better."""

    def moce(*bonuses: float) -> list[RoutingPolicy]:
        return [RoutingPolicy(moce_bonus=bonus) for bonus in bonuses]

    def margin(*margins: float) -> list[RoutingPolicy]:
        return [RoutingPolicy(kind="margin", margin=each) for each in margins]

    by_eviction = {
        "lru": [EXACT, *moce(0.4, 0.7, 0.85, 1.5)],
        "frequency": [EXACT],
        "lrfu": [
            EXACT,
            *moce(0.4, 0.7, 0.85, 1.5),
            *margin(0.01, 0.02, 0.025, 0.03, 0.04, 0.06),
            *(RoutingPolicy(kind="margin", margin=sure / 4, sure_margin=sure) for sure in (0.035, 0.05, 0.065, 0.08)),
            *(RoutingPolicy(kind="cache_prior", prior_lambda=share, protect=2) for share in (0.05, 0.1, 0.15)),
            *(RoutingPolicy(kind="max_rank", max_rank=rank, protect=2) for rank in (14, 18)),
        ],
    }
    return [
        Setting(policy, eviction, size) for size in slots for eviction, each in by_eviction.items() for policy in each
    ]


class Caches:
    """The slot tables of every document and layer, and what the picks come to. trunk: how many of the layers it has."""

    def __init__(self, documents: int, layers: Sequence[int], experts: int, setting: Setting, trunk: int):
        self.trunk = trunk
        self.tables = [
            {layer: SlotTable(experts, setting.slots, make_eviction(setting.eviction, experts)) for layer in layers}
            for _ in range(documents)
        ]
        self.live = [LiveResidency(tables) for tables in self.tables]
        self.picks, self.misses = np.zeros(documents), np.zeros(documents)
        self.evicting = np.zeros(documents)  # the misses for which there was no free slot
        self._nothing = np.zeros(experts, np.bool_)

    def resident(self, layer: int) -> NDArray[np.bool_]:
        """``[B, E]``, without any expert where live residency would prefer nobody."""
        maps = [live.of(layer) for live in self.live]
        return np.stack([self._nothing if known is None else known for known in maps])

    def use(self, layer: int, ids: NDArray[np.intp], wanted: NDArray[np.intp] | None = None) -> None:
        """Each document needs the experts ``ids [B, K]``, as StreamedExperts does for one row, where the router itself
        ``wanted`` others.
        """
        for document, row in enumerate(ids):
            table = self.tables[document][layer]
            table.wanted = None if wanted is None else wanted[document]
            table.used(row[None])
            missing = row[table.slot_of[row] < 0]
            if len(missing):
                self.evicting[document] += max(0, len(missing) - table.free)
                table.commit(table.reserve(missing.tolist(), row))
            self.misses[document] += len(missing)
            self.picks[document] += len(row) if layer < self.trunk else 0


class Routing:
    """Routes a row of each document by its own residency; stands in for strata_mlx's, which knows one for all rows."""

    def __init__(self, setting: Setting, caches: Caches):
        self._policy, self._caches = setting.policy, caches
        self._ranges: dict[int, _Ranges] = {}
        self.ids: dict[int, list[NDArray[np.intp]]] = {}  # by layer, [B, K] of each row
        self.distance, self.rows = mx.zeros(2), 0
        self.confidence: mx.array | None = None  # [B], how sure a draft head is of the token after each row

    def route(self, layer: int, logits: mx.array, router: Router, bias: mx.array | None = None) -> Selection:  # noqa: ARG002
        rows = logits[:, 0]  # [B, E]
        if not self._policy.active:
            ids, weights = plain_router(rows, router)
        else:
            ids, weights = self._biased(layer, rows, router.top_k, router.norm_topk)
            if layer < self._caches.trunk:
                self.distance = self.distance + distance(rows, ids, router)
        self.rows += len(rows) if layer < self._caches.trunk else 0
        mx.eval(ids, self.distance)
        picked = np.array(ids).astype(np.intp)
        self.ids.setdefault(layer, []).append(picked)
        self._caches.use(layer, picked, np.array(plain_router(rows, router)[0]) if self._policy.active else None)
        return ids[:, None], weights[:, None]

    def _biased(self, layer: int, rows: mx.array, top_k: int, norm_topk: bool) -> Selection:
        resident = mx.array(self._caches.resident(layer))
        if self._policy.kind == "moce":
            heads = mx.zeros(len(rows), mx.bool_)
            tables = self._policy.tables(top_k)
            return select_ops(rows, resident, tables, heads, top_k=top_k, norm_topk=norm_topk)
        options: dict[str, Any] = {"router": "softmax", "selection_bias": None, "n_group": 1, "topk_group": 1}
        options |= {"top_k": top_k, "norm_topk": norm_topk, "scale": 1.0}
        if self._policy.kind == "margin":
            # The confidence of a head's own rows is as drafting() has it.
            sure = self.confidence if layer < self._caches.trunk else mx.ones(len(rows))
            ids, weights, _ = select_margin(
                rows, resident, margins(self._policy), sure, protect=self._policy.protect, **options
            )
            return ids, weights
        ranges = self._ranges.setdefault(layer, _Ranges())
        result = select_additive(rows, resident, self._policy, ranges, **options)
        acts = mx.any(resident, axis=1)  # a row that is routed exactly teaches nothing
        mean, number = ranges.means(rows)
        self._ranges[layer] = _Ranges(mx.where(acts, mean, ranges.mean), mx.where(acts, number, ranges.rows))
        return result


class Head:
    """The MTP head of a model, which reads along with all documents."""

    def __init__(self, model: nn.Module):
        self._trunk, self._head, self._cache = Trunk(model), model.mtp, model.mtp.make_cache()
        self._hidden: Hidden | None = None  # of the token before

    def confidence(self, tokens: mx.array) -> mx.array | None:
        """Of ``tokens [B, 1]``, ``[B]``: the probability of what is likeliest to follow, None for the first tokens."""
        if self._hidden is None:
            return None
        hidden = getattr(self._hidden, self._head.takes)
        logits = self._head.logits(self._trunk, self._head.read(self._trunk, tokens, hidden, self._cache))[:, 0]
        return mx.exp(logits.max(axis=-1) - mx.logsumexp(logits, axis=-1))

    def observe(self, hidden: Hidden) -> None:
        """The trunk's, of the tokens that confidence() was of."""
        self._hidden = hidden


class _Ranges(LogitRange):
    """A running mean for each document, ``[B]``, where LogitRange has one for rows that follow each other."""

    def through(self, logits: mx.array) -> mx.array:
        return self.means(logits)[0][:, None]

    def means(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        ranges = logits.max(axis=-1) - logits.min(axis=-1)
        rows = self.rows + 1
        return self.mean + (ranges - self.mean) / rows, rows


@dataclass(frozen=True)
class Measured:
    """Of a run: by document, the misses per pick, those of them that evict, and the nats ``[B, T - 1]`` of each token
    after the first; over all, the share of picks that the plain router would not have made, and the extra KL per row.
    """

    misses: NDArray[np.float64]
    evicting: NDArray[np.float64]
    nats: NDArray[np.float64]
    changed: float
    extra_kl: float


def measure(model: nn.Module, tokens: NDArray[np.int32], setting: Setting) -> tuple[Measured, Routing]:
    """Decode ``tokens [B, T]``, every document from an empty cache."""
    trunk = Trunk(model)
    layers = blocks(model)
    head = Head(model) if setting.policy.sure_margin is not None else None
    experts = layers[0].switch_mlp.experts
    caches = Caches(len(tokens), [block.layer for block in layers], experts, setting, len(trunk.layers))
    routing = Routing(setting, caches)
    for block in layers:
        block.routing = routing  # type: ignore[assignment]
    cache, columns, nats = make_cache(model), mx.array(tokens), []
    for t in range(tokens.shape[1]):
        if head:
            routing.confidence = head.confidence(columns[:, t : t + 1])
        hidden = trunk(columns[:, t : t + 1], cache)
        if head:
            head.observe(hidden)
        logits = trunk.logits(hidden.after)[:, 0]
        if t + 1 < tokens.shape[1]:
            nats.append(-log_likelihood(logits, tokens[:, t + 1]))
    changed, extra = (float(total) for total in np.array(routing.distance))
    changed, extra = changed / float(caches.picks.sum()), extra / routing.rows
    shares = caches.misses / caches.picks, caches.evicting / caches.picks
    return Measured(*shares, np.stack(nats, 1), changed, extra), routing


def replay(ids: dict[int, list[NDArray[np.intp]]], setting: Setting, experts: int, exact: Measured) -> Measured:
    """Exact routing does not depend on what is resident: one run serves all tables."""
    caches = Caches(len(exact.misses), list(ids), experts, setting, trunk=len(ids))
    for layer, rows in ids.items():
        for row in rows:
            caches.use(layer, row)
    return Measured(caches.misses / caches.picks, caches.evicting / caches.picks, exact.nats, 0.0, 0.0)


def price(measured: Measured, exact: Measured) -> tuple[float, list[float]]:
    """The rise of the perplexity, as a share, and its interval."""
    rise = (measured.nats - exact.nats).mean(axis=1)  # of each document; all are of the same length
    rng = np.random.default_rng(0)
    means = rise[rng.integers(0, len(rise), (RESAMPLES, len(rise)))].mean(axis=1)
    return float(np.expm1(rise.mean())), [float(np.expm1(q)) for q in np.quantile(means, [0.025, 0.975])]


def documents(tokenizer: Any, name: str, count: int, length: int) -> NDArray[np.int32]:
    """Tokens ``[count, length]``: the first documents for ``card``, else a spread over every second one."""
    if name == "card":
        return np.array(heldout.windows(tokenizer, count, length), np.int32)
    every = [tokenizer.encode(text[: 20 * length])[:length] for text in heldout.documents()]
    long = [tokens for tokens in every if len(tokens) == length]
    half = long[SETS.index(name) - 1 :: 2]
    return np.array([half[i] for i in np.linspace(0, len(half) - 1, count).astype(int)], np.int32)


def run(model: nn.Module, tokens: NDArray[np.int32], compared: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """A row of the table for each setting."""
    exact, routing = measure(model, tokens, Setting(EXACT, "lru", 32))
    experts = blocks(model)[0].switch_mlp.experts
    for setting in compared:
        if setting.policy.active:
            measured, _ = measure(model, tokens, setting)
        else:
            measured = replay(routing.ids, setting, experts, exact)
        rise, interval = price(measured, exact)
        yield {
            "line": setting.line if setting.policy.active else f"exact, {setting.eviction}",
            "strength": setting.strength,
            "slots": setting.slots,
            "misses": float(measured.misses.mean()),
            "evicting": float(measured.evicting.mean()),
            "perplexity": float(np.exp(measured.nats.mean())),
            "price": rise,
            "price_interval": interval,
            "changed": measured.changed,
            "extra_kl": measured.extra_kl,
            "policy": json.loads(setting.policy.to_json()),
            "eviction": setting.eviction,
        }


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Price over misses, a panel for each cache size and a line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sizes = sorted({row["slots"] for row in rows})
    figure, panels = plt.subplots(1, len(sizes), figsize=(6.5 * len(sizes), 5), squeeze=False, layout="constrained")
    lines = sorted({row["line"] for row in rows if not row["line"].startswith("exact")})
    for panel, size in zip(panels[0], sizes, strict=True):
        shown = [row for row in rows if row["slots"] == size]
        exact = [row for row in shown if row["line"].startswith("exact")]
        for marker, row in zip("v^o", exact, strict=False):
            panel.plot(100 * row["misses"], 0, marker, color="black", label=row["line"], zorder=4)
        for color, line in enumerate(lines):
            points = sorted((row for row in shown if row["line"] == line), key=lambda row: row["misses"])
            x, y = ([100 * row[name] for row in points] for name in ("misses", "price"))
            spread = [[100 * abs(row["price_interval"][end] - row["price"]) for row in points] for end in (0, 1)]
            panel.errorbar(x, y, spread, fmt="o-", color=f"C{color}", capsize=2, lw=1.2, ms=4, alpha=0.9, label=line)
        front = pareto(shown)
        panel.plot(*zip(*front, strict=True), color="0.6", lw=5, alpha=0.4, zorder=0, label="Pareto front")
        start = max(row["misses"] for row in exact if row["eviction"] == "lru")
        panel.fill_between(
            [0, 50 * start], -0.5, 1.0, color="C2", alpha=0.12, label="goal: half the misses of LRU, +1 %"
        )
        panel.set(xlim=(0, 105 * start), ylim=(-0.5, None), title=f"{size} of 128 experts in memory")
        panel.set(xlabel="misses per pick, %", ylabel="rise of the perplexity, %")
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def pareto(rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """The rows that no other beats in both, as (misses, price) in per cent."""
    points = sorted((100 * row["misses"], 100 * row["price"]) for row in rows)
    front: list[tuple[float, float]] = []
    for misses, rise in points:
        if not front or rise < front[-1][1]:
            front.append((misses, rise))
    return front


def in_words(row: dict[str, Any]) -> str:
    low, high = row["price_interval"]
    return f"{row['price']:+.2%} ({low:+.2%} to {high:+.2%})"


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--set", choices=SETS, default="report", help="which held-out documents")
    parser.add_argument("--documents", type=int, help="how many (default: 6 of card, else 48)")
    parser.add_argument("--tokens", type=int, default=250, help="of each document")
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[32, 64], help="slots of a layer, which has 128 experts"
    )
    parser.add_argument("--policy", action="append", help="a routing policy as JSON, in place of the usual ones")
    parser.add_argument("--eviction", default="lrfu", help="for those of --policy")
    parser.add_argument("--plot", nargs="?", const="residency_tradeoff.png", metavar="FILE", help="draw a picture")
    args = parser.parse_args()
    chosen = [RoutingPolicy.from_json(text) for text in args.policy or ()]
    compared = [Setting(policy, args.eviction, size) for size in args.slots for policy in chosen]
    compared = compared or settings(args.slots)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = load(embedded_as_float32(Path(folder) / "model"), mtp=True)
    tokens = documents(tokenizer, args.set, args.documents or (6 if args.set == "card" else 48), args.tokens)
    progress = tqdm(run(multiply_with_numpy(model), tokens, compared), total=len(compared), unit="setting")
    result = {
        "set": args.set,
        "documents": len(tokens),
        "tokens": args.tokens,
        "rows": list(islice(progress, len(compared))),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "numpy")},
    }
    if args.plot:
        plot(result["rows"], Path(args.plot))
    if not report.publish(result, args):
        columns = ("line", "strength", "slots", "misses", "evicting", "perplexity", "price", "changed", "extra_kl")
        print(report.table([{**row, "price": in_words(row)} for row in result["rows"]], columns))


if __name__ == "__main__":
    main()
