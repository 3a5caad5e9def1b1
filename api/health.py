"""Health and readiness probes, and metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from fastapi import Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import ServiceDep, create_router
from api.http.errors import ProblemError
from api.identity.authorization import PUBLIC, Caller, RouteRule, requires
from scheduler.package_version import get_package_version
from scheduler.telemetry.fleet_gauges import FleetGauges
from scheduler.telemetry.metrics import render_metrics


class HealthView(TypedDict):
    status: Annotated[Literal["ok"], Field(description="Always `ok`: the process answers.")]
    version: Annotated[
        str, Field(description="Installed release of Ebbtide, or `source` if not installed as a package.")
    ]


class ReadyView(TypedDict):
    """The service is ready: the database answers and a controller leads."""

    status: Annotated[Literal["ok"], Field(description="Always `ok`. A service that is not ready answers 503.")]
    inbox_commands: Annotated[int, Field(description="Number of commands that the next tick will apply.")]


router = create_router("service", prefix="")


@router.get("/healthz")
@requires(PUBLIC)
async def get_health() -> HealthView:  # async: answers even if all threads wait for the database
    """The process answers."""
    return {"status": "ok", "version": get_package_version()}


@router.get("/readyz")
@requires(PUBLIC)
def get_readiness(service: ServiceDep) -> ReadyView:
    """The database answers and a controller leads, so commands take effect; otherwise 503."""
    waiting = service.store.count_pending_commands()
    if not service.has_leader:
        raise ProblemError(503, "not-ready", "no controller leads. Commands are accepted and wait in the inbox")
    return {"status": "ok", "inbox_commands": waiting}


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "content": {
                "text/plain": {"schema": {"type": "string"}},
                "application/openmetrics-text": {"schema": {"type": "string"}},
            },
            "description": "One line per sample. OpenMetrics, with exemplars, if the header `Accept` prefers it.",
        }
    },
)
@requires(RouteRule(Caller.SCRAPERS, on_all_queues=True))
def get_metrics(service: ServiceDep, request: Request) -> Response:
    """All metrics, in the Prometheus text format or as OpenMetrics."""
    loaded = service.store.load()
    now_s = service.clock.now_s()
    current = replace(loaded.snapshot, now_s=max(now_s, loaded.snapshot.now_s))
    settings = service.settings
    gauges = FleetGauges(
        current,
        has_leader=service.has_leader,
        inbox_size=len(loaded.inbox),
        by_job=settings.metrics_by_job,
        clock_lead_s=max(0.0, loaded.snapshot.now_s - now_s),
        policy_settings=service.policies.settings,
        machines=service.store.machines.list_machines(),
        silent_after_s=settings.disconnect_s,
    )
    exposition = render_metrics(gauges, accept=request.headers.get("Accept", ""), cluster=settings.cluster)
    return Response(exposition.body, headers={"Content-Type": exposition.content_type, "Vary": "Accept"})
