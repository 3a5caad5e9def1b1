"""GPUs on which a job goes on after a resize whose new workers could not start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import Run, RunPhase
from scheduler.domain.placement_record import PlacementRecord, PodRefusal
from scheduler.scheduling.desired_state import retarget
from scheduler.scheduling.mutable_snapshot import MutableSnapshot

_FAILED_START = "StartFailed"
"""Reason of the refusal that stands for new workers that failed on their own."""


def fall_back(snapshot: MutableSnapshot, job: Job, failed: Run, older: Run | None) -> Job | None:
    """Undo a resize whose new workers could not start, and return the job. None: it has no GPUs to go on with.

    The job keeps the nodes of its target that refused nothing, else the GPUs on which its older workers still run. It
    avoids the nodes that refused it, and pays no retry: its older workers did nothing wrong.

    Args:
        failed: the current run, which has ended and never ran.
        older: the run of an earlier generation that is still alive, or None.
    """
    if job.state is not JobState.RESIZING or job.intent is not Intent.RUN:
        return None
    if failed.refusal is None and older is None:
        return None
    for gpus in _list_candidates(job, failed, older):
        plan = snapshot.original.curve(job).plan_for(snapshot.original.shape_of(gpus)) if gpus else None
        is_in_range = job.spec.min_gpus <= gpu_sets.count(gpus) <= job.spec.max_gpus
        if plan is None or not is_in_range or not _can_stay(snapshot, gpus):
            continue
        allocation = retarget(
            job.allocation,
            gpus,
            plan,
            generation=snapshot.next_generation,
            leave_by_s=_extend_deadline_s(job, snapshot.now_s),
        )
        message = f"{failed.reason}; it goes on with {gpu_sets.count(gpus)} GPUs on {', '.join(sorted(gpus))}"
        placement = _record_refusals(job, failed, gpus, snapshot.now_s)
        resized = job.transition_to(
            JobState.RESIZING, snapshot.now_s, message=message, allocation=allocation, resizes=1
        )
        resized = resized.with_new_plan(job.curve_correction)
        return snapshot.record_transition(job, replace(resized, placement=placement))
    return None


def _list_candidates(job: Job, failed: Run, older: Run | None) -> Iterable[Gpus]:
    if failed.refusal is not None:
        yield gpu_sets.without_nodes(job.allocation.target, (failed.refusal.node,))
    if older is not None:
        yield older.gpus


def _can_stay(snapshot: MutableSnapshot, gpus: Gpus) -> bool:
    view = snapshot.view()
    return all(name in snapshot.nodes and not view.must_vacate(snapshot.nodes[name]) for name in gpus)


def _extend_deadline_s(job: Job, now_s: float) -> float:
    """Return the deadline of the older workers. They get as much time from now on as the resize gave them."""
    leave_by_s = job.allocation.leave_by_s
    return now_s if leave_by_s is None else now_s + max(0.0, leave_by_s - job.state_since_s)


def _record_refusals(job: Job, failed: Run, kept: Gpus, now_s: float) -> PlacementRecord:
    """Return the record of a job that avoids the node that refused it, or all new nodes on which its workers failed."""
    if failed.refusal is not None:
        return job.placement.with_refusal(failed.refusal, now_s)
    placement = job.placement
    if failed.phase is RunPhase.FAILED:
        for name in sorted(job.allocation.target.keys() - kept.keys()):
            placement = placement.with_refusal(PodRefusal(name, _FAILED_START, failed.reason), now_s)
    return placement
