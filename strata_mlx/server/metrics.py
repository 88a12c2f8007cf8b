"""What the engine counts, for Prometheus: every scrape asks for its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .._version import __version__
from .state import Histogram, State


def registry(state: Callable[[], State]) -> CollectorRegistry:
    """Of one engine, and nothing else: no other library's metrics, none of another server in the process."""
    result = CollectorRegistry(auto_describe=False)
    result.register(_EngineCollector(state))
    return result


class _EngineCollector(Collector):
    """state: gives the latest one, from any thread."""

    def __init__(self, state: Callable[[], State]):
        self._state = state

    def describe(self) -> list[Metric]:
        """Nothing: names need not be known before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        yield _labelled(GaugeMetricFamily, "build_info", "Version of strata-mlx.", "version", {__version__: 1})
        yield _gauge("up", "1 while the generation thread lives.", state.alive)
        yield from _requests(state)
        yield from _work(state)
        yield from _experts(state)
        yield from _memory(state)


def _requests(state: State) -> Iterator[Metric]:
    totals = state.totals
    yield _labelled(CounterMetricFamily, "requests", "Requests that have ended.", "outcome", totals.requests)
    yield _gauge("requests_running", "Requests that are being served.", len(state.requests) - state.queue)
    yield _gauge("requests_waiting", "Requests in the queue.", state.queue)
    yield _gauge("requests_waiting_limit", "Requests that the queue takes.", state.max_queue)
    yield HistogramMetricFamily(
        _name("time_to_first_token_seconds"),
        "From a request's arrival to its first token.",
        buckets=_buckets(totals.first_token),
        sum_value=totals.first_token.sum,
    )


def _work(state: State) -> Iterator[Metric]:
    totals = state.totals
    yield _counter("prompt_tokens", "Tokens of prompts, cached ones included.", totals.prompt_tokens)
    yield _counter("cached_prompt_tokens", "Tokens of prompts that were not read again.", totals.cached_tokens)
    yield _counter("completion_tokens", "Tokens decoded.", totals.completion_tokens)
    yield _counter("windows", "Forwards of the model that gave tokens.", totals.windows)
    yield _counter("drafted_tokens", "Tokens that a draft head proposed.", totals.drafted)
    for name, help_text, counts in (
        ("verified_drafts", "Drafts that the model verified, by place in the chain.", totals.verified),
        ("accepted_drafts", "Drafts that the model confirmed, by place in the chain.", totals.accepted),
    ):
        by_place = {str(place): count for place, count in enumerate(counts, 1)}
        yield _labelled(CounterMetricFamily, name, help_text, "place", by_place)
    help_text = "Time of the generation thread, by part."
    yield _labelled(CounterMetricFamily, "generation_seconds", help_text, "part", totals.seconds)


def _experts(state: State) -> Iterator[Metric]:
    experts = state.experts
    resident = experts.layers * experts.count - sum(experts.count - len(layer.resident) for layer in experts.streamed)
    yield _gauge("experts", "Experts of all layers.", experts.layers * experts.count)
    yield _gauge("experts_resident", "Experts in memory.", resident)
    traffic = experts.traffic
    if traffic is None:
        return
    yield _counter("expert_hits", "Experts that a window needed and that were in memory.", traffic.hits)
    yield _counter("expert_misses", "Experts that a window needed and that were read from disk.", traffic.misses)
    yield _counter("expert_read_bytes", "Bytes of experts read from disk.", traffic.bytes)
    yield _counter("expert_read_seconds", "Time that threads spent reading experts.", traffic.read_seconds)
    yield _counter("expert_stall_seconds", "Time that the device waited for experts.", traffic.stall_seconds)


def _memory(state: State) -> Iterator[Metric]:
    memory = state.memory
    yield _labelled(GaugeMetricFamily, "memory_bytes", "Memory in use.", "scope", {memory.scope: memory.used})
    if memory.budget is not None:
        help_text = "What memory_bytes is to stay within."
        yield _labelled(GaugeMetricFamily, "memory_budget_bytes", help_text, "scope", {memory.scope: memory.budget})
    yield _gauge("prefix_bytes", "Held for prompts to come.", memory.prefixes)
    yield _gauge("prefix_limit_bytes", "What prefix_bytes is to stay within.", memory.prefix_budget)


def _name(name: str) -> str:
    return f"strata_mlx_{name}"


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(_name(name), help_text, value=value)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(_name(name), help_text, value=value)


def _labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help_text: str,
    label: str,
    values: dict[str, int] | dict[str, float],
) -> Metric:
    """values: by the label's value."""
    family = kind(_name(name), help_text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """As Prometheus wants them: by upper bound, how many were at most that."""
    result: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        result.append(("+Inf" if bound == float("inf") else str(bound), total))
    return result
