"""Ends of runs: a job completes, retries, rolls back, fails, or looks for a plan with less memory."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.events import EventCode
from scheduler.domain.job import Job
from scheduler.domain.job_account import PermanentFault, RunFailure
from scheduler.domain.job_records import OOM_ATTEMPTS_MAX, MemoryRecord, OomFailure
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import FailureCause, Run, RunPhase
from scheduler.domain.placement_record import PodRefusal
from scheduler.plan_export.frameworks import FRAMEWORKS
from scheduler.scheduling.desired_state import release_gpus
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.run_measurements import latest_loss, record_script_checkpoint, with_usage

FAILED_AT_ONCE_S = 2.0
"""Two failures in a row with the same message are not retried if both runs were shorter than this."""


def complete_job(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    now_s, generation = snapshot.now_s, snapshot.next_generation
    ended = release_gpus(job, JobState.SUCCEEDED, now_s, generation=generation, leave_by_s=now_s)
    steps = run.steps if run.steps is not None else float(job.spec.steps)
    progress = replace(with_usage(ended.progress, run), steps=steps, loss=latest_loss(ended, run))
    progress = replace(progress, is_reported=progress.is_reported or run.steps is not None)
    return snapshot.record_transition(job, replace(ended, progress=progress))


def retry_or_fail(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Give up a failed run. The job fails if a retry cannot succeed, or if none is left."""
    reason, fault = _explain_missing_framework(job, run.reason or "its workers failed"), run.permanent_fault
    if fault is None and _repeats_last_failure(job, run, reason):
        fault = PermanentFault.REPEATED_FAILURE
    message = reason if fault is None else f"not retried ({fault}): {reason}"
    cause = fault or run.cause
    failed = _with_failure(snapshot, job, run, reason, code="" if cause is None else cause.value)
    if run.cause is FailureCause.HANG:
        snapshot.record_event(EventCode.JOB_HUNG, job.id, reason)
    return requeue(snapshot, failed, message, counts_as_retry=True, may_retry=fault is None)


def _explain_missing_framework(job: Job, reason: str) -> str:
    """Return the reason of a failed run. If it is a missing module of the job's framework, say so first."""
    framework = FRAMEWORKS.get(job.spec.framework)
    if framework is None or f"No module named '{framework.module.partition('.')[0]}" not in reason:
        return reason
    return (
        f"framework is {framework.name}, but {framework.title} is not installed where the command runs "
        f"(venv, setup or image): {reason}"
    )


def _with_failure(snapshot: MutableSnapshot, job: Job, run: Run, reason: str, *, code: str) -> Job:
    return replace(job, failure=RunFailure(snapshot.now_s, reason, code, run.ran_s))


def _repeats_last_failure(job: Job, run: Run, reason: str) -> bool:
    """Return whether this run and the one before it both failed at once, with the same message."""
    last = job.failure
    if last is None or last.reason != reason or last.ran_s is None or run.ran_s is None:
        return False
    return max(last.ran_s, run.ran_s) < FAILED_AT_ONCE_S


def requeue(
    snapshot: MutableSnapshot,
    job: Job,
    message: str,
    *,
    counts_as_retry: bool,
    may_retry: bool = True,
    keeps_deadline: bool = False,
) -> Job:
    """Give up the job's current run. A failure that counts as a retry fails the job when no retry is left.

    With `keeps_deadline`, workers of an earlier generation still have their time to save and exit.
    """
    failures = job.account.failures + (1 if counts_as_retry else 0)
    state = JobState.QUEUED if may_retry and failures <= job.spec.retries else JobState.FAILED
    now_s, generation, leave_by_s = snapshot.now_s, snapshot.next_generation, job.allocation.leave_by_s
    leave_by_s = leave_by_s if keeps_deadline and leave_by_s is not None else now_s
    requeued = release_gpus(job, state, now_s, generation=generation, leave_by_s=leave_by_s, message=message)
    return snapshot.record_transition(job, replace(requeued, account=replace(requeued.account, failures=failures)))


def requeue_refused(snapshot: MutableSnapshot, job: Job, refusal: PodRefusal, *, keeps_deadline: bool) -> Job:
    """Give up a start that a node refused. The job backs off and avoids the node. Repeated refusals cost retries."""
    placement = job.placement.with_refusal(refusal, snapshot.now_s)
    job, costs_retry = replace(job, placement=placement), placement.costs_retry
    return requeue(snapshot, job, str(refusal), counts_as_retry=costs_retry, keeps_deadline=keeps_deadline)


def roll_back(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Set the job back to the last checkpoint of a run that is gone, and count the work done since as lost.

    The run reached the steps that it reported, else those that its curve predicts. Lost GPU-seconds are the lost steps
    times the job's average cost of a step so far, work lost earlier excluded. A job that never reported loses all.
    """
    if run.phase is not RunPhase.FAILED and job.failure is not None and job.failure.ran_s is not None:
        job = replace(job, failure=replace(job.failure, ran_s=None))  # the next failure is not in a row with this one
        snapshot.put_job(job)
    recorded = record_script_checkpoint(job, run)
    if recorded is not job:
        job = recorded
        snapshot.put_job(job)
    settled = job.advance_to(snapshot.now_s)
    is_reported = settled.has_reported or run.steps is not None
    kept = run.checkpoint_steps if run.checkpoint_steps is not None else settled.progress.checkpoint_steps
    reached = settled.progress.steps if run.steps is None else run.steps
    is_current = job.is_placed and run.generation == job.allocation.generation
    is_rolled_back = kept == job.progress.steps == job.progress.checkpoint_steps and job.state is not JobState.RUNNING
    if is_rolled_back and (is_reported or not is_current):
        return job
    lost_steps, account = max(0.0, reached - kept), settled.account
    lost_share = lost_steps / reached if reached else 0.0
    is_known = is_reported or kept or run.checkpoint_at_s is not None
    lost_gpu_s = (account.gpu_s - account.lost_gpu_s) * (lost_share if is_known else 1.0)
    progress = replace(settled.progress, steps=kept, checkpoint_steps=kept, checkpoint_at_s=snapshot.now_s)
    progress = replace(progress, is_reported=is_reported)
    account = replace(account, lost_gpu_s=account.lost_gpu_s + lost_gpu_s)
    rolled_back = replace(settled, progress=progress, account=account)
    snapshot.put_job(rolled_back)
    if lost_steps or (lost_gpu_s and not is_reported):
        _record_lost_work(snapshot, rolled_back, run, lost_steps=lost_steps, lost_gpu_s=lost_gpu_s)
    return rolled_back


def _record_lost_work(snapshot: MutableSnapshot, job: Job, run: Run, *, lost_steps: float, lost_gpu_s: float) -> None:
    """Record the event. Steps that were never reported are not named: only the GPU time is known."""
    kept, numbers = job.progress.checkpoint_steps, {"gpu_s": lost_gpu_s}
    if job.progress.is_reported:
        numbers["steps"] = lost_steps
        message = f"lost {lost_steps:.0f} steps since the last checkpoint"
    else:
        message = f"lost {lost_gpu_s / 3600.0:.2f} GPU-hours of work without reported progress"
    if not kept:
        message += "; a restart begins at step 0"
    message = f"{message}: {run.reason or run.phase}"
    numbers["restart_step"] = kept
    snapshot.record_event(EventCode.JOB_LOST_WORK, job.id, message, numbers, cause=(run.cause or run.phase).value)


def replan_after_out_of_memory(snapshot: MutableSnapshot, job: Job, run: Run) -> Job:
    """Back off after an out-of-memory failure; after `OOM_ATTEMPTS_MAX` of them the job fails.

    The job waits in PLANNING until a plan is solved that fits with the corrected memory. No retry is used up. It also
    switches to its next curve: with the new correction no curve is solved, so the old one has no advantage.
    """
    job = _with_failure(snapshot, job, run, run.reason or "out of memory", code=FailureCause.OUT_OF_MEMORY.value)
    memory = job.memory.with_failure(_build_oom_failure(snapshot, job, run), snapshot.now_s)
    state = JobState.FAILED if memory.is_exhausted else JobState.PLANNING
    now_s, generation = snapshot.now_s, snapshot.next_generation
    message = _describe_oom_failure(memory) if memory.is_exhausted else _describe_oom_retry(memory, now_s)
    message = f"{message}; {run.reason}" if run.reason else message
    released = release_gpus(job, state, now_s, generation=generation, leave_by_s=now_s, message=message)
    return snapshot.record_transition(job, replace(released.with_next_curve(), memory=memory))


def _build_oom_failure(snapshot: MutableSnapshot, job: Job, run: Run) -> OomFailure:
    plan, target = job.allocation.plan, job.allocation.target
    assert plan is not None, "a run has a plan"
    measured = [peak for peak in (run.peak_bytes, job.progress.peak_bytes) if peak is not None]
    nodes = [snapshot.nodes[name] for name in target]
    tightest = min(nodes, key=lambda node: node.gpu_memory_bytes / max(1, plan.peak_bytes_on(node.gpu)))
    return OomFailure(
        plan=plan.summarize(),
        gpus=job.allocation.target_gpus,
        gpu_memory_bytes=tightest.gpu_memory_bytes,
        predicted_bytes=plan.peak_bytes_on(tightest.gpu),
        measured_bytes=max(measured, default=None),
    )


def _describe_oom_retry(memory: MemoryRecord, now_s: float) -> str:
    pause_s = (memory.retry_at_s or now_s) - now_s
    attempt = f"out of memory (attempt {len(memory.deaths)} of {OOM_ATTEMPTS_MAX}): {memory.deaths[-1]}"
    corrected = f"; new plans count {memory.factor:.2f} times the predicted memory" if memory.percent > 100 else ""
    return f"{attempt}{corrected}; retrying in {pause_s:.0f} s"


def _describe_oom_failure(memory: MemoryRecord) -> str:
    attempts = "; ".join(f"{number}. {failure}" for number, failure in enumerate(memory.deaths, 1))
    return f"out of memory in {len(memory.deaths)} attempts: {attempts}"
