"""Health, readiness, metrics, the snapshot and the OpenAPI document."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import httpx
from prometheus_client.parser import text_string_to_metric_families

from scheduler.domain.codec import decode
from scheduler.domain.snapshot import Snapshot

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_health_does_not_depend_on_a_leader(service: ApiService) -> None:
    assert service.get("/healthz")["status"] == "ok"


def test_health_answers_while_all_threads_are_blocked(service: ApiService) -> None:
    async def ask() -> int:
        anyio.to_thread.current_default_thread_limiter().total_tokens = 1
        is_over = threading.Event()

        async def wait() -> None:
            await anyio.to_thread.run_sync(is_over.wait)

        async with anyio.create_task_group() as others:
            others.start_soon(wait)
            transport = httpx.ASGITransport(service.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                answer = await client.get("/healthz")
            is_over.set()
        return answer.status_code

    assert anyio.run(ask) == 200


def test_the_service_is_ready_while_a_lease_is_live(service: ApiService, problem: Problem) -> None:
    assert problem(service.http.get("/readyz"), 503)["type"] == "urn:ebbtide:problem:not-ready"
    service.tick()
    assert service.get("/readyz")["status"] == "ok"
    service.clock.move_to(service.clock.now_s() + 60)
    problem(service.http.get("/readyz"), 503)


def test_metrics_show_the_fleet(fleet: ApiService) -> None:
    fleet.lend_all()
    answer = fleet.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    shown = samples(answer.text)
    assert shown["ebbtide_gpus", (("pool", "training"), ("state", "training"))] == 2
    assert shown["ebbtide_nodes", (("pool", "inference"), ("state", "active"))] == 2
    assert shown["ebbtide_loans", (("state", "active"),)] == 2
    assert shown["ebbtide_leader", ()] == 1
    assert shown["ebbtide_inference_demand_gpus", (("pool", "inference"),)] == 0
    assert shown["ebbtide_forecast_gpus", (("pool", "inference"), ("quantile", "0.999"))] == 0
    assert shown["ebbtide_snapshot_generation", ()] == fleet.store.load().snapshot.generation


def test_openmetrics_are_served_to_clients_that_accept_them(fleet: ApiService) -> None:
    answer = fleet.http.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.headers["vary"] == "Accept"
    assert answer.text.endswith("# EOF\n")


def test_requests_are_timed_by_route_template(service: ApiService) -> None:
    job_id = service.submit()
    service.get(f"/v1/jobs/{job_id}")
    service.http.get("/no/such/path")
    text = service.http.get("/metrics").text
    shown = samples(text)
    name = "ebbtide_api_requests_total"
    timed = (("method", "GET"), ("route", "/v1/jobs/{job_id}"))
    assert shown["ebbtide_api_request_duration_seconds_count", timed] >= 1
    assert shown[name, (("method", "GET"), ("route", "/v1/jobs/{job_id}"), ("status", "200"))] >= 1
    assert shown[name, (("method", "GET"), ("route", "unmatched"), ("status", "404"))] >= 1
    assert job_id not in text


def test_the_snapshot_is_the_encoded_state(fleet: ApiService) -> None:
    fleet.lend_all()
    assert decode(Snapshot, fleet.get("/v1/snapshots/latest")) == fleet.store.load().snapshot


def test_the_openapi_document_lists_every_noun(service: ApiService) -> None:
    paths = set(service.get("/openapi.json")["paths"])
    assert paths >= {
        "/v1/jobs",
        "/v1/jobs:dry-run",
        "/v1/jobs/{job_id}",
        "/v1/jobs/{job_id}/plan",
        "/v1/jobs/{job_id}/events",
        "/v1/jobs/{job_id}/explanation",
        "/v1/jobs/{job_id}/progress",
        "/v1/jobs/{job_id}:suspend",
        "/v1/jobs/{job_id}:resume",
        "/v1/pools",
        "/v1/pools/{name}",
        "/v1/pools/{name}/demand",
        "/v1/pools/{name}/forecast",
        "/v1/nodes",
        "/v1/nodes/{name}",
        "/v1/nodes/{name}:cordon",
        "/v1/nodes/{name}:drain",
        "/v1/nodes/{name}:uncordon",
        "/v1/loans",
        "/v1/lending:pause",
        "/v1/lending:resume",
        "/v1/lending:recall-all",
        "/v1/decisions",
        "/v1/events",
        "/v1/snapshots/latest",
        "/v1/plans",
        "/metrics",
        "/healthz",
        "/readyz",
    }
