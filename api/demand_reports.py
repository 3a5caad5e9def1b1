"""Reports of inference demand: one reading, in GPUs or in requests, or a batch that may reach back for weeks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Self

from fastapi import Response
from pydantic import Field, model_validator

from api.http.conditional_requests import IfMatchHeader, require_match
from api.http.dependencies import ContextDep, PoolNamePath, create_router
from api.http.errors import problem_responses, raise_conflict, raise_invalid_field
from api.identity.audit import declare_audited
from api.identity.authorization import ADMIN, RouteRule, requires
from api.identity.principals import Role
from api.pool_views import DemandView, PoolView, demand_view
from api.pools import pool_response, require_inference_pool
from api.state import RequestContext
from scheduler.documents.demand_source import DemandSourceDocument, to_prometheus_demand
from scheduler.documents.document import Document, Text, invalid_field
from scheduler.documents.fleet import describe_as_number
from scheduler.documents.serving import LENGTHS_MAX, SERVED_MODELS_MAX, LengthDocument, to_request_lengths
from scheduler.domain.commands import ReportDemand, ReportDemandHistory, SetDemandSource
from scheduler.domain.demand_source import BURSTINESS_MAX, BURSTINESS_MIN, describe_source_conflict
from scheduler.domain.fleet import DemandReading
from scheduler.domain.serving import RATE_MAX, ReportedRequests
from scheduler.runtime.served_models import build_demand_report
from scheduler.scheduling.preconditions import pool_etag

GPUS_MAX = 1e9
FUTURE_S_MAX = 60.0
READINGS_MAX = 50_000

Gpus = Annotated[float, Field(strict=True, ge=0, le=GPUS_MAX)]
Moment = Annotated[float, Field(strict=True, ge=0)]


class PoolDemandView(DemandView):
    """The present demand of a pool after a report, and how many of its readings were used."""

    pool: Annotated[str, Field(description="Name of the inference pool.")]
    capacity_gpus: Annotated[int, Field(description="Number of GPUs of nodes that are not down.")]
    accepted: Annotated[int, Field(description="Number of readings of the report that were recorded.")]
    backfilled: Annotated[int, Field(description="Number of them that entered the history alone.")]
    clamped_readings: Annotated[int, Field(description="Number of them above the capacity of the pool.")]


class DemandPoint(Document):
    """The demand of a pool from a moment on."""

    at: Moment = Field(description="Time of the reading, in seconds since 1970 (UTC).")
    gpus: Gpus = Field(description="Number of GPUs needed from time `at` on.")


class RequestsDocument(Document):
    """Requests for one model of a pool."""

    model: Text = Field(description="Name of a model that the pool serves.")
    rate: Annotated[float, Field(strict=True, ge=0, le=RATE_MAX)] = Field(description="Requests per second.")
    lengths: Annotated[list[LengthDocument], Field(max_length=LENGTHS_MAX)] = Field(
        default_factory=list, description="Histogram of the lengths of requests. Empty: that of the pool."
    )
    burstiness: Annotated[float, Field(strict=True, ge=BURSTINESS_MIN, le=BURSTINESS_MAX)] = Field(
        default=1.0, description="Squared coefficient of variation of the times between requests. 1: Poisson."
    )


class DemandReport(Document):
    """A reading of what the inference of a pool needs, in GPUs or as `requests`, or many `readings` in any order.

    The newest of the `readings` becomes the present demand if it is newer than the latest reading. All others enter
    the history that forecasts learn from. Of two with the same time, the later one in the list counts. A reading
    replaces the recorded one of its time, except the latest reading.
    """

    gpus: Gpus | None = Field(
        default=None,
        description="Number of GPUs needed from time `at` on. Omit it to give `readings` or `requests`.",
        json_schema_extra=describe_as_number,
    )
    at: Moment | None = Field(default=None, description="Time of the reading, in seconds since 1970 (UTC). Null: now.")
    readings: Annotated[list[DemandPoint], Field(min_length=1, max_length=READINGS_MAX)] | None = Field(
        default=None, description="Readings of any age, in any order, instead of `gpus` and `at`."
    )
    requests: Annotated[list[RequestsDocument], Field(min_length=1, max_length=SERVED_MODELS_MAX)] | None = Field(
        default=None, description="Requests for each model of the pool, instead of `gpus`."
    )

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        given = [name for name in ("gpus", "readings", "requests") if getattr(self, name) is not None]
        if len(given) != 1:
            allowed = "exactly one of gpus, readings and requests"
            raise invalid_field("gpus", "nothing" if not given else " and ".join(given), allowed)
        if self.readings is not None and self.at is not None:
            raise invalid_field("at", self.at, "nothing together with readings, which have their own times")
        return self


router = create_router("fleet")


@router.post("/pools/{name}/demand", status_code=202, responses=problem_responses(409))
@requires(RouteRule(role=Role.ADMIN, on_all_queues=True, body_setting="demand_body_bytes"))
def report_demand(name: PoolNamePath, report: DemandReport, context: ContextDep) -> PoolDemandView:
    """Report the demand of the pool's inference: now, in GPUs or in requests, or over time. Demand above the capacity
    counts as the capacity and recalls every loan."""
    require_inference_pool(context, name)
    if report.readings is not None:
        return _record_history(name, report.readings, context)
    at_s = _reading_time_s(report, context, name)
    after = context.send(build_report(report, context, name), at_s=at_s)
    return _build_view(name, after, (after.snapshot.demand[name].asked_gpus,), backfilled=0)


def build_report(report: DemandReport, context: RequestContext, name: str) -> ReportDemand:
    """Return the command of one reading; raises InvalidDocumentError as `build_demand_report`."""
    if report.requests is None:
        assert report.gpus is not None
        return ReportDemand(name, report.gpus)
    reported = [_to_reported_requests(each) for each in report.requests]
    return build_demand_report(context.pool(name), reported, context.snapshot.forecasts.get(name), context.now_s)


def _to_reported_requests(document: RequestsDocument) -> ReportedRequests:
    lengths = to_request_lengths(document.lengths)
    return ReportedRequests(document.model, document.rate, document.burstiness, lengths)


@router.put("/pools/{name}/demand-source", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def set_demand_source(
    name: PoolNamePath,
    document: DemandSourceDocument,
    context: ContextDep,
    response: Response,
    if_match: IfMatchHeader = "",
) -> PoolView:
    """Let the service poll Prometheus for the demand of a pool. The history of its queries is back-filled."""
    return _change_source(context, SetDemandSource(name, to_prometheus_demand(document)), if_match, response)


@router.delete("/pools/{name}/demand-source", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def delete_demand_source(
    name: PoolNamePath, context: ContextDep, response: Response, if_match: IfMatchHeader = ""
) -> PoolView:
    """Stop polling for the demand of a pool. From then on, its demand is reported to the API."""
    return _change_source(context, SetDemandSource(name, None), if_match, response)


def _change_source(context: RequestContext, change: SetDemandSource, if_match: str, response: Response) -> PoolView:
    require_inference_pool(context, change.pool)
    pool = context.pool(change.pool)
    basis = require_match(if_match, pool_etag(pool), f"pool {pool.name}")
    if pool.demand == change.source:
        declare_audited()
        return pool_response(context, pool, response)
    if conflict := describe_source_conflict(change.source, (each.model for each in pool.serving)):
        raise_conflict(f"pool {pool.name}: {conflict}. Give `requests` for each model that it serves, and no other")
    after = context.send(change, basis=basis)
    return pool_response(after, after.snapshot.pools[pool.name], response)


def _record_history(name: str, points: list[DemandPoint], context: RequestContext) -> PoolDemandView:
    for at, point in enumerate(points):
        _check_not_in_future(f"readings.{at}.at", point.at, context.now_s)
    gpus_by_time_s = {point.at: point.gpus for point in points}
    before = context.snapshot.demand.get(name)
    after = context.send(ReportDemandHistory(name, tuple(sorted(gpus_by_time_s.items()))))
    if before is not None:
        gpus_by_time_s.pop(before.at_s, None)
    is_new = after.snapshot.demand[name].at_s != (before.at_s if before else None)
    return _build_view(name, after, gpus_by_time_s.values(), backfilled=len(gpus_by_time_s) - is_new)


def _build_view(name: str, after: RequestContext, accepted: Iterable[float], *, backfilled: int) -> PoolDemandView:
    capacity, accepted = after.snapshot.capacity(name), tuple(accepted)
    present: DemandReading = after.snapshot.demand[name]
    return {
        "pool": name,
        "capacity_gpus": capacity,
        **demand_view(present),
        "accepted": len(accepted),
        "backfilled": backfilled,
        "clamped_readings": sum(gpus > capacity for gpus in accepted),
    }


def _reading_time_s(report: DemandReport, context: RequestContext, name: str) -> float:
    """Return the time of the reading. Single readings must be in order of time and not in the future."""
    if report.at is None:
        return context.now_s
    latest = context.snapshot.demand.get(name)
    earliest_s = latest.at_s if latest else -math.inf
    _check_not_in_future("at", report.at, context.now_s)
    if report.at < earliest_s:
        allowed = f"at least the time of the latest reading, {earliest_s:.3f}; report older ones as `readings`"
        raise_invalid_field("at", report.at, allowed)
    return report.at


def _check_not_in_future(field: str, at_s: float, now_s: float) -> None:
    if at_s > now_s + FUTURE_S_MAX:
        raise_invalid_field(field, at_s, f"at most the current time, {now_s:.3f}")
