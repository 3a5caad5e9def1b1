"""Stage of decide: take jobs off nodes that must be left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import inf

from scheduler.core.course import Claim, Course
from scheduler.core.stock import free_soon
from scheduler.core.targets import Target, may_shrink, moved, reduced
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.decision import PreemptJob, ResizeJob
from scheduler.domain.fleet import NodeState
from scheduler.domain.gpus import Gpus
from scheduler.domain.job import Job
from scheduler.domain.ledger import Kind
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.policies.ordering import service_gpu_s
from scheduler.policies.outranking import outranked


def evacuate(course: Course) -> None:
    """Take jobs off nodes that must be left: move to free GPUs, else shrink to the rest, else wait a little for GPUs
    that others elsewhere give up, else preempt."""
    ledger = course.draft.ledger
    leaving = set(ledger.leaving)
    affected = {job_id for node in leaving for job_id in ledger.holders[node].values()}
    stranded: list[Job] = []
    for job in ledger.ordered(affected):
        if job.is_placed and not leaving.isdisjoint(job.allocation.target) and not _evacuate_job(course, job, leaving):
            stranded.append(job)
    if stranded and course.policies.awaits_room:
        soon, ordered = free_soon(course), _least_service_first(course, stranded)
        stranded = [job for job in ordered if not _await_room(course, job, leaving, soon)]
        _outrank(course, stranded, affected, soon)
        stranded = [job for job in stranded if not _await_room(course, job, leaving, soon)]
    for job in stranded:
        course.take(PreemptJob(job.id, course.leave_by_s(job), _leave_reason(course, job, leaving)))


def _least_service_first(course: Course, jobs: Iterable[Job]) -> list[Job]:
    return sorted(jobs, key=lambda job: (service_gpu_s(course.view, job, course.node_sizes), job.id))


def _outrank(course: Course, stranded: Sequence[Job], affected: Collection[str], soon: Counter[Kind]) -> None:
    """Preempt jobs elsewhere that have more to do than those that would have to stop here."""
    able = [job for job in stranded if may_shrink(course, job) and _stays_until_s(course, job) is not None]
    if not able:
        return
    for job_id, takers in outranked(course.view, able, {*affected, *course.touched}, course.settings).items():
        job = course.draft.jobs[job_id]
        detail = f"inference needs nodes back, and {', '.join(takers)} with less to do get its GPUs"
        course.take(PreemptJob(job_id, course.leave_by_s(job), Reason(ReasonCode.OUTRANKED, detail)))
        for name, indices in job.allocation.target.items():
            node = course.view.nodes[name]
            soon[node.gpu, course.view.is_lent(node)] += len(indices)


def _evacuate_job(course: Course, job: Job, leaving: set[str]) -> bool:
    left = gpu_sets.without_nodes(job.allocation.target, leaving)
    target = _moved(course, job, left) or reduced(course, job, left, job.spec.max_gpus)
    if target is None:
        return False
    gpus, plan = target
    course.take(ResizeJob(job.id, gpus, plan, course.leave_by_s(job), _leave_reason(course, job, leaving)))
    course.touched.add(job.id)
    return True


def _await_room(course: Course, job: Job, leaving: set[str], soon: Counter[Kind]) -> bool:
    """Leave a running job where it is while others give up GPUs for it, as long as it could still save in time."""
    latest_s = _stays_until_s(course, job)
    if latest_s is None or not may_shrink(course, job):
        return False
    model, need = course.draft.base.nodes[next(iter(job.allocation.target))].gpu, job.spec.min_gpus
    kinds = [(model, lent) for lent in ((False, True) if job.spec.fungible else (False,))]
    missing = need - gpu_sets.count(gpu_sets.without_nodes(job.allocation.target, leaving))
    if missing > sum(soon[kind] for kind in kinds):
        return False
    course.evacuees[job.id] = (Claim(model, owned_only=not job.spec.fungible), missing)
    for kind in kinds:
        taken = min(soon[kind], missing)
        soon[kind] -= taken
        missing -= taken
    course.touched.add(job.id)
    course.recheck_s = min(course.recheck_s, latest_s)
    return True


def _stays_until_s(course: Course, job: Job) -> float | None:
    """Until when the job can stay and still save in time; None where that is past, or it has to go for another reason
    than a recall."""
    leaving = [name for name in job.allocation.target if name in course.draft.ledger.leaving]
    loans = [course.draft.loans.get(name) for name in leaving]
    deadlines = [loan.return_by_s for loan in loans if loan is not None and loan.return_by_s is not None]
    latest_s = min(deadlines, default=-inf) - course.settings.leave_grace_of(job)
    return latest_s if len(deadlines) == len(leaving) and course.now_s < latest_s else None


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
