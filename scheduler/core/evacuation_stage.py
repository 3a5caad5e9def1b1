"""Stage of decide: take jobs off nodes that must be left."""

from __future__ import annotations

from scheduler.core.course import Course
from scheduler.core.targets import Target, reduced
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.decision import PreemptJob, ResizeJob
from scheduler.domain.fleet import NodeState
from scheduler.domain.gpus import Gpus
from scheduler.domain.job import Job
from scheduler.domain.reason import Reason, ReasonCode


def evacuate(course: Course) -> None:
    """Take jobs off nodes that must be left: shrink to the rest, else move, else preempt."""
    view = course.view
    leaving = {node.name for node in view.nodes.values() if view.must_be_left(node)}
    if not leaving:
        return
    for job in list(course.draft.jobs.values()):
        if job.is_placed and not leaving.isdisjoint(job.allocation.target):
            _evacuate_job(course, job, leaving)


def _evacuate_job(course: Course, job: Job, leaving: set[str]) -> None:
    left = gpu_sets.without_nodes(job.allocation.target, leaving)
    leave_by_s = course.leave_by_s(job)
    reason = _leave_reason(course, job, leaving)
    target = reduced(course, job, left, job.spec.max_gpus) or _topped_up(course, job, left)
    if target is None:
        course.take(PreemptJob(job.id, leave_by_s, reason))
        return
    gpus, plan = target
    course.take(ResizeJob(job.id, gpus, plan, leave_by_s, reason))
    course.touched.add(job.id)


def _topped_up(course: Course, job: Job, left: Gpus) -> Target | None:
    """The GPUs that stay plus enough free ones elsewhere to keep the job at its minimum."""
    missing = job.spec.min_gpus - gpu_sets.count(left)
    if missing <= 0:
        return None
    more = course.policies.place(course.view, course.draft.rooms, job, missing)
    if more is None:
        return None
    gpus = gpu_sets.union(left, more)
    plan = course.plan_for(job, gpus)
    return (gpus, plan) if plan else None


def _leave_reason(course: Course, job: Job, leaving: set[str]) -> Reason:
    nodes = sorted(leaving.intersection(job.allocation.target))
    states = [course.draft.base.nodes[name] for name in nodes]
    if any(node.state is NodeState.DOWN for node in states):
        return Reason(ReasonCode.NODE_DOWN, f"{', '.join(nodes)} went down")
    if any(node.draining for node in states):
        return Reason(ReasonCode.NODE_DRAINED, f"{', '.join(nodes)} is being drained")
    return Reason(ReasonCode.NODE_RECALLED, f"inference needs {', '.join(nodes)} back")
