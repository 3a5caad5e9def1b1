"""Verdict: whether a command with a precondition, once sent, was refused after all because somebody was faster.

What the asker saw fitted, or the command would not have been sent; others may have sent theirs meanwhile, through this
process or another. So the inbox is looked at again, in its order, and where a tick was here already, what that told.
"""

from __future__ import annotations

from dataclasses import replace

from api.errors import ProblemError, conflict
from scheduler.core.commands import obey
from scheduler.core.intake import Intake
from scheduler.domain.command import ChangeJob, Command, SubmitJob
from scheduler.domain.event import Event, EventCode
from scheduler.domain.job import JobSpec
from scheduler.domain.snapshot import Snapshot
from scheduler.store.front import AuditEntry, FrontStore
from scheduler.store.protocol import Page

_EVENTS_MAX = 1000
"""Of one subject, between two statements."""


def is_limited(command: Command, snapshot: Snapshot) -> bool:
    """It brings a job into a queue that takes only so many of one user."""
    match command.body:
        case SubmitJob(spec=JobSpec(queue=name)) | ChangeJob(queue=str(name)):
            queue = snapshot.queues.get(name)
            return queue is not None and queue.user_jobs_max is not None
    return False


def send_judged(store: FrontStore, command: Command, *, audit: AuditEntry, limited: bool) -> bool:
    """As the store's `send`, and a problem where it is refused after all: 412 for its basis, 409 for a queue's limit.
    Only one with a basis, or `limited` by a queue, is looked at again."""
    is_watched = bool(command.basis) or limited
    seen = store.newest_event() if is_watched else 0
    is_new = store.send(command, audit=audit)
    if is_new and is_watched and (told := _refusal(store, command, audit.subject, seen)):
        if told.cause == command.id and command.basis:
            raise ProblemError(412, "changed", told.message)
        conflict(told.message)
    return is_new


def _refusal(store: FrontStore, command: Command, subject: str, seen: int) -> Event | None:
    loaded = store.load()
    intake = Intake(replace(loaded.snapshot, now_s=max(command.at_s, loaded.snapshot.now_s)))
    for each in loaded.inbox:
        before = len(intake.events)
        obey(intake, each)
        if each.id == command.id:
            return _refused(intake.events[before:])
    events = [row.event for row in store.events(Page(after=seen, limit=_EVENTS_MAX), subject=subject)]
    return _refused([event for event in events if event.cause == command.id])


def _refused(events: list[Event]) -> Event | None:
    return next((event for event in events if event.code is EventCode.COMMAND_REFUSED), None)
