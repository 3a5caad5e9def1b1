"""Allocations over time: which job held which GPUs of a node, from when to when."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import ContextDep, LimitParameter, create_router
from api.http.errors import raise_invalid_field
from api.http.paging import TEXT_PATTERN, CursorParameter, PageOf, PoolParameter, decode_number_cursor, encode_cursor
from api.http.time_parameters import TIME_FORMS, parse_time
from api.identity.authorization import HIDDEN_JOB, VIEWER, requires
from api.identity.principals import Principal, Role
from scheduler.domain.allocation_span import SpanEnd
from scheduler.store.allocation_history import SpanQuery, StoredSpan

DAY_S = 86_400
DAYS_MAX = 31
_TIME = "in seconds since 1970 (UTC)"
_NOUN = "allocations"


class AllocationSpanView(TypedDict):
    """GPUs of one host that a job held without a change. Callers without access to its queue do not see the job."""

    number: Annotated[int, Field(description="Position in the list. Later spans have higher numbers.")]
    job_id: Annotated[str, Field(description="Job that held the GPUs.")]
    name: Annotated[str | None, Field(description="Name of the job. Null: hidden from the caller.")]
    queue: Annotated[str | None, Field(description="Queue of the job. Null: hidden from the caller.")]
    owner: Annotated[str | None, Field(description="Display name of the job's owner. Null: hidden from the caller.")]
    model: Annotated[
        str | None, Field(description="Model that the job trains. Empty: not stated. Null: hidden from the caller.")
    ]
    generation: Annotated[
        int | None, Field(description="Generation of the job that ran there. Null: hidden from the caller.")
    ]
    node: Annotated[str, Field(description="Name of the host.")]
    pool: Annotated[str, Field(description="Pool that owns the host.")]
    gpu: Annotated[str, Field(description="Profile name of the GPU model, such as `h100-80g`.")]
    gpus: Annotated[list[int], Field(description="Indices of the GPUs, ascending.")]
    is_lent: Annotated[bool, Field(description="Whether the host was on loan from an inference pool.")]
    begin_s: Annotated[float, Field(description=f"When the job received the GPUs, {_TIME}.")]
    end_s: Annotated[float | None, Field(description=f"When they were free or changed, {_TIME}. Null: still held.")]
    end: Annotated[
        SpanEnd | None,
        Field(
            description="`resized`, `recalled` by inference, `preempted`, `suspended`, `node_down`, `failed`, "
            "`succeeded` or `cancelled`. Null: still held."
        ),
    ]


def span_view(stored: StoredSpan, principal: Principal) -> AllocationSpanView:
    """Return the span as the principal may see it."""
    span, is_visible = stored.span, principal.has_role(Role.VIEWER, stored.span.queue)
    return {
        "number": stored.number,
        "job_id": span.job_id if is_visible else HIDDEN_JOB,
        "name": span.name if is_visible else None,
        "queue": span.queue if is_visible else None,
        "owner": span.owner if is_visible else None,
        "model": span.model if is_visible else None,
        "generation": span.generation if is_visible else None,
        "node": span.node,
        "pool": span.pool,
        "gpu": span.gpu,
        "gpus": list(span.gpus),
        "is_lent": span.is_lent,
        "begin_s": span.begin_s,
        "end_s": span.end_s,
        "end": span.end,
    }


router = create_router("fleet")

TextParameter = Annotated[str, Query(max_length=300, pattern=TEXT_PATTERN)]


@router.get("/allocations")
@requires(VIEWER)
def list_allocations(
    context: ContextDep,
    *,
    since: Annotated[
        str, Query(alias="from", max_length=40, description=f"{TIME_FORMS}. Default: one day before `to`.")
    ] = "",
    until: Annotated[str, Query(alias="to", max_length=40, description=f"{TIME_FORMS}. Default: now.")] = "",
    pool: PoolParameter = "",
    queue: Annotated[TextParameter, Query(description="Only allocations of jobs of this queue. Empty: all.")] = "",
    job: Annotated[TextParameter, Query(description="Only allocations of the job with this id. Empty: all.")] = "",
    node: Annotated[TextParameter, Query(description="Only allocations on this host. Empty: all.")] = "",
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[AllocationSpanView]:
    """List which job held which GPUs of a host at any time between `from` and `to`, the newest allocation first."""
    to_s = parse_time("to", until, context.now_s)
    from_s = parse_time("from", since, max(0.0, to_s - DAY_S))
    if not from_s <= to_s <= from_s + DAYS_MAX * DAY_S:
        raise_invalid_field("from", since, f"at or before `to`, and at most {DAYS_MAX} days before it")
    before = decode_number_cursor(cursor, _NOUN)
    query = SpanQuery(from_s, to_s, pool, node, job, frozenset((queue,)) if queue else None)
    principal = context.principal
    rows = context.store.allocations.find_spans(query, before=before, limit=limit + 1)
    # A filter by job or queue must not reveal where the jobs of hidden queues ran.
    names_jobs = bool(queue or job)
    items = [row for row in rows[:limit] if not names_jobs or principal.has_role(Role.VIEWER, row.span.queue)]
    return {
        "items": [span_view(row, principal) for row in items],
        "next": encode_cursor(_NOUN, rows[limit - 1].number) if len(rows) > limit else None,
    }
