"""History of the use of pools, and the fleet as it was at a past time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Annotated

from fastapi import Query
from pydantic import Field
from typing_extensions import TypedDict

from api.event_views import EventView, event_view
from api.http.dependencies import ContextDep, create_router
from api.http.errors import problem_responses, raise_invalid_field, raise_not_found
from api.http.paging import PoolParameter
from api.identity.authorization import VIEWER, requires
from api.overview import NodeSummaryView
from api.state import RequestContext
from scheduler.domain.capacity_history import CAPACITY_TIERS, HOURS, CapacityBin, CapacityTier, roll_up
from scheduler.domain.fleet import ForecastFan, Pool, PoolKind
from scheduler.domain.job_state import JobState
from scheduler.scheduling.capacity_use import integrate_capacity
from scheduler.scheduling.past_changes import decode_fleet_change, replay_changes
from scheduler.scheduling.past_fleet import PastFleet, PastJob, decode_past_fleet
from scheduler.store.api_protocol import ApiStore
from scheduler.store.protocol import Page, StoredEvent

DAY_S = 86_400.0
POINTS_TYPICAL, POINTS_MAX = 720, 1500
RANGE_DEFAULT_S, RANGE_MAX_S = DAY_S, 400 * DAY_S
EVENTS_BEFORE_S, EVENTS_MAX = 1800.0, 30
_EVENTS_PER_READ, _READS_MAX = 500, 5
_TIME = "in seconds since 1970 (UTC)"
_TIME_S_MAX = 253_402_300_800.0

GpuSeries = list[float | None]
TimeParameter = Annotated[float | None, Query(ge=0, le=_TIME_S_MAX, allow_inf_nan=False)]


class CapacityUsesView(TypedDict):
    """Mean GPUs by use, one number for each bin. They add up to `capacity`. Null: nothing was observed in the bin."""

    inference: Annotated[GpuSeries, Field(description="GPUs that pods or servers of the pool hold, as last observed.")]
    used: Annotated[GpuSeries, Field(description="Held by jobs, on nodes that training owns.")]
    lent_used: Annotated[GpuSeries, Field(description="Held by jobs, on nodes of an inference pool.")]
    lent_idle: Annotated[GpuSeries, Field(description="On lent or recalled nodes, used by none.")]
    free: Annotated[
        GpuSeries, Field(description="Up and used by none. In an inference pool, the reserve that is not lent.")
    ]
    other: Annotated[GpuSeries, Field(description="Used by pods of another scheduler.")]
    down: Annotated[
        GpuSeries, Field(description="On nodes that are down, or unused on cordoned, draining or quarantined nodes.")
    ]


class ForecastFanView(TypedDict):
    """Predicted GPU demand of an inference pool over the next day. For display: lending does not use it."""

    made_at_s: Annotated[float, Field(description=f"When it was computed, {_TIME}.")]
    bin_s: Annotated[float, Field(description="Seconds over which each number is the largest demand.")]
    quantiles: Annotated[list[float], Field(description="Probabilities, ascending, between 0 and 1.")]
    at_s: Annotated[list[float], Field(description=f"Times ahead, {_TIME}, ascending.")]
    gpus: Annotated[
        list[list[float]],
        Field(description="For each of `at_s`, one number of GPUs for each of `quantiles`, which demand stays below."),
    ]
    method: Annotated[str, Field(description="How it was computed, as text for people.")]


class PoolHistoryView(TypedDict):
    """Use of one pool over time. All lists have one element for each of `at_s`."""

    name: Annotated[str, Field(description="Unique label chosen at creation.")]
    kind: Annotated[PoolKind, Field(description="Whether its nodes run training jobs or serve inference.")]
    capacity: Annotated[GpuSeries, Field(description="Mean number of GPUs of all its nodes, up or not.")]
    uses: Annotated[CapacityUsesView, Field(description="Mean GPUs by use.")]
    lent_idle_waited: Annotated[
        GpuSeries, Field(description="The part of `lent_idle` whose GPU model a pending job accepts.")
    ]
    free_waited: Annotated[GpuSeries, Field(description="The part of `free` whose GPU model a pending job accepts.")]
    lent_nodes: Annotated[GpuSeries, Field(description="Mean number of nodes that were lent or recalled.")]
    demand: Annotated[GpuSeries, Field(description="Mean number of GPUs that inference needed. Null: no reading.")]
    demand_max: Annotated[GpuSeries, Field(description="Largest number of GPUs that inference needed.")]
    short_s: Annotated[list[float], Field(description="Seconds in which lending left inference short.")]
    lends: Annotated[list[int], Field(description="Number of loans that began.")]
    recalls: Annotated[list[int], Field(description="Number of nodes that were recalled.")]
    returns: Annotated[list[int], Field(description="Number of nodes that were returned.")]
    late_returns: Annotated[list[int], Field(description="Number of them that were returned after the deadline.")]
    pending_jobs: Annotated[
        list[int | None],
        Field(description="Most pending jobs that accept a GPU model of the pool. Null: hidden from the caller."),
    ]
    pending_gpus: Annotated[
        list[int | None], Field(description="Most GPUs that these jobs need at least. Null: hidden from the caller.")
    ]
    fan: Annotated[
        ForecastFanView | None,
        Field(description="Demand ahead. Null: a training pool, or fewer than two days of readings."),
    ]


class HistoryView(TypedDict):
    """Use of pools in bins of equal length."""

    from_s: Annotated[int, Field(description=f"Start of the first bin, {_TIME}.")]
    to_s: Annotated[float, Field(description=f"End of the time range, {_TIME}.")]
    now_s: Annotated[float, Field(description=f"Time of the response, {_TIME}.")]
    step_s: Annotated[int, Field(description="Length of a bin in seconds.")]
    at_s: Annotated[list[int], Field(description=f"Start of each bin, {_TIME}.")]
    pools: Annotated[list[PoolHistoryView], Field(description="Inference pools first, then training pools, by name.")]


class PastJobView(TypedDict):
    """A job at a past time."""

    id: Annotated[str, Field(description="Label under which `/v1/jobs` has it, also after its end.")]
    name: Annotated[str, Field(description="Display name from its document.")]
    queue: Annotated[str, Field(description="Queue whose GPU quota was charged.")]
    owner: Annotated[str, Field(description="Display name of its owner.")]
    state: Annotated[JobState, Field(description="Where it was in its life cycle.")]
    gpus: Annotated[int, Field(description="Number of GPUs that it held. 0: it was pending.")]
    nodes: Annotated[int, Field(description="Number of hosts of these GPUs.")]
    min_gpus: Annotated[int, Field(description="Fewest GPUs that it can run on.")]
    max_gpus: Annotated[int, Field(description="Most GPUs that it can use.")]
    submitted_at_s: Annotated[float, Field(description=f"Time of submission, {_TIME}.")]


class PastFleetView(TypedDict):
    """Fleet and queue as they were. Jobs and events that the caller may not read are missing."""

    at_s: Annotated[float, Field(description=f"The requested time, {_TIME}.")]
    as_of_s: Annotated[
        float,
        Field(
            description=f"Time of the last recorded state at or before `at_s`, {_TIME}. Nodes and jobs are exact: they "
            "stayed as they were from then to `at_s`."
        ),
    ]
    nodes: Annotated[list[NodeSummaryView], Field(description="All nodes with their use, by name.")]
    jobs: Annotated[list[PastJobView], Field(description="Jobs that held GPUs, by id.")]
    pending: Annotated[list[PastJobView], Field(description="Pending jobs that had waited longest, at most 200.")]
    pending_jobs: Annotated[int, Field(description="Number of all jobs that waited for GPUs, named above or not.")]
    pending_gpus: Annotated[int, Field(description="Number of GPUs that they needed at least.")]
    events: Annotated[list[EventView], Field(description="Events of the half hour before `at_s`, newest first.")]


router = create_router("fleet")


@router.get("/history")
@requires(VIEWER)
def get_history(
    context: ContextDep,
    *,
    pool: PoolParameter = "",
    from_s: Annotated[TimeParameter, Query(description=f"Start, {_TIME}. Default: a day before `to_s`.")] = None,
    to_s: Annotated[TimeParameter, Query(description=f"End, {_TIME}. Default: now.")] = None,
    step_s: Annotated[
        int,
        Query(
            ge=0,
            le=86_400,
            description="Length of a bin in seconds, a multiple of 60. Default: the shortest that is stored for the "
            f"whole range and gives at most {POINTS_TYPICAL} bins.",
        ),
    ] = 0,
) -> HistoryView:
    """Return the use of the GPUs of one pool, or of all pools, over time."""
    end_s = context.now_s if to_s is None else min(to_s, context.now_s)
    begin_s = max(0.0, end_s - RANGE_DEFAULT_S) if from_s is None else from_s
    if not begin_s <= end_s <= begin_s + RANGE_MAX_S:
        raise_invalid_field("from_s", begin_s, f"at or before `to_s`, {end_s:.0f}, and at most 400 days before it")
    tier, step_s = _choose_step(context.now_s, begin_s, end_s, step_s)
    first_s = int(begin_s // step_s) * step_s
    pools = [context.pool(pool)] if pool else sorted(context.snapshot.pools.values(), key=attrgetter("kind", "name"))
    stored = context.store.capacity.list_bins(tier.step_s, from_s=first_s, to_s=end_s, pool=pool)
    newest = [each for each in integrate_capacity(context.committed, context.now_s) if pool in ("", each.pool)]
    bins = [each for each in roll_up((*stored, *newest), step_s) if first_s <= each.at_s < end_s]
    by_pool = {name: list(group) for name, group in groupby(bins, key=attrgetter("pool"))}
    at_s = list(range(first_s, max(first_s + 1, math.ceil(end_s)), step_s))
    fans = {fan.pool: fan for fan in context.store.capacity.list_fans()}
    sees_all = context.visibility.is_unrestricted
    return {
        "from_s": first_s,
        "to_s": end_s,
        "now_s": context.now_s,
        "step_s": step_s,
        "at_s": at_s,
        "pools": [_pool_view(each, by_pool.get(each.name, []), at_s, fans.get(each.name), sees_all) for each in pools],
    }


@router.get("/history/snapshot", responses=problem_responses(404))
@requires(VIEWER)
def get_past_fleet(
    context: ContextDep,
    at_s: Annotated[float, Query(ge=0, le=_TIME_S_MAX, allow_inf_nan=False, description=f"A past time, {_TIME}.")],
) -> PastFleetView:
    """Return nodes, jobs and queue as they were at a time, and the events up to that time."""
    past, visibility = load_past_fleet(context.store, at_s), context.visibility
    if past is None:
        raise_not_found("checkpoint of the fleet at or before", f"{at_s:.0f}")
    can_read = {queue: visibility.can_read_queue(queue) for queue in _list_queues(past)}
    counts = [count for queue, count in past.pending_by_queue.items() if can_read[queue]]
    return {
        "at_s": at_s,
        "as_of_s": past.at_s,
        "nodes": [
            {
                "name": node.name,
                "pool": node.pool,
                "gpu": node.gpu,
                "state": node.use,
                "gpus": node.gpus,
                "held": node.held,
                "inference": node.inference,
                "lent": node.lent,
            }
            for node in past.nodes
        ],
        "jobs": [_past_job_view(job) for job in past.holding if can_read[job.queue]],
        "pending": [_past_job_view(job) for job in past.pending if can_read[job.queue]],
        "pending_jobs": sum(jobs for jobs, _ in counts),
        "pending_gpus": sum(gpus for _, gpus in counts),
        "events": _list_events(context, past, at_s),
    }


def load_past_fleet(store: ApiStore, at_s: float) -> PastFleet | None:
    """Return the fleet as it was at a time; None before the first checkpoint."""
    stored = store.capacity.find_checkpoint(at_s)
    if stored is None:
        return None
    checkpoint = decode_past_fleet(stored.body)
    changes = store.capacity.list_fleet_changes(after=checkpoint.generation, until_s=at_s)
    return replay_changes(checkpoint, map(decode_fleet_change, changes))


def _choose_step(now_s: float, from_s: float, to_s: float, step_s: int) -> tuple[CapacityTier, int]:
    """Return the tier to read, and the length of a bin, which is `step_s` unless that is 0."""
    if step_s:
        if step_s % CAPACITY_TIERS[0].step_s or (to_s - from_s) / step_s > POINTS_MAX:
            allowed = f"a multiple of 60 that divides the range into at most {POINTS_MAX} bins"
            raise_invalid_field("step_s", step_s, allowed)
        dividing = [tier for tier in CAPACITY_TIERS if step_s % tier.step_s == 0]
        return dividing[-1], step_s
    for tier in CAPACITY_TIERS:
        is_stored = tier is HOURS or now_s - from_s <= tier.days * DAY_S
        if is_stored and (to_s - from_s) / tier.step_s <= POINTS_TYPICAL:
            return tier, tier.step_s
    return HOURS, HOURS.step_s * math.ceil((to_s - from_s) / HOURS.step_s / POINTS_TYPICAL)


def _pool_view(
    pool: Pool, bins: Iterable[CapacityBin], at_s: Sequence[int], fan: ForecastFan | None, sees_all: bool
) -> PoolHistoryView:
    by_time = {each.at_s: each for each in bins}
    row = [by_time.get(each) for each in at_s]

    def means(name: str) -> GpuSeries:
        get = attrgetter(name)
        return [None if each is None or not each.seconds else round(get(each) / each.seconds, 2) for each in row]

    def numbers(get: Callable[[CapacityBin], float]) -> list[float]:
        return [0.0 if each is None else round(get(each), 2) for each in row]

    def counts(name: str) -> list[int]:
        get = attrgetter(name)
        return [0 if each is None else get(each) for each in row]

    has_demand = [each is not None and each.demand_s > 0 for each in row]
    hidden: list[int | None] = [None] * len(row)
    return {
        "name": pool.name,
        "kind": pool.kind,
        "capacity": [
            None if each is None or not each.seconds else round(each.capacity_gpu_s / each.seconds, 2) for each in row
        ],
        "uses": {
            "inference": means("inference_gpu_s"),
            "used": means("used_gpu_s"),
            "lent_used": means("lent_used_gpu_s"),
            "lent_idle": means("lent_idle_gpu_s"),
            "free": means("free_gpu_s"),
            "other": means("other_gpu_s"),
            "down": means("down_gpu_s"),
        },
        "lent_idle_waited": means("lent_idle_waited_gpu_s"),
        "free_waited": means("free_waited_gpu_s"),
        "lent_nodes": means("lent_node_s"),
        "demand": [
            round(each.demand_gpu_s / each.demand_s, 2) if each is not None and known else None
            for each, known in zip(row, has_demand, strict=True)
        ],
        "demand_max": [
            round(each.demand_gpus_max, 2) if each is not None and known else None
            for each, known in zip(row, has_demand, strict=True)
        ],
        "short_s": numbers(attrgetter("short_s")),
        "lends": counts("lends"),
        "recalls": counts("recalls"),
        "returns": counts("returns"),
        "late_returns": counts("late_returns"),
        "pending_jobs": [*counts("pending_jobs_max")] if sees_all else hidden,
        "pending_gpus": [*counts("pending_gpus_max")] if sees_all else hidden,
        "fan": None if fan is None else _fan_view(fan),
    }


def _fan_view(fan: ForecastFan) -> ForecastFanView:
    return {
        "made_at_s": fan.made_at_s,
        "bin_s": fan.bin_s,
        "quantiles": list(fan.quantiles),
        "at_s": list(fan.at_s),
        "gpus": [list(row) for row in fan.gpus],
        "method": fan.method,
    }


def _list_queues(past: PastFleet) -> set[str]:
    return {*past.pending_by_queue, *(job.queue for job in (*past.holding, *past.pending))}


def _past_job_view(job: PastJob) -> PastJobView:
    return {
        "id": job.id,
        "name": job.name,
        "queue": job.queue,
        "owner": job.owner,
        "state": JobState(job.state),
        "gpus": job.gpus,
        "nodes": job.nodes,
        "min_gpus": job.min_gpus,
        "max_gpus": job.max_gpus,
        "submitted_at_s": job.submitted_at_s,
    }


def _list_events(context: RequestContext, past: PastFleet, at_s: float) -> list[EventView]:
    """Return the newest events before a time that the caller may read, read from the number of the checkpoint on."""
    after, near = max(0, past.newest_event - _EVENTS_PER_READ), list[StoredEvent]()
    for _ in range(_READS_MAX):
        rows = context.store.list_events(Page(after=after, limit=_EVENTS_PER_READ))
        near += [row for row in rows if at_s - EVENTS_BEFORE_S <= row.event.at_s <= at_s]
        if len(rows) < _EVENTS_PER_READ or rows[-1].event.at_s > at_s:
            break
        after = rows[-1].number
    visibility = context.visibility
    visible = visibility.select_visible_subjects({row.event.subject for row in near})
    shown = [row for row in reversed(near) if row.event.subject in visible][:EVENTS_MAX]
    return visibility.redact_all([event_view(row) for row in shown])
