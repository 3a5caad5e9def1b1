"""Rules of queues for jobs that enter them: existence, jobs per owner, and priority."""

from __future__ import annotations

from api.http.errors import ProblemError, raise_conflict, raise_invalid_field
from api.identity.principals import Principal, Role
from api.state import RequestContext
from scheduler.documents.document import InvalidField
from scheduler.domain.job import Job
from scheduler.domain.job_queue import describe_existing_queues, find_priority_ceiling, is_existing_queue
from scheduler.domain.job_spec import JobSpec
from scheduler.scheduling.preconditions import user_job_limit_error


def check_submission(spec: JobSpec, context: RequestContext, *, undeclared_queues: str) -> None:
    """Check that the job's queue accepts the job as the caller's.

    Raises:
        InvalidDocumentError: the queue does not exist, and `undeclared_queues` is "refuse".
        ProblemError: 403 if the priority is above the queue's ceiling and the caller lacks the role for it; 409 if the
            caller has as many jobs in the queue as it allows.
    """
    principal = context.principal
    check_queue(
        spec.queue, context, owner=principal.name, owner_key=principal.subject, undeclared_queues=undeclared_queues
    )
    check_priority(principal, spec.queue, spec.priority, context)


def check_queue(name: str, context: RequestContext, *, owner: str, owner_key: str, undeclared_queues: str) -> None:
    """Check that the queue accepts a job of this owner.

    Raises:
        InvalidDocumentError: the queue does not exist, and `undeclared_queues` is "refuse".
        ProblemError: 409 if the owner has as many jobs in the queue as it allows.
    """
    queues = context.snapshot.queues
    if undeclared_queues == "refuse" and not is_existing_queue(name, queues):
        visible = [queue for queue in queues if context.principal.has_role(Role.VIEWER, queue)]
        raise_invalid_field("queue", name, describe_existing_queues(name, visible))
    if why := user_job_limit_error(context.snapshot.jobs, queues, name, owner, owner_key=owner_key):
        raise_conflict(why)


def check_change(job: Job, *, queue: str | None, priority: int | None, context: RequestContext) -> None:
    """Check the priority that a change gives a job. Lowering it within its queue is always permitted.

    Raises:
        ProblemError: 403 if the priority is above the queue's ceiling and the caller lacks the role for it.
    """
    new_queue = job.spec.queue if queue is None else queue
    new_priority = job.spec.priority if priority is None else priority
    if new_queue != job.spec.queue or new_priority > job.spec.priority:
        check_priority(context.principal, new_queue, new_priority, context)


def check_priority(principal: Principal, queue: str, priority: int, context: RequestContext) -> None:
    """Check that the principal may give a job in this queue the priority. The ceiling of `default` applies to a queue
    that was not created, as its limits do.

    Raises:
        ProblemError: 403 if the priority is above the ceiling and the principal is no queue-admin where it is set.
    """
    limiting, ceiling = find_priority_ceiling(queue, context.snapshot.queues)
    if priority <= ceiling or principal.has_role(Role.QUEUE_ADMIN, limiting):
        return
    allowed = (
        f"at most {ceiling}, the ceiling of queue {limiting}; a higher one needs the role queue-admin on {limiting}"
    )
    invalid = InvalidField("priority", priority, allowed)
    raise ProblemError(403, "forbidden", invalid.message, (invalid,))
