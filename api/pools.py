"""Pools with their nodes' views, inference demand and forecasts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, NotRequired

from fastapi import Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from api.http.conditional_requests import IfMatchHeader, require_match, set_etag
from api.http.dependencies import ContextDep, LimitParameter, create_router
from api.http.errors import problem_responses, raise_conflict, raise_invalid_field
from api.http.paging import AtSeconds, CursorParameter, PageOf, page_by_name
from api.identity.authorization import ADMIN, VIEWER, requires
from api.loans import LoanView, loan_view
from api.state import RequestContext
from scheduler.documents import fleet
from scheduler.documents.document import Document, InvalidField
from scheduler.documents.fleet import LendingDocument, PoolDocument
from scheduler.domain.codec import encode
from scheduler.domain.commands import CreatePool, DeletePool, ReportDemand, SetLendingPolicy
from scheduler.domain.fleet import DAY_S, DemandReading, Forecast, Node, NodeState, Pool, PoolKind
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.preconditions import pool_etag


class BlackoutView(TypedDict):
    """Seconds of the UTC day."""

    start_s: float
    end_s: float


class LendingPolicyView(TypedDict):
    """The lending policy of the pool's owner. The request schema describes the fields."""

    enabled: bool
    quantile: float
    headroom: float
    return_deadline_s: float
    cold_start_s: float
    kept_nodes_min: int
    lent_nodes_max: int | None
    loan_s_min: float
    blackouts: list[BlackoutView]
    demand_stale_s: float | None


class DemandView(TypedDict):
    """`asked_gpus`: the reported demand. `gpus`: the same, limited to the pool's capacity."""

    at_s: AtSeconds
    gpus: float
    asked_gpus: float
    clamped: bool


class PoolDemandView(DemandView):
    pool: str
    capacity_gpus: int


class DemandHistoryView(TypedDict):
    pool: str
    capacity_gpus: int
    latest: DemandView | None
    readings: list[DemandView]


class ForecastView(TypedDict):
    """`gpus[i]`: the most GPUs that the pool needs within `horizon_s`, with probability `quantiles[i]`. `lasting_gpus`:
    the same over the shortest worthwhile loan; empty if the horizon covers it."""

    made_at_s: AtSeconds
    horizon_s: float
    quantiles: list[float]
    gpus: list[float]
    method: str
    lasting_gpus: list[float]


class PoolForecastView(TypedDict):
    """`forecast` is null while there are too few readings."""

    pool: str
    forecast: ForecastView | None


class PoolView(TypedDict):
    """`capacity_gpus` excludes nodes that are down. Only inference pools have `lending`, `lent_nodes` and `demand`."""

    name: str
    kind: PoolKind
    nodes: int
    gpus: int
    capacity_gpus: int
    lending: NotRequired[LendingPolicyView]
    lent_nodes: NotRequired[int]
    demand: NotRequired[DemandView | None]


class NodeView(TypedDict):
    """`jobs`: indices of held GPUs by job id, including GPUs being released. `inference_gpus`: GPUs used by inference.
    `other_gpus`: GPUs used by anything else outside Ebbtide."""

    name: str
    pool: str
    gpu: str
    gpus: int
    gpu_memory_bytes: int
    state: NodeState
    cordoned: bool
    draining: bool
    inference_gpus: int
    other_gpus: int
    serves_training: bool
    loan: LoanView | None
    jobs: dict[str, list[int]]


def pool_view(pool: Pool, snapshot: Snapshot) -> PoolView:
    nodes = [node for node in snapshot.nodes.values() if node.pool == pool.name]
    view: PoolView = {
        "name": pool.name,
        "kind": pool.kind,
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "capacity_gpus": snapshot.capacity(pool.name),
    }
    if pool.kind is PoolKind.INFERENCE:
        reading = snapshot.demand.get(pool.name)
        view["lending"] = encode(pool.lending)
        view["lent_nodes"] = sum(1 for node in nodes if snapshot.is_lent(node))
        view["demand"] = demand_view(reading) if reading else None
    return view


def demand_view(reading: DemandReading) -> DemandView:
    return {
        "at_s": reading.at_s,
        "gpus": reading.gpus,
        "asked_gpus": reading.asked_gpus,
        "clamped": reading.asked_gpus > reading.gpus,
    }


def forecast_view(forecast: Forecast) -> ForecastView:
    view: ForecastView = encode(forecast)
    return view


def node_view(node: Node, snapshot: Snapshot) -> NodeView:
    loan = snapshot.loans.get(node.name)
    held = {job.id: job.allocation.held.get(node.name) for job in snapshot.jobs.values()}
    return {
        "name": node.name,
        "pool": node.pool,
        "gpu": node.gpu,
        "gpus": node.gpus,
        "gpu_memory_bytes": node.gpu_memory_bytes,
        "state": node.state,
        "cordoned": node.cordoned,
        "draining": node.draining,
        "inference_gpus": node.inference_gpus,
        "other_gpus": node.other_gpus,
        "serves_training": snapshot.serves_training(node),
        "loan": loan_view(loan) if loan else None,
        "jobs": {job_id: list(indices) for job_id, indices in held.items() if indices},
    }


router = create_router("fleet")


class PoolChange(Document):
    """A change of the lending policy. Fields that are left out stay as they are."""

    lending: LendingDocument


@router.post("/pools", status_code=201, responses=problem_responses(409))
@requires(ADMIN)
def create_pool(document: PoolDocument, context: ContextDep, response: Response) -> PoolView:
    """Create a pool. Repeating the request returns 200 and changes nothing; a different pool of that name is a
    conflict."""
    pool = fleet.to_pool(document)
    existing = context.snapshot.pools.get(pool.name)
    if existing is not None:
        _refuse_difference(existing, pool)
        response.status_code = 200
        return _pool_response(context, existing, response)
    after = context.send(CreatePool(pool))
    response.headers["Location"] = f"/v1/pools/{pool.name}"
    return _pool_response(after, pool, response)


@router.get("/pools")
@requires(VIEWER)
def list_pools(context: ContextDep, limit: LimitParameter = 100, cursor: CursorParameter = "") -> PageOf[PoolView]:
    """List all pools, by name."""
    pools = context.snapshot.pools
    return page_by_name("pools", pools, lambda pool: pool_view(pool, context.snapshot), cursor=cursor, limit=limit)


@router.get("/pools/{name}")
@requires(VIEWER)
def get_pool(name: str, context: ContextDep, response: Response) -> PoolView:
    """Return a pool with its capacity and, for inference, its lending policy and demand."""
    return _pool_response(context, context.pool(name), response)


@router.patch("/pools/{name}", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def change_pool(
    name: str, change: PoolChange, context: ContextDep, response: Response, if_match: IfMatchHeader = ""
) -> PoolView:
    """Change the lending policy. Loans that it no longer allows are recalled."""
    pool = context.pool(name)
    basis = require_match(if_match, pool_etag(pool), f"pool {name}")
    if pool.kind is PoolKind.TRAINING:
        raise_conflict(f"pool {name} is a training pool. Only inference pools have a lending policy")
    requested = fleet.to_lending_policy(change.lending)
    given = {field: getattr(requested, field) for field in change.lending.model_fields_set}
    after = context.send(SetLendingPolicy(name, replace(pool.lending, **given)), basis=basis)
    return _pool_response(after, after.snapshot.pools[name], response)


@router.delete("/pools/{name}", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def delete_pool(name: str, context: ContextDep, if_match: IfMatchHeader = "") -> PoolView:
    """Delete an empty pool."""
    pool = context.pool(name)
    basis = require_match(if_match, pool_etag(pool), f"pool {name}")
    nodes = [node for node in context.snapshot.nodes.values() if node.pool == name]
    lent = sorted(node.name for node in nodes if context.snapshot.is_lent(node))
    if lent:
        raise_conflict(
            f"pool {name} has lent nodes: {', '.join(lent[:10])}. Recall the loans and remove the nodes first"
        )
    if nodes:
        names = ", ".join(sorted(node.name for node in nodes)[:10])
        raise_conflict(f"pool {name} still has {len(nodes)} node{'s' * (len(nodes) > 1)}: {names}. Remove them first")
    context.send(DeletePool(name), basis=basis)
    return pool_view(pool, context.snapshot)


def _pool_response(context: RequestContext, pool: Pool, response: Response) -> PoolView:
    set_etag(response, pool_etag(pool))
    return pool_view(pool, context.snapshot)


def _refuse_difference(existing: Pool, requested: Pool) -> None:
    if existing == requested:
        return
    field = "kind" if existing.kind is not requested.kind else "lending"
    value, allowed = encode(getattr(requested, field)), encode(getattr(existing, field))
    detail = f"pool {existing.name} exists with another {field}"
    raise_conflict(detail, InvalidField(field, str(value), f"{allowed}, as it was created"))


demand_router = create_router("fleet")

GPUS_MAX = 1e9
FUTURE_S_MAX = 60.0


class DemandReport(Document):
    """`gpus`: what the pool's inference needs from time `at` on, in seconds since 1970 (UTC). `at` defaults to now."""

    gpus: Annotated[float, Field(strict=True, ge=0, le=GPUS_MAX)]
    at: Annotated[float, Field(strict=True, ge=0)] | None = None


@demand_router.post("/pools/{name}/demand", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def report_demand(name: str, report: DemandReport, context: ContextDep) -> PoolDemandView:
    """Report the demand of the pool's inference. Demand above the capacity counts as the capacity and recalls every
    loan."""
    _require_inference_pool(context, name)
    at_s = _reading_time_s(report, context, name)
    after = context.send(ReportDemand(name, report.gpus), at_s=at_s)
    reading = after.snapshot.demand[name]
    return {"pool": name, "capacity_gpus": after.snapshot.capacity(name), **demand_view(reading)}


@demand_router.get("/pools/{name}/demand", responses=problem_responses(409))
@requires(VIEWER)
def get_demand(
    name: str,
    context: ContextDep,
    since_s: Annotated[float | None, Query(ge=0, allow_inf_nan=False, description="Default: one day ago.")] = None,
) -> DemandHistoryView:
    """Return the latest demand and the recorded readings."""
    _require_inference_pool(context, name)
    latest = context.snapshot.demand.get(name)
    readings = context.store.list_readings(name, since_s=context.now_s - DAY_S if since_s is None else since_s)
    return {
        "pool": name,
        "capacity_gpus": context.snapshot.capacity(name),
        "latest": demand_view(latest) if latest else None,
        "readings": [demand_view(reading) for reading in readings],
    }


@demand_router.get("/pools/{name}/forecast", responses=problem_responses(409))
@requires(VIEWER)
def get_forecast(name: str, context: ContextDep) -> PoolForecastView:
    """Return the newest forecast; null while there are too few readings."""
    _require_inference_pool(context, name)
    forecast = context.snapshot.forecasts.get(name)
    return {"pool": name, "forecast": forecast_view(forecast) if forecast else None}


def _require_inference_pool(context: RequestContext, name: str) -> None:
    if context.pool(name).kind is not PoolKind.INFERENCE:
        raise_conflict(f"pool {name} is a training pool. Only inference pools have demand")


def _reading_time_s(report: DemandReport, context: RequestContext, name: str) -> float:
    """Return the time of the reading. Readings must be in order of time and not in the future."""
    if report.at is None:
        return context.now_s
    latest = context.snapshot.demand.get(name)
    earliest_s = latest.at_s if latest else -math.inf
    if report.at > context.now_s + FUTURE_S_MAX:
        raise_invalid_field("at", report.at, f"at most the current time, {context.now_s:.3f}")
    if report.at < earliest_s:
        raise_invalid_field("at", report.at, f"at least the time of the latest reading, {earliest_s:.3f}")
    return report.at
