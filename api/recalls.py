"""Receipts of recalls, and the monthly safety report of a pool."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from fastapi import Query
from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import ContextDep, LimitParameter, PoolNamePath, create_router
from api.http.errors import problem_responses, raise_conflict, raise_invalid_field
from api.http.paging import CursorParameter, PageOf, PoolParameter, page_of_receipts
from api.identity.authorization import HIDDEN_JOB, VIEWER, requires
from api.identity.principals import Principal, Role
from api.state import RequestContext
from scheduler.domain.decisions import ReasonCode
from scheduler.domain.fleet import Pool, PoolKind, get_shortages
from scheduler.domain.recall_receipts import JobExit, LeavingJob, RecallOutcome, RecallReceipt
from scheduler.scheduling.safety_report import (
    LendingDay,
    Month,
    PoolMonth,
    ProblemDay,
    SafetyReport,
    Verdict,
    build_safety_report,
)
from scheduler.store.lending_history import ReceiptQuery

_TIME = "in seconds since 1970 (UTC)"


class RecallChoiceView(TypedDict):
    """Why the recalled nodes were chosen among the lent nodes of a pool."""

    cost_gpu_s: Annotated[
        float, Field(description="GPU-seconds that jobs were expected to lose by leaving all nodes of the recall.")
    ]
    nodes: Annotated[int, Field(description="Number of nodes that were recalled together.")]
    alternatives: Annotated[int, Field(description="Number of lent nodes of the pool that stayed.")]


class LeavingJobView(TypedDict):
    """A job on a recalled node. Callers without access to its queue see neither the job nor its owner."""

    job_id: Annotated[str, Field(description="Job that held GPUs of the node when it was recalled.")]
    owner: Annotated[str | None, Field(description="Display name of its owner. Null: hidden from the caller.")]
    queue: Annotated[str | None, Field(description="Queue of the job. Null: hidden from the caller.")]
    gpus: Annotated[int, Field(description="Number of GPUs of the node that it held.")]
    exit: Annotated[
        JobExit | None,
        Field(
            description="`moved` to other GPUs, `shrank`, `preempted`, `ended` by itself or by its owner, or `leaving` "
            "before the recall. Null: not decided yet."
        ),
    ]
    decided_at_s: Annotated[float | None, Field(description=f"Time of that decision, {_TIME}. Null: none yet.")]
    acknowledged_at_s: Annotated[
        float | None,
        Field(description=f"When the order to leave was observed in effect, {_TIME}. Null: not observed, or no order."),
    ]
    saved: Annotated[bool, Field(description="Whether a newer checkpoint was observed before it left.")]
    lost_steps: Annotated[float, Field(description="Training steps whose work was lost by leaving.")]
    lost_gpu_s: Annotated[
        float,
        Field(
            description="GPU-seconds of lost work. A job that leaves several nodes counts on each by its GPUs there."
        ),
    ]
    left_at_s: Annotated[
        float | None, Field(description=f"When it held no GPU of the node, {_TIME}. Null: still there.")
    ]


class RecallReceiptView(TypedDict):
    """The record of one recall of a lent node. Null times have not come, or were not observed."""

    id: Annotated[str, Field(description="Unique label. A loan that is recalled again gets another one.")]
    loan_id: Annotated[str, Field(description="Loan that was recalled. A loan can be recalled several times.")]
    node: Annotated[str, Field(description="Name of the recalled host.")]
    pool: Annotated[str, Field(description="Inference pool that owns the node.")]
    gpus: Annotated[int, Field(description="Number of GPUs that the host has.")]
    code: Annotated[ReasonCode, Field(description="Reason of the recall, as a CamelCase word to compare.")]
    detail: Annotated[str, Field(description="Reason as one sentence for people. The wording can change.")]
    choice: Annotated[
        RecallChoiceView | None, Field(description="Why this node was chosen. Null: the reason names the node.")
    ]
    asked_at_s: Annotated[float, Field(description=f"Time of the recall, {_TIME}.")]
    return_by_s: Annotated[float, Field(description=f"Deadline for training to leave, {_TIME}.")]
    acknowledged_at_s: Annotated[
        float | None, Field(description=f"When the last job was observed to have its order to leave, {_TIME}.")
    ]
    freed_at_s: Annotated[float | None, Field(description=f"When no job held GPUs of the node, {_TIME}.")]
    returned_at_s: Annotated[float | None, Field(description=f"When the node was returned, {_TIME}.")]
    serving_at_s: Annotated[
        float | None,
        Field(description=f"When inference next used the node within a day of its return, {_TIME}."),
    ]
    closed_at_s: Annotated[float | None, Field(description=f"When the record was complete, {_TIME}. Null: open.")]
    outcome: Annotated[
        RecallOutcome | None,
        Field(description="`in_time`, `late`, `cancelled`, or `lost` if the node went down. Null: not known yet."),
    ]
    jobs: Annotated[list[LeavingJobView], Field(description="Jobs that had to leave the node, by id.")]


def receipt_view(receipt: RecallReceipt, principal: Principal) -> RecallReceiptView:
    """Return the receipt as the principal may see it."""
    choice = receipt.choice
    return {
        "id": receipt.id,
        "loan_id": receipt.loan_id,
        "node": receipt.node,
        "pool": receipt.pool,
        "gpus": receipt.gpus,
        "code": receipt.code,
        "detail": receipt.detail,
        "choice": None
        if choice is None
        else {"cost_gpu_s": choice.cost_gpu_s, "nodes": choice.nodes, "alternatives": choice.alternatives},
        "asked_at_s": receipt.asked_at_s,
        "return_by_s": receipt.return_by_s,
        "acknowledged_at_s": receipt.acknowledged_at_s,
        "freed_at_s": receipt.freed_at_s,
        "returned_at_s": receipt.returned_at_s,
        "serving_at_s": receipt.serving_at_s,
        "closed_at_s": receipt.closed_at_s,
        "outcome": receipt.outcome,
        "jobs": [_job_view(job, principal) for job in receipt.jobs],
    }


def _job_view(job: LeavingJob, principal: Principal) -> LeavingJobView:
    is_visible = principal.has_role(Role.VIEWER, job.queue)
    return {
        "job_id": job.job_id if is_visible else HIDDEN_JOB,
        "owner": job.owner if is_visible else None,
        "queue": job.queue if is_visible else None,
        "gpus": job.gpus,
        "exit": job.exit,
        "decided_at_s": job.decided_at_s,
        "acknowledged_at_s": job.acknowledged_at_s,
        "saved": job.saved,
        "lost_steps": job.lost_steps,
        "lost_gpu_s": job.lost_gpu_s,
        "left_at_s": job.left_at_s,
    }


class ReturnTimesView(TypedDict):
    """Time from recalls to returns."""

    p50_s: Annotated[float, Field(description="Seconds within which half of the nodes were returned.")]
    p95_s: Annotated[float, Field(description="Seconds within which 95% of the nodes were returned.")]
    max_s: Annotated[float, Field(description="Seconds of the longest return.")]
    deadline_ratio_max: Annotated[
        float, Field(description="Largest share of its deadline that a return used. Above 1: it was late.")
    ]


class ProblemDayView(TypedDict):
    """A day (UTC) with a problem."""

    start_s: Annotated[float, Field(description=f"Midnight at which it begins, {_TIME}.")]
    late: Annotated[int, Field(description="Number of recalls whose node was returned late.")]
    lost: Annotated[int, Field(description="Number of recalls whose node went down before its return.")]
    short_intervals: Annotated[int, Field(description="Number of intervals of five minutes that were short.")]
    lost_gpu_hours: Annotated[float, Field(description="GPU-hours of work that jobs lost by leaving.")]


class LendingDayView(TypedDict):
    """A day (UTC) of lending. Recalls count on the day on which they were made."""

    start_s: Annotated[float, Field(description=f"Midnight at which it begins, {_TIME}.")]
    lent_gpu_hours: Annotated[float, Field(description="GPU-hours that training could use.")]
    recalls: Annotated[int, Field(description="Number of recalls that were made.")]
    deadline_ratio_max: Annotated[
        float | None,
        Field(description="Largest share of its deadline that a return of these recalls used. Null: no return."),
    ]
    short_intervals: Annotated[int, Field(description="Number of intervals of five minutes that were short.")]


class SafetyReportView(TypedDict):
    """Effects of lending on an inference pool in one month."""

    pool: Annotated[str, Field(description="Name of the inference pool.")]
    month: Annotated[str, Field(description="Calendar month in UTC, such as `2026-10`.")]
    from_s: Annotated[float, Field(description=f"Start of the month, {_TIME}.")]
    until_s: Annotated[float, Field(description=f"End of the month, or of what is recorded so far, {_TIME}.")]
    is_complete: Annotated[bool, Field(description="Whether the month has passed.")]
    verdict: Annotated[
        Verdict,
        Field(
            description="`kept`: all returns were in time and no more intervals were short than promised. `broken`: "
            "not. `no_data`: nothing is recorded."
        ),
    ]
    summary: Annotated[str, Field(description="Verdict as one sentence for people. The wording can change.")]
    loans: Annotated[int, Field(description="Number of loans of the month that training could use.")]
    lent_gpu_hours: Annotated[float, Field(description="GPU-hours that training could use.")]
    recalls: Annotated[int, Field(description="Number of recalls that were made in the month.")]
    outcomes: Annotated[
        dict[str, int], Field(description="Number of them by outcome: `in_time`, `late`, `cancelled` and `lost`.")
    ]
    open_recalls: Annotated[int, Field(description="Number of them without an outcome yet.")]
    return_times: Annotated[ReturnTimesView | None, Field(description="Time to return. Null: nothing was returned.")]
    intervals: Annotated[int, Field(description="Number of closed intervals of five minutes with known demand.")]
    short_intervals: Annotated[int, Field(description="Number of them in which loans left inference short.")]
    recomputed_intervals: Annotated[
        int,
        Field(
            description="Number of intervals that were computed from demand readings, with the present capacity, "
            "because they are older than the record of shortages."
        ),
    ]
    target: Annotated[float | None, Field(description="Promised share of short intervals. Null: a quantile is fixed.")]
    lost_gpu_hours: Annotated[float, Field(description="GPU-hours of work that jobs lost by leaving recalled nodes.")]
    lost_steps: Annotated[float, Field(description="Training steps that jobs lost by leaving recalled nodes.")]
    longest: Annotated[RecallReceiptView | None, Field(description="Receipt of the longest return. Null: none.")]
    days: Annotated[list[ProblemDayView], Field(description="Days with problems, oldest first.")]
    daily: Annotated[
        list[LendingDayView], Field(description="Every day of the month so far. Empty: nothing is recorded.")
    ]


router = create_router("lending")

_TIME_S_MAX = 253_402_300_800.0
TimeParameter = Annotated[float | None, Query(ge=0, le=_TIME_S_MAX, allow_inf_nan=False)]


@router.get("/recalls")
@requires(VIEWER)
def list_recalls(
    context: ContextDep,
    *,
    pool: PoolParameter = "",
    since_s: Annotated[TimeParameter, Query(description=f"Only recalls made then or later, {_TIME}.")] = None,
    until_s: Annotated[TimeParameter, Query(description=f"Only recalls made before, {_TIME}.")] = None,
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[RecallReceiptView]:
    """List receipts of recalls, including open ones, newest first."""
    query = ReceiptQuery(pool, -math.inf if since_s is None else since_s, math.inf if until_s is None else until_s)
    page = page_of_receipts(context.snapshot.recalls.values(), context.store, query, cursor=cursor, limit=limit)
    return {"items": [receipt_view(each, context.principal) for each in page["items"]], "next": page["next"]}


@router.get("/pools/{name}/safety-report", responses=problem_responses(409))
@requires(VIEWER)
def get_safety_report(
    name: PoolNamePath,
    context: ContextDep,
    month: Annotated[
        str, Query(max_length=20, description="Calendar month in UTC, such as 2026-10. Default: the current one.")
    ] = "",
) -> SafetyReportView:
    """Return what lending did to the pool in one month."""
    pool = context.pool(name)
    if pool.kind is not PoolKind.INFERENCE:
        raise_conflict(f"pool {name} is a training pool. Only inference pools have a safety report")
    report = build_safety_report(_load_month(context, pool, _parse_month(month, context)))
    return _report_view(report, context.principal)


def _parse_month(text: str, context: RequestContext) -> Month:
    try:
        return Month.parse(text) if text else Month.at(context.committed.now_s)
    except ValueError:
        return raise_invalid_field("month", text, "a calendar month such as 2026-10")


def _load_month(context: RequestContext, pool: Pool, month: Month) -> PoolMonth:
    """Read everything that is recorded about the pool's month."""
    snapshot, history, start_s, end_s = context.committed, context.store.lending, month.start_s, month.end_s
    query = ReceiptQuery(pool.name, start_s, end_s)
    receipts = {each.id: each for each in snapshot.recalls.values() if query.matches(each)}
    receipts |= {each.id: each for each in history.find_receipts(query, after=None, limit=_RECEIPTS_MAX)}
    loans = {each.id: each for each in snapshot.loans.values() if each.pool == pool.name and each.offered_at_s < end_s}
    ended = history.list_pool_loans(pool.name, ended_since_s=start_s, offered_before_s=end_s)
    return PoolMonth(
        pool=pool.name,
        rules=pool.lending,
        month=month,
        now_s=snapshot.now_s,
        receipts=[receipts[receipt_id] for receipt_id in sorted(receipts)],
        loans=list((loans | {each.id: each for each in ended}).values()),
        readings=context.store.list_readings(pool.name, since_s=start_s),
        record=get_shortages(snapshot.demand, pool.name),
        capacity_gpus=snapshot.capacity(pool.name),
        node_gpus={node.name: node.gpus for node in snapshot.nodes.values()},
    )


_RECEIPTS_MAX = 1_000_000
"""More recalls than a pool can have in a month: ten thousand nodes, three times a day."""


def _report_view(report: SafetyReport, principal: Principal) -> SafetyReportView:
    times = report.return_times
    return {
        "pool": report.pool,
        "month": str(report.month),
        "from_s": report.month.start_s,
        "until_s": report.until_s,
        "is_complete": report.is_complete,
        "verdict": report.verdict,
        "summary": report.summary,
        "loans": report.loans,
        "lent_gpu_hours": report.lent_gpu_hours,
        "recalls": report.recalls,
        "outcomes": _outcomes_view(report.outcomes),
        "open_recalls": report.open_recalls,
        "return_times": None
        if times is None
        else {
            "p50_s": times.p50_s,
            "p95_s": times.p95_s,
            "max_s": times.max_s,
            "deadline_ratio_max": times.deadline_ratio_max,
        },
        "intervals": report.intervals,
        "short_intervals": report.short_intervals,
        "recomputed_intervals": report.recomputed_intervals,
        "target": report.target,
        "lost_gpu_hours": report.lost_gpu_hours,
        "lost_steps": report.lost_steps,
        "longest": None if report.longest is None else receipt_view(report.longest, principal),
        "days": [_day_view(day) for day in report.days],
        "daily": [_lending_day_view(day) for day in report.daily],
    }


def _outcomes_view(outcomes: Mapping[RecallOutcome, int]) -> dict[str, int]:
    return {outcome.value: count for outcome, count in outcomes.items()}


def _day_view(day: ProblemDay) -> ProblemDayView:
    return {
        "start_s": day.start_s,
        "late": day.late,
        "lost": day.lost,
        "short_intervals": day.short_intervals,
        "lost_gpu_hours": day.lost_gpu_hours,
    }


def _lending_day_view(day: LendingDay) -> LendingDayView:
    return {
        "start_s": day.start_s,
        "lent_gpu_hours": day.lent_gpu_hours,
        "recalls": day.recalls,
        "deadline_ratio_max": day.deadline_ratio_max,
        "short_intervals": day.short_intervals,
    }
