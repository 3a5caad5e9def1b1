"""Who may ask for which change. Every command of a request passes here before it is sent."""

from __future__ import annotations

from typing import NoReturn

from api.errors import ProblemError
from api.identity.principal import Principal, Role
from scheduler.domain.command import (
    CancelJob,
    ChangeJob,
    ChangeQueue,
    CheckpointJob,
    CommandBody,
    ResumeJob,
    ScaleJob,
    SubmitJob,
    SuspendJob,
)
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot


def permit(principal: Principal, body: CommandBody, snapshot: Snapshot) -> None:
    """Raises a 403 problem for who may not ask for this. Jobs named in `body` are known to be visible."""
    match body:
        case SubmitJob(spec=spec):
            require(principal, Role.SUBMITTER, spec.queue)
        case CancelJob(job_id) | SuspendJob(job_id) | ResumeJob(job_id) | ScaleJob(job_id) | CheckpointJob(job_id):
            permit_job(principal, snapshot.jobs[job_id])
        case ChangeJob(job_id, queue=queue):
            permit_job(principal, snapshot.jobs[job_id])
            if queue is not None:
                require(principal, Role.SUBMITTER, queue)
        case ChangeQueue(queue):
            require(principal, Role.QUEUE_ADMIN, queue.name)
        case _:
            require(principal, Role.ADMIN)


def permit_job(principal: Principal, job: Job) -> None:
    """Raises a 403 problem for who may not change this job: submitters change their own, queue-admins all."""
    queue = job.spec.queue
    owns = job.owner == principal.name and principal.may(Role.SUBMITTER, queue)
    if not owns and not principal.may(Role.QUEUE_ADMIN, queue):
        _forbid(principal, Role.QUEUE_ADMIN, queue, f"; job {job.id} is {job.owner or 'nobody'}'s")


def require(principal: Principal, role: Role, queue: str = "") -> None:
    """Raises a 403 problem for who does not have `role` on `queue` (everywhere where it is empty)."""
    if not principal.may(role, queue):
        _forbid(principal, role, queue)


def _forbid(principal: Principal, role: Role, queue: str, more: str = "") -> NoReturn:
    where = f" on queue {queue}" if queue else ""
    raise ProblemError(403, "forbidden", f"this needs the role {role.label}{where}; you are {principal}{more}")
