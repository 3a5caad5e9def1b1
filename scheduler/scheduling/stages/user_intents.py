"""Stage of decide: what owners asked of their jobs, and jobs that have no future."""

from __future__ import annotations

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode, RejectJob, StopJob, SuspendRun
from scheduler.domain.gpu_sets import canonical_gpu_counts
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_records import OOM_ATTEMPTS_MAX
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import LINEAR_CURVE, LinearCurve
from scheduler.scheduling.cycle import SchedulingCycle, run_time_deadline_s
from scheduler.scheduling.policies.speed import packed


def apply_user_intents(cycle: SchedulingCycle) -> None:
    """Cancel and suspend what owners asked to; end jobs that ran too long or never can."""
    for job in cycle.snapshot.ledger.sort_by_submission(cycle.snapshot.ledger.intent_candidates):
        if job.intent is Intent.CANCEL:
            cycle.apply(StopJob(job.id, cycle.now_s, Reason(ReasonCode.OWNER_ASKED, "cancelled by its owner")))
        elif _exceeds_run_time(cycle, job):
            detail = f"it has run for its maxRunTime, {job.spec.run_time_s_max:.0f} s"
            cycle.apply(StopJob(job.id, cycle.leave_by_s(job), Reason(ReasonCode.RUN_TIME_EXCEEDED, detail)))
        elif job.intent is Intent.SUSPEND and job.state is not JobState.SUSPENDED:
            reason = Reason(ReasonCode.OWNER_ASKED, "suspended by its owner")
            cycle.apply(SuspendRun(job.id, cycle.leave_by_s(job), reason))
        elif job.state is JobState.QUEUED and (why := _describe_infeasibility(cycle, job)):
            cycle.apply(RejectJob(job.id, _infeasible_reason(job, why)))
        elif job.state is JobState.PLANNING:
            cycle.waiting[job.id] = _planning_reason(cycle, job)
        elif job.state is JobState.SUSPENDED:
            cycle.waiting[job.id] = Reason(ReasonCode.SUSPENDED, "suspended by its owner")


def _exceeds_run_time(cycle: SchedulingCycle, job: Job) -> bool:
    ends_s = run_time_deadline_s(job)
    return ends_s is not None and cycle.now_s >= ends_s


def _planning_reason(cycle: SchedulingCycle, job: Job) -> Reason:
    """A shape is solved for GPUs that the fleet has: without any, the solver is not what the job waits for. Nor is it
    where the job only pauses after a death by memory."""
    if job.spec.gpu and job.spec.gpu not in cycle.node_sizes:
        return Reason(ReasonCode.NO_MATCHING_FLAVOR, f"no node has {job.spec.gpu}")
    memory = job.memory
    numbers = {"memory_deaths": float(len(memory.deaths)), "memory_factor": memory.factor} if memory.deaths else {}
    if memory.retry_at_s is not None and cycle.snapshot.original.curve(job).is_count_solved(job.spec.min_gpus):
        pause_s = memory.retry_at_s - cycle.now_s
        detail = f"it died of memory {len(memory.deaths)} of {OOM_ATTEMPTS_MAX} times and pauses for {pause_s:.0f} s"
        return Reason(ReasonCode.BACKING_OFF, detail, {**numbers, "retry_at_s": memory.retry_at_s})
    thrifty = f" that fits with {memory.factor:.2f} times its predicted memory" if memory.percent > 100 else ""
    detail = f"no plan for its minimum of {gpu_sets.format_gpu_count(job.spec.min_gpus)}{thrifty} is solved yet"
    return Reason(ReasonCode.WAITING_FOR_PLAN, detail, numbers)


def _infeasible_reason(job: Job, why: str) -> Reason:
    memory = job.memory
    if not memory.deaths:
        return Reason(ReasonCode.NO_FEASIBLE_PLAN, why)
    detail = (
        f"{why}; it needs {memory.factor:.2f} times what is predicted, for it died of memory as {memory.deaths[-1]}"
    )
    return Reason(ReasonCode.NO_FEASIBLE_PLAN, detail, {"memory_factor": memory.factor})


def _describe_infeasibility(cycle: SchedulingCycle, job: Job) -> str:
    """Why no count of the job's range can ever run on any GPU of the fleet; empty while one can or may."""
    curve = cycle.snapshot.original.curve(job) if job.spec.has_profile else LINEAR_CURVE
    if isinstance(curve, LinearCurve) or not curve.infeasible:
        return ""
    why = ""
    for gpu, size in cycle.node_sizes.items():
        if job.spec.gpu not in ("", gpu):
            continue
        for count in canonical_gpu_counts(job.spec.min_gpus, job.spec.max_gpus, size):
            shape = packed(gpu, count, size)
            if shape not in curve.infeasible:
                return ""
            why = f"no plan fits, not even {shape}: {curve.infeasible[shape]}"
    return why
