"""Stage: cancel and suspend jobs at their owners' request, and end jobs that ran too long or can never run."""

from __future__ import annotations

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode, RejectJob, StopJob, SuspendRun
from scheduler.domain.gpu_sets import canonical_gpu_counts
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_records import OOM_ATTEMPTS_MAX
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import LINEAR_CURVE, LinearCurve
from scheduler.scheduling.cycle import SchedulingCycle, StageReport, run_time_deadline_s
from scheduler.scheduling.policies.speed import packed


def apply_user_intents(cycle: SchedulingCycle) -> StageReport:
    """Apply the owners' intents and the limits of each job, and report why planning and suspended jobs wait."""
    waiting: dict[str, Reason] = {}
    for job in cycle.index.sort_by_submission(cycle.index.intent_candidates):
        if job.intent is Intent.CANCEL:
            cycle.apply(StopJob(job.id, cycle.now_s, Reason(ReasonCode.OWNER_ASKED, "cancelled by its owner")))
        elif _exceeds_run_time(cycle, job):
            detail = f"ran for {job.spec.run_time_s_max:.0f} s, its `maxRunTime`"
            cycle.apply(StopJob(job.id, cycle.leave_by_s(job), Reason(ReasonCode.RUN_TIME_EXCEEDED, detail)))
        elif job.intent is Intent.SUSPEND and job.state is not JobState.SUSPENDED:
            reason = Reason(ReasonCode.OWNER_ASKED, "suspended by its owner")
            cycle.apply(SuspendRun(job.id, cycle.leave_by_s(job), reason))
        elif job.state is JobState.QUEUED and (error := _describe_infeasibility(cycle, job)):
            cycle.apply(RejectJob(job.id, _infeasible_reason(job, error)))
        elif job.state is JobState.PLANNING:
            waiting[job.id] = _planning_reason(cycle, job)
        elif job.state is JobState.SUSPENDED:
            waiting[job.id] = Reason(ReasonCode.SUSPENDED, "suspended by its owner")
    return StageReport(waiting)


def _exceeds_run_time(cycle: SchedulingCycle, job: Job) -> bool:
    deadline_s = run_time_deadline_s(job)
    return deadline_s is not None and cycle.now_s >= deadline_s


def _planning_reason(cycle: SchedulingCycle, job: Job) -> Reason:
    """Return why the job is in PLANNING: no node has its GPU model, it backs off, or its plan is not solved yet."""
    placement = job.placement
    if job.missing_secrets:
        names = ", ".join(job.missing_secrets)
        detail = (
            f"needs secrets that were deleted from queue {job.spec.queue}, or cannot be decrypted: {names}. Set them "
            "again, or ask an admin to restore their master key"
        )
        return Reason(ReasonCode.SECRET_MISSING, detail, {"missing_secrets": float(len(job.missing_secrets))})
    if placement.retry_at_s is not None and cycle.now_s < placement.retry_at_s:
        detail = f"{placement.last}; retrying in {placement.retry_at_s - cycle.now_s:.0f} s"
        numbers = {"refusals": float(placement.streak), "retry_at_s": placement.retry_at_s}
        return Reason(ReasonCode.BACKING_OFF, detail, numbers)
    if job.spec.gpu and job.spec.gpu not in cycle.node_sizes:
        return Reason(ReasonCode.NO_MATCHING_FLAVOR, f"no node has {job.spec.gpu} GPUs")
    memory = job.memory
    numbers = {"memory_deaths": float(len(memory.deaths)), "memory_factor": memory.factor} if memory.deaths else {}
    if memory.retry_at_s is not None and cycle.snapshot.original.curve(job).is_count_solved(job.spec.min_gpus):
        pause_s = memory.retry_at_s - cycle.now_s
        detail = f"out of memory (attempt {len(memory.deaths)} of {OOM_ATTEMPTS_MAX}); retrying in {pause_s:.0f} s"
        return Reason(ReasonCode.BACKING_OFF, detail, {**numbers, "retry_at_s": memory.retry_at_s})
    corrected = f" with {memory.factor:.2f} times the predicted memory" if memory.percent > 100 else ""
    minimum = gpu_sets.format_gpu_count(job.spec.min_gpus)
    return Reason(ReasonCode.WAITING_FOR_PLAN, f"waiting for a plan on {minimum}, its minimum{corrected}", numbers)


def _describe_infeasibility(cycle: SchedulingCycle, job: Job) -> str:
    """Return why no count of the job's range can run on any GPU of the fleet, or an empty string if one may."""
    curve = cycle.snapshot.original.curve(job) if job.spec.has_profile else LINEAR_CURVE
    if isinstance(curve, LinearCurve) or not curve.infeasible:
        return ""
    error = ""
    for gpu, size in cycle.node_sizes.items():
        if job.spec.gpu not in ("", gpu):
            continue
        for count in canonical_gpu_counts(job.spec.min_gpus, job.spec.max_gpus, size):
            shape = packed(gpu, count, size)
            if shape not in curve.infeasible:
                return ""
            error = f"no parallel plan is feasible; on {shape}: {curve.infeasible[shape]}"
    return error


def _infeasible_reason(job: Job, error: str) -> Reason:
    memory = job.memory
    if not memory.deaths:
        return Reason(ReasonCode.NO_FEASIBLE_PLAN, error)
    corrected = f"plans count {memory.factor:.2f} times the predicted memory, because the job ran out of memory"
    detail = f"{error}; {corrected}: {memory.deaths[-1]}"
    return Reason(ReasonCode.NO_FEASIBLE_PLAN, detail, {"memory_factor": memory.factor})
