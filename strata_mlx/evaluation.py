"""What a biased routing policy costs and saves, against exact routing, on text that is read and not generated.

Each document goes through the model token by token, as in decoding, once exactly and once by each policy. What is
resident follows the run itself: of a model that streams its experts, the slots that it has; of one that is in memory,
slot tables that are driven as streaming drives them, and begin empty with each document.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from .device import evaluate as compute
from .errors import Fault, InputError
from .experts.streaming import streaming_of
from .intervals import interval, resampled
from .models.family import text_args
from .models.moe import blocks
from .prefill import make_cache
from .replay.slots import LayerSlots
from .routing import LiveResidency, Routing, RoutingPolicy
from .texts import Tokens

USUAL = (
    *(RoutingPolicy(moce_bonus=bonus) for bonus in (0.4, 0.85, 1.5)),
    *(RoutingPolicy(kind="margin", margin=margin) for margin in (0.01, 0.02, 0.03)),
)

_DEFAULTS = {name: getattr(RoutingPolicy(), name) for name in RoutingPolicy.__dataclass_fields__}

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """A policy with so many slots in each MoE layer; None are those that the model has."""

    policy: RoutingPolicy
    slots: int | None
    eviction: str


@dataclass(frozen=True, eq=False)
class Run:
    """Sums by document, ``[D]``. nats: of the tokens, the first of each document apart. agree: tokens whose likeliest
    successor is the exact one. kl: nats of KL(exact || biased). picks, misses: selections, and those whose expert was
    not in memory.
    """

    tokens: Floats
    nats: Floats
    agree: Floats
    kl: Floats
    picks: Floats
    misses: Floats


def evaluate(
    model: nn.Module,
    documents: Sequence[Tokens],
    policies: Sequence[RoutingPolicy],
    *,
    slots: Sequence[int | None] = (None,),
    eviction: str = "lrfu",
    report: Callable[[int], object] = lambda _: None,
) -> list[dict[str, Any]]:
    """A row for each number of slots and policy, exact routing first, ready for JSON.

    Args:
        model: from load(). An MTP head takes no part.
        documents: of at least two tokens each.
        policies: to be compared with exact routing.
        slots: in each MoE layer, for a model that does not stream; one that does has its own, and takes None alone.
        eviction: of these slots.
        report: called with the number of tokens that have been read since the last call; ``steps()`` tells them all.

    Raises:
        InputError: documents that are too short, slots that do not fit the model, or a policy that does not.
        Fault: where logits find no room on the disk.
    """
    _check(model, documents, slots)
    layers = blocks(model)
    for policy in policies:
        policy.check_top_k(layers[0].router.top_k)
        if policy.sure_margin is not None:
            raise InputError("routing policy: sure_margin is for drafting, and no MTP head takes part in an evaluation")
    before = [block.routing for block in layers]
    rows: list[dict[str, Any]] = []
    try:
        with _Logits(sum(len(each.ids) for each in documents), text_args(model).vocab_size) as logits:
            for count in slots:
                exact: Run | None = None
                for policy in (RoutingPolicy(), *policies):
                    setting = Setting(policy, count, eviction)
                    run = _run(model, documents, setting, logits, writes=not rows, report=report)
                    exact = exact or run
                    rows.append(_row(setting, run, exact))
    finally:
        for block, routing in zip(layers, before, strict=True):
            block.routing = routing
    return rows


def steps(documents: Sequence[Tokens], policies: Sequence[RoutingPolicy], slots: Sequence[int | None]) -> int:
    """How many tokens evaluate() reads."""
    return sum(len(each.ids) for each in documents) * (1 + len(policies)) * len(slots)


def _check(model: nn.Module, documents: Sequence[Tokens], slots: Sequence[int | None]) -> None:
    if not documents or min(len(each.ids) for each in documents) < 2:
        raise InputError("there must be documents, of at least two tokens each")
    args = text_args(model)
    streams = streaming_of(model) is not None
    for count in slots:
        if streams and count is not None:
            raise InputError("the model streams its experts and has slots of its own: give no other number of slots")
        if not streams and (count is None or not args.num_experts_per_tok <= count < args.num_experts):
            raise InputError(
                f"slots is {count}: a model whose experts are all in memory is evaluated as if it had "
                f"{args.num_experts_per_tok} to {args.num_experts - 1} slots"
            )


class _Logits:
    """Log-probabilities of exact routing, ``[rows, vocabulary]`` float32, in a nameless file: they may be many."""

    def __init__(self, rows: int, vocabulary: int):
        self._rows, self._vocabulary = rows, vocabulary

    def __enter__(self) -> NDArray[np.float32]:
        try:
            self._file = tempfile.TemporaryFile()
            self._file.truncate(4 * self._rows * self._vocabulary)
            return np.memmap(self._file, np.float32, "r+", shape=(self._rows, self._vocabulary))
        except OSError as error:
            size = 4e-9 * self._rows * self._vocabulary
            raise Fault(
                f"{tempfile.gettempdir()}: {size:.1f} GB of log-probabilities find no room ({error.strerror}): give "
                "fewer documents or tokens"
            ) from error

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _Tables:
    """Slot tables of a model that does not stream, driven by what its layers select."""

    def __init__(self, model: nn.Module, setting: Setting):
        experts = text_args(model).num_experts
        assert setting.slots is not None
        self._layers = {block.layer: LayerSlots(experts, setting.slots, setting.eviction) for block in blocks(model)}
        self.residency = LiveResidency({layer: each.table for layer, each in self._layers.items()})
        self._selected: list[tuple[int, mx.array]] = []
        self.picks = self.misses = 0

    def observe(self, layer: int, ids: mx.array) -> None:
        self._selected.append((layer, ids))

    def settle(self) -> None:
        """The token has gone through all layers."""
        for layer, ids in self._selected:
            self.misses += self._layers[layer].window(np.array(ids).reshape(1, -1))[1]
            self.picks += ids.size
        self._selected.clear()


def _run(
    model: nn.Module,
    documents: Sequence[Tokens],
    setting: Setting,
    exact: NDArray[np.float32],
    writes: bool,
    report: Callable[[int], object],
) -> Run:
    """writes: this is the exact run that the others are compared with."""
    streaming, layers = streaming_of(model), blocks(model)
    routing = Routing(setting.policy, LiveResidency(streaming.tables)) if streaming else None
    sums, start = [], 0
    for document in documents:
        ids, tables = document.ids, None if streaming else _Tables(model, setting)
        if tables:
            routing = Routing(setting.policy, tables.residency, observer=tables.observe)
        assert routing is not None
        for block in layers:
            block.routing = routing
        routing.begin()
        before = streaming.traffic() if streaming else None
        nats, agree, kl = _read(model, ids, tables, exact[start : start + len(ids)], writes, report)
        if streaming and before:
            traffic = streaming.traffic() - before
            picks, misses = traffic.picks, traffic.misses
        else:
            assert tables is not None
            picks, misses = tables.picks, tables.misses
        sums.append((len(ids) - 1, nats, agree, kl, picks, misses))
        start += len(ids)
    return Run(*np.array(sums, np.float64).T)


def _read(
    model: nn.Module,
    ids: Sequence[int],
    tables: _Tables | None,
    exact: NDArray[np.float32],
    writes: bool,
    report: Callable[[int], object],
) -> tuple[float, float, float]:
    """Nats, tokens that agree, and nats of divergence of one document, over all tokens but the last."""
    cache = make_cache(model)
    nats, agree, kl = 0.0, 0.0, 0.0
    for place, token in enumerate(ids):
        logits = model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits)
        compute(logprobs, "evaluating")
        if tables:
            tables.settle()
        row = np.array(logprobs)
        if not np.isfinite(row).any() or np.isnan(row).any():
            raise Fault("the model's logits are not finite: its weights are broken or overflow their type")
        if writes:
            exact[place] = row
        if place + 1 < len(ids):
            reference = exact[place].astype(np.float64)
            nats -= float(row[ids[place + 1]])
            agree += float(reference.argmax() == row.argmax())
            p = np.exp(reference)
            kl += float(np.sum(p * (reference - row), where=p > 0))
        report(1)
    return nats, agree, kl


def name_of(policy: RoutingPolicy) -> str:
    """Short, for tables and pictures."""
    if not policy.active:
        return "exact"
    values = json.loads(policy.to_json())
    kind = values.pop("kind")
    own = values.pop(kind, None)
    parts = [kind] if own is None else [kind, str(own)]
    parts += [f"{name.removeprefix(f'{kind}_')} {value}" for name, value in values.items() if value != _DEFAULTS[name]]
    return " ".join(parts)


def _row(setting: Setting, run: Run, exact: Run) -> dict[str, Any]:
    """Means over all tokens, with intervals over documents."""
    columns = (run.tokens, run.nats, exact.nats, run.agree, run.kl, run.picks, run.misses, exact.misses)
    sums = np.stack(columns, axis=1)  # [D, n]
    values = {}
    for name, of in (("value", sums.sum(axis=0, keepdims=True)), ("interval", resampled(sums))):
        tokens, nats, exact_nats, agree, kl, picks, misses, exact_misses = of.T
        quantities = {
            "perplexity": np.exp(nats / tokens),
            "price": np.expm1((nats - exact_nats) / tokens),
            "agreement": agree / tokens,
            "kl": kl / tokens,
            "misses": misses / picks,
            "misses_saved": 1 - misses / np.maximum(exact_misses, 1e-9),
        }
        for quantity, each in quantities.items():
            values[quantity if name == "value" else f"{quantity}_interval"] = (
                float(each[0]) if name == "value" else list(interval(each))
            )
    return {
        "policy": json.loads(setting.policy.to_json()) if setting.policy.active else None,
        "name": name_of(setting.policy),
        "slots": setting.slots,
        "eviction": setting.eviction,
        "documents": len(run.tokens),
        "tokens": int(run.tokens.sum()),
        **values,
    }
