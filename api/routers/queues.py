"""Queues: declare, list, look at, change, delete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TypeVar

from fastapi import Response

from api.answers.page import PageOf
from api.answers.queue import QueueView, queue_view
from api.dependencies import Limit, WorldDep
from api.errors import conflict, not_found
from api.identity.principal import Role
from api.paging import Cursor, page_by_name
from api.preconditions import IfMatch, put_tag, require_match
from api.problems import problems
from api.routing import noun_router
from api.world import World
from scheduler.core.preconditions import queue_tag
from scheduler.documents import job_queue
from scheduler.documents.job_queue import QueueDocument, QuotaDocument
from scheduler.documents.refusal import Refusal
from scheduler.domain.command import ChangeQueue, CreateQueue, DeleteQueue
from scheduler.domain.job_queue import JobQueue
from scheduler.policies.quota import queue_uses

Q = TypeVar("Q")
router = noun_router("queues")


@router.post("/queues", status_code=201, responses=problems(409))
def create_queue(document: QueueDocument, world: WorldDep, response: Response) -> QueueView:
    """Declare a queue. The same queue again answers 200 and changes nothing; another of its name is refused."""
    queue = job_queue.job_queue(document)
    present = world.snapshot.queues.get(queue.name)
    if present is not None:
        _refuse_difference(present, queue)
        response.status_code = 200
        return _told(world, queue.name, response)
    response.headers["Location"] = f"/v1/queues/{queue.name}"
    return _told(world.send(CreateQueue(queue)), queue.name, response)


@router.get("/queues")
def list_queues(world: WorldDep, limit: Limit = 100, cursor: Cursor = "") -> PageOf[QueueView]:
    """The declared queues, and those that live jobs name, by name; of them those that one may read."""
    return page_by_name("queues", _visible(world, queue_uses(world.snapshot)), queue_view, cursor=cursor, limit=limit)


@router.get("/queues/{name}")
def get_queue(name: str, world: WorldDep, response: Response) -> QueueView:
    """What the queue is given, and what it uses, borrows and waits for."""
    return _told(world, name, response)


@router.patch("/queues/{name}", status_code=202)
def change_queue(
    name: str, change: QuotaDocument, world: WorldDep, response: Response, if_match: IfMatch = ""
) -> QueueView:
    """Change what is given; a limit of null is none. A lower limit stops growth and starts, and ends nothing."""
    queue = _declared(world, name)
    basis = require_match(if_match, queue_tag(queue), f"queue {name}")
    changed = job_queue.changed_queue(queue, change)
    return _told(world.send(ChangeQueue(changed), basis=basis), name, response)


@router.delete("/queues/{name}", status_code=202)
def delete_queue(name: str, world: WorldDep, if_match: IfMatch = "") -> QueueView:
    """Take the declaration back. The queue's jobs stay, without guarantee and without limit."""
    basis = require_match(if_match, queue_tag(_declared(world, name)), f"queue {name}")
    view = _view(world, name)
    world.send(DeleteQueue(name), basis=basis)
    return view


def _visible(world: World, queues: Mapping[str, Q]) -> dict[str, Q]:
    return {name: queue for name, queue in queues.items() if world.principal.may(Role.VIEWER, name)}


def _declared(world: World, name: str) -> JobQueue:
    declared = _visible(world, world.snapshot.queues)
    return declared.get(name) or not_found("declared queue", name, declared)


def _told(world: World, name: str, response: Response) -> QueueView:
    view = _view(world, name)
    put_tag(response, queue_tag(world.snapshot.queues.get(name) or JobQueue(name)))
    return view


def _view(world: World, name: str) -> QueueView:
    uses = _visible(world, queue_uses(world.snapshot))
    use = uses.get(name)
    return queue_view(use) if use is not None else not_found("queue", name, uses)


def _refuse_difference(present: JobQueue, wanted: JobQueue) -> None:
    refusals = [
        Refusal(field.name, getattr(wanted, field.name), f"{getattr(present, field.name)}, as it was declared")
        for field in fields(JobQueue)
        if getattr(present, field.name) != getattr(wanted, field.name)
    ]
    if refusals:
        names = ", ".join(refusal.field for refusal in refusals)
        conflict(f"queue {present.name} is declared with another {names}; change it with PATCH", *refusals)
