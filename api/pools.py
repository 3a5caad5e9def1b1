"""Pools with their nodes' views, inference demand and forecasts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, NotRequired

from fastapi import Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from api.demand_reports import DemandReport, build_report
from api.http.conditional_requests import IfMatchHeader, repeated_creation, require_match, set_etag
from api.http.dependencies import ContextDep, LimitParameter, PoolNamePath, create_router
from api.http.errors import problem_responses, raise_conflict, raise_invalid_field
from api.http.paging import CursorParameter, PageOf, page_by_name
from api.identity.audit import declare_audited
from api.identity.authorization import ADMIN, VIEWER, requires
from api.loans import LoanView, loan_view
from api.serving_views import ServedModelView, served_model_views
from api.state import RequestContext
from scheduler.documents import fleet
from scheduler.documents.document import Document, InvalidField
from scheduler.documents.fleet import LendingDocument, PoolDocument, PoolNetworkDocument
from scheduler.domain.codec import encode
from scheduler.domain.commands import CreatePool, DeletePool, SetLendingPolicy
from scheduler.domain.fleet import (
    DemandReading,
    Forecast,
    IncidentKind,
    Node,
    NodeIncident,
    NodeState,
    Pool,
    PoolKind,
    get_shortages,
)
from scheduler.domain.lending_policy import DAY_S, LendingPolicy
from scheduler.domain.shortages import ShortageRecord
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.served_models import check_served_models
from scheduler.scheduling.policies.lending_promise import find_working_quantile
from scheduler.scheduling.preconditions import pool_etag
from scheduler.solver.profiles.catalog import is_estimated_gpu

_NETWORK = {name: info.description for name, info in PoolNetworkDocument.model_fields.items()}
_LENDING = {name: info.description for name, info in LendingDocument.model_fields.items()}


class BlackoutView(TypedDict):
    """A daily window without new loans. It may wrap around midnight."""

    start_s: Annotated[float, Field(description="First second of the window, counted from midnight UTC.")]
    end_s: Annotated[float, Field(description="Second after the window, counted from midnight UTC.")]


class LendingPolicyView(TypedDict):
    """Limits that the owner of an inference pool sets for its loans."""

    enabled: Annotated[bool, Field(description=_LENDING["enabled"])]
    shortage_target: Annotated[
        float | None,
        Field(description="Promised share of five-minute intervals in which loans leave it short. Null: none."),
    ]
    quantile: Annotated[
        float,
        Field(
            description="Quantile of the demand forecast that nodes that are not lent must cover, between 0 and 1. It "
            "changes with the shortages if there is a `shortage_target`."
        ),
    ]
    headroom: Annotated[float, Field(description=_LENDING["headroom"])]
    return_deadline_s: Annotated[float, Field(description=_LENDING["return_deadline_s"])]
    cold_start_s: Annotated[float, Field(description=_LENDING["cold_start_s"])]
    kept_nodes_min: Annotated[int, Field(description=_LENDING["kept_nodes_min"])]
    lent_nodes_max: Annotated[int | None, Field(description=_LENDING["lent_nodes_max"])]
    loan_s_min: Annotated[float, Field(description=_LENDING["loan_s_min"])]
    blackouts: Annotated[list[BlackoutView], Field(description=_LENDING["blackouts"])]
    demand_stale_s: Annotated[float | None, Field(description=_LENDING["demand_stale_s"])]


class DemandView(TypedDict):
    """A reading of what the inference of a pool needs."""

    at_s: Annotated[float, Field(description="Time of the reading, in seconds since 1970 (UTC).")]
    gpus: Annotated[float, Field(description="Number of GPUs needed, limited to the pool's capacity.")]
    asked_gpus: Annotated[float, Field(description="Number of GPUs as reported, without the limit.")]
    clamped: Annotated[bool, Field(description="Whether the reported number exceeded the capacity.")]


class PoolDemandView(DemandView):
    pool: Annotated[str, Field(description="Name of the inference pool.")]
    capacity_gpus: Annotated[int, Field(description="Number of GPUs of nodes that are not down.")]


class DemandHistoryView(TypedDict):
    pool: Annotated[str, Field(description="Name of the inference pool.")]
    capacity_gpus: Annotated[int, Field(description="Number of GPUs of nodes that are not down.")]
    latest: Annotated[DemandView | None, Field(description="Newest reading. Null: none yet.")]
    readings: Annotated[list[DemandView], Field(description="Recorded readings of the requested time, oldest first.")]


class ModelRateView(TypedDict):
    """Predicted request rate of a model that is sized."""

    model: Annotated[str, Field(description="One of those that the pool serves.")]
    made_at_s: Annotated[float, Field(description="Time at which it was computed, in seconds since 1970 (UTC).")]
    horizon_s: Annotated[float, Field(description="Seconds that it looks ahead: the start of a replica.")]
    quantile: Annotated[float, Field(description="Probability that the rate stays at or below it.")]
    rate_per_s: Annotated[float, Field(description="Largest rate within the horizon, in requests/s.")]
    is_calibrated: Annotated[
        bool, Field(description="Whether enough forecasts have met their outcome. Otherwise it does not count.")
    ]


class ForecastView(TypedDict):
    """Predicted GPU demand of an inference pool."""

    made_at_s: Annotated[float, Field(description="Time at which it was computed, in seconds since 1970 (UTC).")]
    horizon_s: Annotated[
        float, Field(description="Seconds that it looks ahead: return deadline and cold start of the pool.")
    ]
    quantiles: Annotated[list[float], Field(description="Probabilities, ascending, between 0 and 1.")]
    gpus: Annotated[
        list[float], Field(description="Most GPUs needed within the horizon, one number for each of `quantiles`.")
    ]
    method: Annotated[str, Field(description="How it was computed, as text for people.")]
    lasting_gpus: Annotated[
        list[float],
        Field(description="Most GPUs needed over the shortest worthwhile loan. Empty: the horizon covers it."),
    ]
    is_calibrated: Annotated[
        bool, Field(description="Whether enough forecasts have met their outcome. Otherwise nothing new is lent.")
    ]
    rates: Annotated[list[ModelRateView], Field(description="Predicted request rates of the models that are sized.")]


class ShortagesView(TypedDict):
    """Five-minute intervals of the last two weeks in which loans left the inference of a pool short."""

    intervals: Annotated[int, Field(description="Number of intervals that have closed.")]
    short_intervals: Annotated[int, Field(description="Number of them that were short.")]
    target: Annotated[float | None, Field(description="Promised share of short intervals. Null: a quantile is fixed.")]
    budget_left: Annotated[
        float | None,
        Field(description="Share of the promised short intervals that is left, 0 to 1. Null: a quantile is fixed."),
    ]


class PoolForecastView(TypedDict):
    """`forecast` is null while there are too few readings."""

    pool: Annotated[str, Field(description="Name of the inference pool.")]
    forecast: Annotated[ForecastView | None, Field(description="Predicted demand. Null: too few readings so far.")]


class PoolNetworkView(TypedDict):
    """The network between the nodes of a pool."""

    bandwidth_bytes_per_s: Annotated[float, Field(description=_NETWORK["bandwidth_bytes_per_s"])]
    latency_s: Annotated[float, Field(description=_NETWORK["latency_s"])]
    nics_per_node: Annotated[int, Field(description=_NETWORK["nics_per_node"])]


class PoolView(TypedDict):
    """A pool of nodes. Only inference pools have `lending`, `lent_nodes`, `demand` and `serving`."""

    name: Annotated[str, Field(description="Unique label chosen at creation.")]
    kind: Annotated[PoolKind, Field(description="Whether its nodes run training jobs or serve inference.")]
    nodes: Annotated[int, Field(description="Number of hosts, including those that are down.")]
    gpus: Annotated[int, Field(description="Number of GPUs of all its nodes.")]
    capacity_gpus: Annotated[int, Field(description="Number of GPUs of nodes that are not down.")]
    network: Annotated[
        PoolNetworkView | None,
        Field(description="Network between its nodes. Null: that of the profile of their GPU model."),
    ]
    lending: NotRequired[Annotated[LendingPolicyView, Field(description="Limits that the owner sets for its loans.")]]
    lent_nodes: NotRequired[Annotated[int, Field(description="Number of hosts on loan to training.")]]
    demand: NotRequired[
        Annotated[DemandView | None, Field(description="Latest reading of what inference needs. Null: none yet.")]
    ]
    serving: NotRequired[
        Annotated[list[ServedModelView], Field(description="Models whose requests can be reported as demand.")]
    ]


class IncidentView(TypedDict):
    """A job that a node has failed or slowed."""

    kind: Annotated[
        IncidentKind,
        Field(
            description="`hang`: a rank made no progress. `loss`: its agent or a supervisor was lost. `straggler`: it "
            "computed more slowly than the other nodes of the job."
        ),
    ]
    job_id: Annotated[str, Field(description="Job whose run on the node failed or was slow.")]
    at_s: Annotated[float, Field(description="Time of the incident, in seconds since 1970 (UTC).")]
    confirmed: Annotated[
        bool, Field(description="Whether it counts toward a quarantine. A hang does once the job goes on elsewhere.")
    ]
    detail: Annotated[str, Field(description="Evidence, such as the rank and its last step.")]


class NodeView(TypedDict):
    """A host with GPUs of one model."""

    name: Annotated[str, Field(description="Host name, unique in the fleet.")]
    pool: Annotated[str, Field(description="Pool that owns it, lent or not.")]
    gpu: Annotated[str, Field(description="Profile name of the GPU model, such as `h100-80g`.")]
    gpus: Annotated[int, Field(description="Number of GPUs that the host has.")]
    gpu_memory_bytes: Annotated[int, Field(description="Memory of one of them, in bytes.")]
    estimated: Annotated[bool, Field(description="Whether the GPU profile was estimated from what a machine reported.")]
    state: Annotated[NodeState, Field(description="`up`, or `down` if the executor no longer sees it.")]
    cordoned: Annotated[bool, Field(description="Whether nothing new is scheduled on it. Running jobs stay.")]
    draining: Annotated[bool, Field(description="Whether its jobs are moved away, too.")]
    quarantine: Annotated[
        str, Field(description="Why it is drained until `:uncordon` releases it. Empty: not quarantined.")
    ]
    incidents: Annotated[
        list[IncidentView], Field(description="Jobs that it has failed or slowed in the last day, oldest first.")
    ]
    inference_gpus: Annotated[int, Field(description="Number of GPUs that inference uses, as last observed.")]
    other_gpus: Annotated[int, Field(description="Number of GPUs used by anything else outside Ebbtide.")]
    serves_training: Annotated[bool, Field(description="Whether jobs can start on it now.")]
    loan: Annotated[LoanView | None, Field(description="Its current loan to training. Null: not lent.")]
    jobs: Annotated[
        dict[str, list[int]],
        Field(description="GPU indices by id of the job that holds them, including GPUs being released."),
    ]


def pool_view(pool: Pool, snapshot: Snapshot) -> PoolView:
    nodes = [node for node in snapshot.nodes.values() if node.pool == pool.name]
    view: PoolView = {
        "name": pool.name,
        "kind": pool.kind,
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "capacity_gpus": snapshot.capacity(pool.name),
        "network": None if pool.network is None else encode(pool.network),
    }
    if pool.kind is PoolKind.INFERENCE:
        reading = snapshot.demand.get(pool.name)
        view["lending"] = _lending_view(pool.lending, get_shortages(snapshot.demand, pool.name))
        view["lent_nodes"] = sum(1 for node in nodes if snapshot.is_lent(node))
        view["demand"] = demand_view(reading) if reading else None
        view["serving"] = served_model_views(pool, reading)
    return view


def _lending_view(rules: LendingPolicy, record: ShortageRecord) -> LendingPolicyView:
    view: LendingPolicyView = encode(rules)
    view["quantile"] = find_working_quantile(rules, record)
    return view


def demand_view(reading: DemandReading) -> DemandView:
    return {
        "at_s": reading.at_s,
        "gpus": reading.gpus,
        "asked_gpus": reading.asked_gpus,
        "clamped": reading.asked_gpus > reading.gpus,
    }


def shortages_view(rules: LendingPolicy, record: ShortageRecord) -> ShortagesView:
    target = rules.shortage_target
    return {
        "intervals": record.intervals,
        "short_intervals": record.short_intervals,
        "target": target,
        "budget_left": None if target is None else record.compute_budget_left(target),
    }


def forecast_view(forecast: Forecast) -> ForecastView:
    view: ForecastView = encode(forecast)
    return view


def incident_view(incident: NodeIncident) -> IncidentView:
    return {
        "kind": incident.kind,
        "job_id": incident.job_id,
        "at_s": incident.at_s,
        "confirmed": incident.is_confirmed,
        "detail": incident.detail,
    }


def node_view(node: Node, snapshot: Snapshot) -> NodeView:
    loan = snapshot.loans.get(node.name)
    held = {job.id: job.allocation.held.get(node.name) for job in snapshot.jobs.values()}
    return {
        "name": node.name,
        "pool": node.pool,
        "gpu": node.gpu,
        "gpus": node.gpus,
        "gpu_memory_bytes": node.gpu_memory_bytes,
        "estimated": is_estimated_gpu(node.gpu),
        "state": node.state,
        "cordoned": node.cordoned,
        "draining": node.draining,
        "quarantine": node.quarantine,
        "incidents": [incident_view(incident) for incident in node.incidents],
        "inference_gpus": node.inference_gpus,
        "other_gpus": node.other_gpus,
        "serves_training": snapshot.serves_training(node),
        "loan": loan_view(loan) if loan else None,
        "jobs": {job_id: list(indices) for job_id, indices in held.items() if indices},
    }


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
    requested = fleet.to_lending_policy(change.lending)
    given = {field: getattr(requested, field) for field in change.lending.model_fields_set}
    if {"quantile", "shortage_target"} & given.keys():
        given |= {"quantile": requested.quantile, "shortage_target": requested.shortage_target}
    after = context.send(SetLendingPolicy(name, replace(pool.lending, **given)), basis=basis)
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
        field for field in ("kind", "lending", "serving") if getattr(existing, field) != getattr(requested, field)
    )
    field = next(differs, "network")
    value, allowed = encode(getattr(requested, field)), encode(getattr(existing, field))
    detail = f"pool {existing.name} exists with another {field}"
    raise_conflict(detail, InvalidField(field, str(value), f"{allowed}, as it was created"))


demand_router = create_router("fleet")

FUTURE_S_MAX = 60.0


@demand_router.post("/pools/{name}/demand", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def report_demand(name: PoolNamePath, report: DemandReport, context: ContextDep) -> PoolDemandView:
    """Report the demand of the pool's inference, in GPUs or in requests. Demand above the capacity counts as the
    capacity and recalls every loan."""
    _require_inference_pool(context, name)
    at_s = _reading_time_s(report, context, name)
    after = context.send(build_report(report, context, name), at_s=at_s)
    reading = after.snapshot.demand[name]
    return {"pool": name, "capacity_gpus": after.snapshot.capacity(name), **demand_view(reading)}


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
def get_forecast(name: PoolNamePath, context: ContextDep) -> PoolForecastView:
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
