"""Queues: create, list, get, change, delete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, TypeVar, cast

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from api.http.conditional_requests import IfMatchHeader, repeated_creation, require_match, set_etag
from api.http.dependencies import ContextDep, LimitParameter, QueueNamePath, create_router
from api.http.errors import problem_responses, raise_conflict, raise_not_found
from api.http.paging import CursorParameter, PageOf, page_by_name
from api.identity.audit import declare_audited
from api.identity.authorization import ADMIN, QUEUE_ADMIN, VIEWER, requires
from api.identity.principals import Role
from api.state import RequestContext
from scheduler.documents.document import InvalidField
from scheduler.documents.queue import QueueDocument, QuotaDocument, apply_queue_change, to_job_queue
from scheduler.domain.commands import ChangeQueue, CreateQueue, DeleteQueue
from scheduler.domain.job_queue import QUOTA_FIELDS, JobQueue
from scheduler.scheduling.policies.quota import QueueUsage, compute_queue_usage
from scheduler.scheduling.preconditions import queue_etag


class QueueView(TypedDict):
    """A queue with its quota and usage. `own_gpus` + `borrowed_gpus` = `used_gpus`."""

    name: Annotated[str, Field(description="Label that jobs refer to.")]
    guaranteed_gpus: Annotated[int, Field(description=QUOTA_FIELDS["guaranteed_gpus"].description)]
    limit_gpus: Annotated[int | None, Field(description=QUOTA_FIELDS["limit_gpus"].description)]
    user_limit_gpus: Annotated[int | None, Field(description=QUOTA_FIELDS["user_limit_gpus"].description)]
    user_jobs_max: Annotated[int | None, Field(description=QUOTA_FIELDS["user_jobs_max"].description)]
    weight: Annotated[float, Field(description=QUOTA_FIELDS["weight"].description)]
    priority_max: Annotated[int, Field(description=QUOTA_FIELDS["priority_max"].description)]
    declared: Annotated[
        bool,
        Field(description="Whether the queue was created. Otherwise live jobs name it, and it has the default quota."),
    ]
    used_gpus: Annotated[int, Field(description="Number of GPUs allocated to its running jobs.")]
    own_gpus: Annotated[int, Field(description="Number of allocated GPUs within the guarantee.")]
    borrowed_gpus: Annotated[int, Field(description="Number of allocated GPUs above the guarantee.")]
    running_jobs: Annotated[int, Field(description="Number of jobs that are starting, running or resizing.")]
    waiting_jobs: Annotated[int, Field(description="Number of pending jobs.")]
    waiting_gpus: Annotated[int, Field(description="Sum of the minimums of pending jobs, in GPUs.")]


def queue_view(usage: QueueUsage) -> QueueView:
    view = {
        "name": usage.queue.name,
        **usage.queue.quota,
        "declared": usage.is_declared,
        "used_gpus": usage.used_gpus,
        "own_gpus": usage.own_gpus,
        "borrowed_gpus": usage.borrowed_gpus,
        "running_jobs": usage.running_jobs,
        "waiting_jobs": usage.waiting_jobs,
        "waiting_gpus": usage.waiting_gpus,
    }
    return cast("QueueView", view)


Q = TypeVar("Q")
router = create_router("queues")


@router.post("/queues", status_code=201, responses=repeated_creation(QueueView) | problem_responses(409))
@requires(ADMIN)
def create_queue(document: QueueDocument, context: ContextDep, response: Response) -> QueueView:
    """Declare a queue. Repeating the request returns 200 and changes nothing; a different queue of that name is a
    conflict."""
    queue = to_job_queue(document)
    existing = context.snapshot.queues.get(queue.name)
    if existing is not None:
        _refuse_difference(existing, queue)
        declare_audited()
        response.status_code = 200
        return _queue_response(context, queue.name, response)
    response.headers["Location"] = f"/v1/queues/{queue.name}"
    return _queue_response(context.send(CreateQueue(queue)), queue.name, response)


@router.get("/queues")
@requires(VIEWER)
def list_queues(context: ContextDep, limit: LimitParameter = 100, cursor: CursorParameter = "") -> PageOf[QueueView]:
    """List declared queues and queues that live jobs name, by name. Callers see only queues they may read."""
    return page_by_name(
        "queues",
        _visible_queues(context, compute_queue_usage(context.snapshot)),
        queue_view,
        cursor=cursor,
        limit=limit,
    )


@router.get("/queues/{name}")
@requires(VIEWER)
def get_queue(name: QueueNamePath, context: ContextDep, response: Response) -> QueueView:
    """Return the queue's quota, and its used, borrowed and pending GPUs."""
    return _queue_response(context, name, response)


@router.patch("/queues/{name}", status_code=202)
@requires(QUEUE_ADMIN)
def change_queue(
    name: QueueNamePath, change: QuotaDocument, context: ContextDep, response: Response, if_match: IfMatchHeader = ""
) -> QueueView:
    """Change the quota; null removes a limit. A lower limit stops starts and growth but ends no job. Queue-admins may
    lower `guaranteed_gpus`, `limit_gpus`, `weight` and `priority_max`, but only admins raise them."""
    queue = _get_declared_queue(context, name)
    basis = require_match(if_match, queue_etag(queue), f"queue {name}")
    if not context.principal.has_role(Role.ADMIN):
        basis = queue_etag(queue)  # so that this command cannot undo a lower quota that an admin sets meanwhile
    changed = apply_queue_change(queue, change)
    return _queue_response(context.send(ChangeQueue(changed), basis=basis), name, response)


@router.delete("/queues/{name}", status_code=202)
@requires(ADMIN)
def delete_queue(name: QueueNamePath, context: ContextDep, if_match: IfMatchHeader = "") -> QueueView:
    """Delete the declaration. The queue's jobs stay, without its guarantee and under the limits of `default`."""
    basis = require_match(if_match, queue_etag(_get_declared_queue(context, name)), f"queue {name}")
    view = _visible_queue_view(context, name)
    context.send(DeleteQueue(name), basis=basis)
    return view


def _visible_queues(context: RequestContext, queues: Mapping[str, Q]) -> dict[str, Q]:
    return {name: queue for name, queue in queues.items() if context.principal.has_role(Role.VIEWER, name)}


def _get_declared_queue(context: RequestContext, name: str) -> JobQueue:
    declared = _visible_queues(context, context.snapshot.queues)
    return declared.get(name) or raise_not_found("declared queue", name, declared)


def _queue_response(context: RequestContext, name: str, response: Response) -> QueueView:
    view = _visible_queue_view(context, name)
    set_etag(response, queue_etag(context.snapshot.queues.get(name) or JobQueue(name)))
    return view


def _visible_queue_view(context: RequestContext, name: str) -> QueueView:
    uses = _visible_queues(context, compute_queue_usage(context.snapshot))
    use = uses.get(name)
    return queue_view(use) if use is not None else raise_not_found("queue", name, uses)


def _refuse_difference(existing: JobQueue, requested: JobQueue) -> None:
    refusals = [
        InvalidField(field.name, getattr(requested, field.name), f"{getattr(existing, field.name)}, as it was declared")
        for field in fields(JobQueue)
        if getattr(existing, field.name) != getattr(requested, field.name)
    ]
    if refusals:
        names = ", ".join(refusal.field for refusal in refusals)
        raise_conflict(f"queue {existing.name} exists with another {names}. Change it with PATCH", *refusals)
