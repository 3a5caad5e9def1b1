"""Demand and forecast of an inference pool."""

from __future__ import annotations

import math
from typing import Annotated

from fastapi import Query
from pydantic import Field

from api.answers.fleet import (
    DemandHistoryView,
    PoolDemandView,
    PoolForecastView,
    demand_view,
    forecast_view,
)
from api.dependencies import WorldDep
from api.errors import conflict, refuse
from api.problems import problems
from api.routing import noun_router
from api.world import World
from scheduler.documents.document import Document
from scheduler.domain.command import ReportDemand
from scheduler.domain.fleet import DAY_S, PoolKind

router = noun_router("fleet")

GPUS_MAX = 1e9
EARLY_S_MAX = 60.0


class DemandReport(Document):
    """`gpus` the pool's inference needs from `at` on: seconds since 1970 (UTC), now when it is left out."""

    gpus: Annotated[float, Field(strict=True, ge=0, le=GPUS_MAX)]
    at: Annotated[float, Field(strict=True, ge=0)] | None = None


@router.post("/pools/{name}/demand", status_code=202, responses=problems(409))
def report_demand(name: str, report: DemandReport, world: WorldDep) -> PoolDemandView:
    """Demand above the pool's capacity is accepted; it counts as the capacity, and recalls every loan."""
    _require_inference(world, name)
    at_s = _time_of(report, world, name)
    after = world.send(ReportDemand(name, report.gpus), at_s=at_s)
    reading = after.snapshot.demand[name]
    return {"pool": name, "capacity_gpus": after.snapshot.capacity(name), **demand_view(reading)}


@router.get("/pools/{name}/demand", responses=problems(409))
def get_demand(
    name: str,
    world: WorldDep,
    since_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False, description="Default: a day ago.")] = None,
) -> DemandHistoryView:
    """The latest demand and the recorded readings."""
    _require_inference(world, name)
    latest = world.snapshot.demand.get(name)
    readings = world.store.readings(name, since_s=world.now_s - DAY_S if since_s is None else since_s)
    return {
        "pool": name,
        "capacity_gpus": world.snapshot.capacity(name),
        "latest": demand_view(latest) if latest else None,
        "readings": [demand_view(reading) for reading in readings],
    }


@router.get("/pools/{name}/forecast", responses=problems(409))
def get_forecast(name: str, world: WorldDep) -> PoolForecastView:
    """The newest forecast; null while there are too few readings for one."""
    _require_inference(world, name)
    forecast = world.snapshot.forecasts.get(name)
    return {"pool": name, "forecast": forecast_view(forecast) if forecast else None}


def _require_inference(world: World, name: str) -> None:
    if world.pool(name).kind is not PoolKind.INFERENCE:
        conflict(f"pool {name} is of kind training: only an inference pool has a demand")


def _time_of(report: DemandReport, world: World, name: str) -> float:
    """Readings come in order of time, and not from the future."""
    if report.at is None:
        return world.now_s
    latest = world.snapshot.demand.get(name)
    earliest_s = latest.at_s if latest else -math.inf
    if report.at > world.now_s + EARLY_S_MAX:
        refuse("at", report.at, f"at most now, which is {world.now_s:.3f}")
    if report.at < earliest_s:
        refuse("at", report.at, f"at least the time of the latest reading, {earliest_s:.3f}")
    return report.at
