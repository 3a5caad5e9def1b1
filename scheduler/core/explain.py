"""explain: why a job stands where it stands, as one sentence with its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.core.draft import Draft
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.gpu_shape import canonical_counts
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.speed import gpu_model, node_sizes, packed

_BY_QUOTA = (ReasonCode.WAITING_FOR_QUOTA, ReasonCode.EXCEEDS_MAX_QUOTA, ReasonCode.HELD_BY_MINIMUM_RUNTIME)


@dataclass(frozen=True, slots=True)
class Explanation:
    """`reason` is None for a job that has what it wants. `position`: its place in the queue, from 1, where it stands in
    line. `holders`: other jobs and the GPUs they hold, most first.

    `expected_start_s` is when the GPUs that are missing come free if running jobs end as predicted and nobody
    passes; None where that cannot be said. `unblocks` says what would start the job at once.
    """

    job_id: str
    state: JobState
    summary: str
    reason: Reason | None
    position: int | None
    needed_gpus: int
    held_gpus: int
    free_gpus: int
    holders: Mapping[str, int]
    expected_start_s: float | None
    unblocks: str


def explain(snapshot: Snapshot, waiting: Mapping[str, Reason], job_id: str) -> Explanation:
    """Why job `job_id` waits or runs as it does. `waiting` comes from the tick that made `snapshot`.

    Raises:
        KeyError: there is no such job in the snapshot.
    """
    job = snapshot.jobs[job_id]
    free = Draft(snapshot).usable_gpus
    held = {j.id: j.allocation.held_gpus for j in snapshot.jobs.values() if j.id != job_id and j.allocation.held_gpus}
    holders = dict(sorted(held.items(), key=lambda item: (-item[1], item[0])))
    reason = waiting.get(job_id) if not job.is_placed and not job.is_ended else None
    missing = max(0, job.spec.min_gpus - free) if job.state is JobState.QUEUED else 0
    return Explanation(
        job_id=job_id,
        state=job.state,
        summary=_summary(job, reason) + _ceiling(snapshot, job),
        reason=reason,
        position=_position(reason),
        needed_gpus=job.spec.min_gpus,
        held_gpus=job.allocation.held_gpus,
        free_gpus=free,
        holders=holders,
        expected_start_s=_expected_start_s(snapshot, job, reason, missing),
        unblocks=_unblocks(job, reason, missing),
    )


def _position(reason: Reason | None) -> int | None:
    position = reason.numbers.get("position") if reason else None
    return None if position is None else int(position)


def _summary(job: Job, reason: Reason | None) -> str:
    if job.is_placed:
        plan = job.allocation.plan
        plan_text = f" as {plan.summary()}" if plan else ""
        held = gpu_sets.counted(job.allocation.target_gpus)
        return f"{job.state} on {held}, {gpu_sets.text(job.allocation.target)}{plan_text}"
    if reason is not None:
        return f"{job.state}: {reason.detail}"
    return f"{job.state}: {job.message}" if job.message else str(job.state)


def _ceiling(snapshot: Snapshot, job: Job) -> str:
    """Why the job would not gain from the next larger number of GPUs; empty where it would, or nobody knows."""
    sizes, present = node_sizes(snapshot), job.allocation.target_gpus
    gpu = gpu_model(snapshot, job, sizes)
    if not job.is_placed or gpu is None or present >= job.spec.max_gpus:
        return ""
    curve = snapshot.curve(job)
    for count in canonical_counts(present + 1, job.spec.max_gpus, sizes[gpu]):
        shape = packed(gpu, count, sizes[gpu])
        plan, part = curve.plan(shape), curve.better_part(shape, job.spec.min_gpus)
        better = curve.plan(part) if part else None
        if plan and part and better:
            how = "no faster" if plan.iteration_time_s == better.iteration_time_s else "slower"
            return f"; {count} GPUs would be {how} than {part.gpus}"
    return ""


def _expected_start_s(snapshot: Snapshot, job: Job, reason: Reason | None, missing: int) -> float | None:
    """Running jobs end in the order of their remaining time; the job starts when they have freed enough. Where a quota
    stands against it, when minimum run times end that hold its queue's GPUs, if it is that."""
    if reason is not None and reason.code in _BY_QUOTA:
        return reason.numbers.get("held_until_s")
    if job.state is not JobState.QUEUED or not missing:
        return snapshot.now_s if job.state is JobState.QUEUED else None
    ends = sorted(
        (snapshot.now_s + remaining * other.step_time_s(), other.allocation.target_gpus)
        for other in snapshot.jobs.values()
        if other.state is JobState.RUNNING and (remaining := other.remaining_steps(snapshot.now_s)) is not None
    )
    for end_s, gpus in ends:
        missing -= gpus
        if missing <= 0:
            return end_s
    return None


def _unblocks(job: Job, reason: Reason | None, missing: int) -> str:
    if reason is None:
        return ""
    match reason.code:
        case ReasonCode.WAITING_FOR_PLAN:
            return "the solver's answer for its shape"
        case ReasonCode.SUSPENDED:
            return "resume it"
        case ReasonCode.WAITING_FOR_RELEASE:
            return "running jobs saving and leaving the GPUs that were taken back for it"
        case ReasonCode.TOPOLOGY:
            return "free GPUs that lie closer together, or another range of GPUs"
        case ReasonCode.NO_MATCHING_FLAVOR:
            return f"{job.spec.min_gpus} free GPUs of a kind that it may use"
        case ReasonCode.WAITING_FOR_QUOTA:
            return f"the end of other jobs of queue {job.spec.queue}, or a higher limit for it"
        case ReasonCode.EXCEEDS_MAX_QUOTA:
            return f"a limit of {job.spec.min_gpus} GPUs for queue {job.spec.queue}, or a smaller gpus.min"
        case ReasonCode.HELD_BY_MINIMUM_RUNTIME:
            return f"the end of the minimum run time of those who borrow GPUs of queue {job.spec.queue}"
        case ReasonCode.BEHIND_HEAD:
            return "the start of the job at the head of the queue"
    return f"{missing} more free GPUs, or a smaller gpus.min"
