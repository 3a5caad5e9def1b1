"""Stage of decide: take jobs off nodes that must be left."""

from __future__ import annotations

from scheduler.core.course import Course
from scheduler.core.targets import Target, moved, reduced
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.decision import PreemptJob, ResizeJob
from scheduler.domain.fleet import NodeState
from scheduler.domain.gpus import Gpus
from scheduler.domain.job import Job
from scheduler.domain.reason import Reason, ReasonCode


def evacuate(course: Course) -> None:
    """Take jobs off nodes that must be left: move to free GPUs, else shrink to the rest, else preempt."""
    ledger = course.draft.ledger
    leaving = set(ledger.leaving)
    affected = {job_id for node in leaving for job_id in ledger.holders[node].values()}
    for job in ledger.ordered(affected):
        if job.is_placed and not leaving.isdisjoint(job.allocation.target):
            _evacuate_job(course, job, leaving)


def _evacuate_job(course: Course, job: Job, leaving: set[str]) -> None:
    left = gpu_sets.without_nodes(job.allocation.target, leaving)
    leave_by_s = course.leave_by_s(job)
    reason = _leave_reason(course, job, leaving)
    target = _moved(course, job, left) or reduced(course, job, left, job.spec.max_gpus)
    if target is None:
        course.take(PreemptJob(job.id, leave_by_s, reason))
        return
    gpus, plan = target
    course.take(ResizeJob(job.id, gpus, plan, leave_by_s, reason))
    course.touched.add(job.id)


def _moved(course: Course, job: Job, left: Gpus) -> Target | None:
    """The GPUs that stay, and free ones elsewhere for those that do not: as many as the job has, so that it is
    disturbed once and need not grow again; only enough for its minimum while others wait for GPUs."""
    most = job.allocation.target_gpus
    if course.draft.ledger.waiting:
        most = min(most, job.spec.min_gpus)
    return moved(course, job, left, course.draft.rooms, most=most, least=job.spec.min_gpus)


def _leave_reason(course: Course, job: Job, leaving: set[str]) -> Reason:
    nodes = sorted(leaving.intersection(job.allocation.target))
    states = [course.draft.base.nodes[name] for name in nodes]
    if any(node.state is NodeState.DOWN for node in states):
        return Reason(ReasonCode.NODE_DOWN, f"{', '.join(nodes)} went down")
    if any(node.draining for node in states):
        return Reason(ReasonCode.NODE_DRAINED, f"{', '.join(nodes)} is being drained")
    return Reason(ReasonCode.NODE_RECALLED, f"inference needs {', '.join(nodes)} back")
