"""The list of jobs: filters, order, pages, and why pending jobs wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal

from fastapi import Depends, Query, Request

from api.event_views import reason_view
from api.explanations import PendingReasonCache
from api.http.dependencies import ContextDep, LimitParameter, create_router
from api.http.paging import CursorParameter, PageOf, decode_number_cursor, encode_cursor, page_of_jobs
from api.identity.authorization import VIEWER, requires
from api.job_filter import JobFilter
from api.jobs import JobView, job_view
from api.state import RequestContext
from scheduler.domain.job import Job
from scheduler.domain.job_state import WAITING_STATES
from scheduler.store.api_protocol import ApiStore, get_job_sort_key
from scheduler.store.job_query import JobQuery

ENDED_SORTED_MAX = 1000
"""Ended jobs that a list in another order than by submission considers: those that were submitted last."""


JobSort = Literal[
    "-submitted", "submitted", "name", "-name", "state", "-state", "queue", "-queue", "gpus", "-gpus",
    "progress", "-progress", "remaining", "-remaining", "gpu_time", "-gpu_time",
]  # fmt: skip
"""Order of a list of jobs. A minus sign stands for descending order."""
NEWEST_FIRST: JobSort = "-submitted"


def _compute_remaining_s(job: Job, now_s: float) -> float | None:
    steps, step_time_s = job.remaining_steps(now_s), job.step_time_s()
    return None if steps is None or step_time_s == math.inf else steps * step_time_s


_TEXT_VALUES: Mapping[str, Callable[[Job], str]] = {
    "name": lambda job: job.spec.name,
    "state": lambda job: job.state.value,
    "queue": lambda job: job.spec.queue,
}
_NUMBER_VALUES: Mapping[str, Callable[[Job, float], float | None]] = {
    "submitted": lambda job, _: job.submitted_at_s,
    "gpus": lambda job, _: job.allocation.target_gpus,
    "progress": lambda job, now_s: job.steps_at(now_s) / job.spec.steps if job.spec.steps else None,
    "remaining": _compute_remaining_s,
    "gpu_time": lambda job, _: job.account.gpu_s,
}


router = create_router("jobs")


@router.get("/jobs")
@requires(VIEWER)
def list_jobs(
    context: ContextDep,
    request: Request,
    job_filter: Annotated[JobFilter, Depends()],
    *,
    sort: Annotated[
        JobSort,
        Query(
            description="Order of the list; a minus sign stands for descending, and unknown values are last. Other "
            f"orders than `-submitted` consider the {ENDED_SORTED_MAX} matching ended jobs that were submitted last."
        ),
    ] = NEWEST_FIRST,
    reasons: Annotated[bool, Query(description="Whether pending jobs have their `pending_reason`.")] = False,
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[JobView]:
    """List jobs, newest first unless `sort` says otherwise, including ended ones. `next` is the cursor of the following
    page."""
    query = job_filter.to_query(context.principal, context.now_s).restrict_to_queues(context.principal.readable_queues)
    live = context.snapshot.jobs.values()
    if sort == NEWEST_FIRST:
        page = page_of_jobs(live, context.store, query, cursor=cursor, limit=limit)
    else:
        found = _find_jobs(live, context.store, query)
        page = _page_of_sorted(sort_jobs(found, sort, context.now_s), sort, cursor=cursor, limit=limit)
    visibility = context.visibility  # shared by all rows because it caches lookups
    items = [job_view(visibility.redact_job(job), context.now_s) for job in page["items"]]
    if reasons:
        _add_reasons(items, context, request)
    return {"items": items, "next": page["next"]}


def _find_jobs(live: Iterable[Job], store: ApiStore, query: JobQuery) -> list[Job]:
    found = {job.id: job for job in live if query.matches(job)}
    if query.includes_ended:
        found |= {job.id: job for job in store.find_ended_jobs(query, after=None, limit=ENDED_SORTED_MAX)}
    return list(found.values())


def sort_jobs(jobs: Iterable[Job], sort: JobSort, now_s: float) -> list[Job]:
    """Return the jobs in the order of `sort`. Jobs with equal values are newest first; unknown values are last."""
    key, is_descending = sort.removeprefix("-"), sort.startswith("-")
    newest_first = sorted(jobs, key=get_job_sort_key, reverse=True)
    if (get_text := _TEXT_VALUES.get(key)) is not None:
        return sorted(newest_first, key=get_text, reverse=is_descending)
    get_number = _NUMBER_VALUES[key]
    numbered = [(job, get_number(job, now_s)) for job in newest_first]
    known = sorted(
        ((job, number) for job, number in numbered if number is not None),
        key=lambda pair: pair[1],
        reverse=is_descending,
    )
    return [*(job for job, _ in known), *(job for job, number in numbered if number is None)]


def _page_of_sorted(jobs: list[Job], sort: JobSort, *, cursor: str, limit: int) -> PageOf[Job]:
    """Return one page by position: a value such as the progress changes while a client turns the pages."""
    noun = f"jobs by {sort}"
    start = decode_number_cursor(cursor, noun) or 0
    end = start + limit
    return {"items": jobs[start:end], "next": encode_cursor(noun, end) if end < len(jobs) else None}


def _add_reasons(items: list[JobView], context: RequestContext, request: Request) -> None:
    waiting = [item for item in items if item["state"] in WAITING_STATES]
    if not waiting:
        return
    cache = request.app.state.pending_reasons
    assert isinstance(cache, PendingReasonCache)
    pending = cache.read(context.committed)
    for item in waiting:
        if (reason := pending.reasons.get(item["id"])) is not None:
            item["pending_reason"] = context.redact(reason_view(reason))
            item["pending_reason_at_s"] = pending.snapshot.now_s
