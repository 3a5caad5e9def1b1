"""Pools: create, read, change and delete them; their demand and forecasts."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import Query, Response
from pydantic import Field

from api.http.conditional_requests import IfMatchHeader, repeated_creation, require_match, set_etag
from api.http.dependencies import ContextDep, LimitParameter, PoolNamePath, create_router
from api.http.errors import problem_responses, raise_conflict, raise_invalid_field
from api.http.paging import CursorParameter, PageOf, page_by_name
from api.identity.audit import declare_audited
from api.identity.authorization import ADMIN, VIEWER, requires
from api.pool_views import (
    DemandHistoryView,
    PoolForecastView,
    PoolView,
    demand_view,
    forecast_view,
    pool_view,
)
from api.state import RequestContext
from scheduler.documents import fleet
from scheduler.documents.document import Document, InvalidField
from scheduler.documents.fleet import LendingDocument, PoolDocument
from scheduler.domain.codec import encode
from scheduler.domain.commands import CreatePool, DeletePool, SetLendingPolicy
from scheduler.domain.fleet import (
    Pool,
    PoolKind,
)
from scheduler.domain.lending_policy import DAY_S
from scheduler.runtime.served_models import check_served_models
from scheduler.scheduling.preconditions import pool_etag

router = create_router("fleet")


class PoolChange(Document):
    """A change of the lending policy. Fields that are left out stay as they are."""

    lending: LendingDocument = Field(description="Lending policy. Omitted fields keep their value.")


@router.post("/pools", status_code=201, responses=repeated_creation(PoolView) | problem_responses(409))
@requires(ADMIN)
def create_pool(document: PoolDocument, context: ContextDep, response: Response) -> PoolView:
    """Create a pool. Repeating the request returns 200 and changes nothing; a different pool of that name is a
    conflict."""
    pool = fleet.to_pool(document)
    check_served_models(pool.serving)
    existing = context.snapshot.pools.get(pool.name)
    if existing is not None:
        _refuse_difference(existing, pool)
        declare_audited()
        response.status_code = 200
        return pool_response(context, existing, response)
    after = context.send(CreatePool(pool))
    response.headers["Location"] = f"/v1/pools/{pool.name}"
    return pool_response(after, pool, response)


@router.get("/pools")
@requires(VIEWER)
def list_pools(context: ContextDep, limit: LimitParameter = 100, cursor: CursorParameter = "") -> PageOf[PoolView]:
    """List all pools, by name."""
    pools = context.snapshot.pools
    return page_by_name("pools", pools, lambda pool: pool_view(pool, context.snapshot), cursor=cursor, limit=limit)


@router.get("/pools/{name}")
@requires(VIEWER)
def get_pool(name: PoolNamePath, context: ContextDep, response: Response) -> PoolView:
    """Return a pool with its capacity and, for inference, its lending policy and demand."""
    return pool_response(context, context.pool(name), response)


@router.patch("/pools/{name}", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def change_pool(
    name: PoolNamePath, change: PoolChange, context: ContextDep, response: Response, if_match: IfMatchHeader = ""
) -> PoolView:
    """Change the lending policy. Loans that it no longer allows are recalled."""
    pool = context.pool(name)
    basis = require_match(if_match, pool_etag(pool), f"pool {name}")
    if pool.kind is PoolKind.TRAINING:
        raise_conflict(f"pool {name} is a training pool. Only inference pools have a lending policy")
    zone = "" if "time_zone" in change.lending.model_fields_set else pool.lending.time_zone
    requested = fleet.to_lending_policy(change.lending, zone=zone)
    given = {field: getattr(requested, field) for field in change.lending.model_fields_set}
    if {"quantile", "shortage_target"} & given.keys():
        given |= {"quantile": requested.quantile, "shortage_target": requested.shortage_target}
    try:
        lending = replace(pool.lending, **given)
    except ValueError as error:  # a given field contradicts one that stays
        raise_invalid_field("lending", None, str(error))
    after = context.send(SetLendingPolicy(name, lending), basis=basis)
    return pool_response(after, after.snapshot.pools[name], response)


@router.delete("/pools/{name}", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def delete_pool(name: PoolNamePath, context: ContextDep, if_match: IfMatchHeader = "") -> PoolView:
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


def pool_response(context: RequestContext, pool: Pool, response: Response) -> PoolView:
    """Return the view of a pool, and set its ETag on the response."""
    set_etag(response, pool_etag(pool))
    return pool_view(pool, context.snapshot)


def _refuse_difference(existing: Pool, requested: Pool) -> None:
    if existing == requested:
        return
    differs = (
        field
        for field in ("kind", "lending", "demand", "serving")
        if getattr(existing, field) != getattr(requested, field)
    )
    field = next(differs, "network")
    value, allowed = encode(getattr(requested, field)), encode(getattr(existing, field))
    detail = f"pool {existing.name} exists with another {field}"
    raise_conflict(detail, InvalidField(field, str(value), f"{allowed}, as it was created"))


demand_router = create_router("fleet")


@demand_router.get("/pools/{name}/demand", responses=problem_responses(409))
@requires(VIEWER)
def get_demand(
    name: PoolNamePath,
    context: ContextDep,
    since_s: Annotated[
        float | None,
        Query(
            ge=0,
            allow_inf_nan=False,
            description="Earliest reading, in seconds since 1970 (UTC). Default: one day ago.",
        ),
    ] = None,
) -> DemandHistoryView:
    """Return the latest demand and the recorded readings."""
    require_inference_pool(context, name)
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
def get_forecast(name: PoolNamePath, context: ContextDep) -> PoolForecastView:
    """Return the newest forecast; null while there are too few readings."""
    require_inference_pool(context, name)
    forecast = context.snapshot.forecasts.get(name)
    return {"pool": name, "forecast": forecast_view(forecast) if forecast else None}


def require_inference_pool(context: RequestContext, name: str) -> None:
    """Check that the pool exists and can have demand. Raises ProblemError: 404 or 409."""
    if context.pool(name).kind is not PoolKind.INFERENCE:
        raise_conflict(f"pool {name} is a training pool. Only inference pools have demand")
