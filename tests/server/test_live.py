"""Health, metrics and the live state, as a client sees them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from strata_mlx import __version__
from strata_mlx.experts.traffic import Traffic
from strata_mlx.server import live
from strata_mlx.server.live import page_router, router
from strata_mlx.server.metrics import registry
from tests.server.conftest import Serve
from tests.server.states import EXPERTS, LAYERS, ShownEngine, a_request, a_state, some_totals, streaming


@pytest.fixture
def shown() -> ShownEngine:
    engine = ShownEngine()
    engine.start()
    return engine


@pytest.fixture
def client(shown: ShownEngine) -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(router(shown))
    app.include_router(page_router())
    with TestClient(app) as client:
        yield client


def metrics(client: TestClient) -> dict[tuple[str, str], float]:
    """By name and the values of its labels."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def resident(layer: dict[str, Any], count: int) -> list[int]:
    packed = base64.b64decode(layer["resident"])
    return [expert for expert in range(count) if packed[expert // 8] >> expert % 8 & 1]


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Raises AssertionError where nothing comes for so long that the connection is kept alive without."""
    for line in response.iter_lines():
        assert not line.startswith(":")
        if line.startswith("data:"):
            yield json.loads(line[5:])


def test_health_follows_the_generation_thread(client: TestClient, shown: ShownEngine) -> None:
    answer = client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    shown.alive = False
    shown.show(alive=False, trouble="the device is gone")
    answer = client.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "failed", "reason": "the device is gone"})


def test_health_has_a_reason_where_the_thread_has_none(client: TestClient, shown: ShownEngine) -> None:
    shown.alive = False
    answer = client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "the generation thread makes no progress"


def test_metrics_are_what_was_counted(client: TestClient, shown: ShownEngine) -> None:
    traffic = Traffic(hits=30, misses=10, bytes=4096, read_seconds=0.5, stall_seconds=0.25)
    requests = a_request(), a_request(id=8, phase="queued")
    shown.show(totals=some_totals(), experts=streaming((0, 1, 19), traffic=traffic), requests=requests, queue=1)
    found = metrics(client)
    wanted = {
        ("strata_mlx_build_info", __version__): 1,
        ("strata_mlx_up", ""): 1,
        ("strata_mlx_requests_total", "stop"): 5,
        ("strata_mlx_requests_total", "refused"): 2,
        ("strata_mlx_requests_total", "failed"): 0,
        ("strata_mlx_requests_running", ""): 1,
        ("strata_mlx_requests_waiting", ""): 1,
        ("strata_mlx_requests_waiting_limit", ""): 64,
        ("strata_mlx_time_to_first_token_seconds_bucket", "0.05"): 1,
        ("strata_mlx_time_to_first_token_seconds_bucket", "0.1"): 1,
        ("strata_mlx_time_to_first_token_seconds_bucket", "0.25"): 3,
        ("strata_mlx_time_to_first_token_seconds_bucket", "60.0"): 3,
        ("strata_mlx_time_to_first_token_seconds_bucket", "+Inf"): 4,
        ("strata_mlx_time_to_first_token_seconds_count", ""): 4,
        ("strata_mlx_prompt_tokens_total", ""): 1234,
        ("strata_mlx_cached_prompt_tokens_total", ""): 1000,
        ("strata_mlx_completion_tokens_total", ""): 40,
        ("strata_mlx_windows_total", ""): 25,
        ("strata_mlx_drafted_tokens_total", ""): 30,
        ("strata_mlx_verified_drafts_total", "2"): 10,
        ("strata_mlx_accepted_drafts_total", "1"): 15,
        ("strata_mlx_accepted_drafts_total", "3"): 0,
        ("strata_mlx_generation_seconds_total", "verify"): 0.75,
        ("strata_mlx_experts", ""): LAYERS * EXPERTS,
        ("strata_mlx_experts_resident", ""): 3 + 2 * EXPERTS,
        ("strata_mlx_expert_hits_total", ""): 30,
        ("strata_mlx_expert_misses_total", ""): 10,
        ("strata_mlx_expert_read_bytes_total", ""): 4096,
        ("strata_mlx_expert_read_seconds_total", ""): 0.5,
        ("strata_mlx_expert_stall_seconds_total", ""): 0.25,
        ("strata_mlx_memory_bytes", "process memory"): 96_500_000,
        ("strata_mlx_memory_budget_bytes", "process memory"): 128_000_000,
        ("strata_mlx_prefix_bytes", ""): 1_500_000,
        ("strata_mlx_prefix_limit_bytes", ""): 16_000_000,
    }
    assert {name: found.get(name) for name in wanted} == wanted
    assert found["strata_mlx_time_to_first_token_seconds_sum", ""] == pytest.approx(99.44)


def test_metrics_leave_out_what_there_is_not(client: TestClient, shown: ShownEngine) -> None:
    memory = a_state().memory
    shown.show(memory=type(memory)(memory.scope, memory.used, None, 0, 0, {}))
    found = metrics(client)
    assert found["strata_mlx_experts_resident", ""] == LAYERS * EXPERTS
    assert not [name for name, _ in found if "expert_" in name or "budget" in name]


def test_metrics_come_as_open_metrics_too(client: TestClient) -> None:
    answer = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_each_engine_has_metrics_of_its_own(shown: ShownEngine) -> None:
    other = ShownEngine(totals=some_totals())
    names = "strata_mlx_completion_tokens_total"
    assert registry(shown.state).get_sample_value(names) == 0
    assert registry(other.state).get_sample_value(names) == 40


def test_the_state_is_json(client: TestClient, shown: ShownEngine) -> None:
    shown.show(experts=streaming((0, 7, 8, 19), ()), requests=(a_request(),), totals=some_totals())
    answer = client.get("/v1/engine")
    assert answer.headers["cache-control"] == "no-store"
    found = answer.json()
    assert found["version"] == __version__
    assert found["alive"] is True
    assert found["requests"][0]["phase"] == "decoding"
    assert found["totals"]["verified"][:3] == [20, 10, 0]
    assert found["memory"]["budget"] == 128_000_000
    assert [layer["layer"] for layer in found["experts"]["streamed"]] == [0, 1]
    assert [resident(layer, EXPERTS) for layer in found["experts"]["streamed"]] == [[0, 7, 8, 19], []]


def test_changes_come_as_events(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "AT_LEAST", float("inf"))
    engine = ShownEngine(experts=streaming((1, 2)))
    url = f"{serve(engine)}/v1/engine"
    with httpx.stream("GET", url, headers={"Accept": "text/event-stream"}, timeout=30) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response)
        assert next(stream)["mode"] == "exact"
        engine.show(mode="biased", experts=streaming((1, 3)))
        changed = next(stream)
    assert changed["mode"] == "biased"
    assert resident(changed["experts"]["streamed"][0], EXPERTS) == [1, 3]


def test_events_come_although_nothing_changes(serve: Serve) -> None:
    url = f"{serve(ShownEngine())}/v1/engine"
    with httpx.stream("GET", url, headers={"Accept": "text/event-stream"}, timeout=30) as response:
        first, second = islice(events(response), 2)
    assert second == {**first, "at": second["at"]}
    assert second["at"] > first["at"]
