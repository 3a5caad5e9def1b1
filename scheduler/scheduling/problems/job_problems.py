"""Problems of jobs: failed, out of memory, interrupted too often, or losing work with each interruption."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.domain.job import Intent, Job
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.job_records import OOM_ATTEMPTS_MAX
from scheduler.domain.job_state import JobState
from scheduler.domain.problems import Problem, ProblemCode, Severity, SubjectKind
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.problems.evidence import Evidence
from scheduler.scheduling.problems.job_activity import JobActivity
from scheduler.scheduling.problems.sentences import describe_gpu_hours, join_counts, shorten

FAILED_S = 86_400.0
"""Age at which a failed job is no news any more, as in the lists of the console and of `ebbtide ps`."""
OOM_FAILURES_MIN = 2
"""One failure corrects the memory model and is over. The second one shows that the correction did not help."""
OOM_RECOVERED_S = 900.0
"""A run that has lasted so long has passed its first steps, the peak of memory, and a checkpoint."""
RESTARTS_MIN = 3
"""Runs in an hour that ended by themselves. The alert EbbtideJobRestarting counts them in the same way."""
PREEMPTIONS_MIN = 6
"""Preemptions in an hour, one every ten minutes. Policies that preempt by an order do so up to three times."""
RESIZES_MIN = 20
"""Resizes in an hour, one every three minutes. Each has to pay for itself before it is decided, so that a job in a busy
healthy fleet has up to a dozen."""
LOSSES_MIN = 2
"""Interruptions after which a share of lost work is a pattern, not one accident."""
LOST_SHARE_MIN = 0.2
LOST_GPU_S_MIN = 3600.0
"""Losses below one GPU-hour are noise of short tests."""
_DETAIL_MAX = 160


def find_job_problems(snapshot: Snapshot, evidence: Evidence) -> Iterator[Problem]:
    ended = {job.id: job for job in evidence.failed_jobs if evidence.now_s - job.state_since_s <= FAILED_S}
    for job in snapshot.jobs.values():
        if job.state is JobState.FAILED:
            ended[job.id] = job
        elif not job.is_ended and job.intent is Intent.RUN:
            if len(job.memory.deaths) >= OOM_FAILURES_MIN:
                yield from _find_memory_problem(job, evidence.now_s)
            if job.account.lost_gpu_s >= LOST_GPU_S_MIN:
                yield from _find_lost_work(job)
            if job.id in evidence.activity:
                yield from _find_thrashing(job, evidence.activity[job.id])
    yield from map(_describe_failed_job, ended.values())


def _describe_failed_job(job: Job) -> Problem:
    failure = job.failure
    reason = job.message or (failure.reason if failure else "") or "no reason was recorded"
    numbers = {"failures": float(job.account.failures), "lost_gpu_s": job.account.lost_gpu_s}
    lost = f", with {describe_gpu_hours(job.account.lost_gpu_s)} of lost work" if job.account.lost_gpu_s else ""
    is_own_fault = failure is not None and failure.code in set(PermanentFault)
    advice = "Correct the job and submit it again." if is_own_fault else "Read the log of the last run."
    return Problem(
        ProblemCode.JOB_FAILED,
        Severity.WARNING,
        SubjectKind.JOB,
        job.id,
        f"Job {job.spec.name} of queue {job.spec.queue} failed{lost}: {shorten(reason, _DETAIL_MAX)}.",
        advice,
        f"ebbtide logs {job.id}",
        since_s=job.state_since_s,
        queue=job.spec.queue,
        numbers=numbers,
    )


def _find_memory_problem(job: Job, now_s: float) -> Iterator[Problem]:
    deaths = job.memory.deaths
    if job.state is JobState.RUNNING and now_s - job.state_since_s >= OOM_RECOVERED_S:
        return
    yield Problem(
        ProblemCode.JOB_OUT_OF_MEMORY,
        Severity.WARNING,
        SubjectKind.JOB,
        job.id,
        f"Job {job.spec.name} ran out of memory in {len(deaths)} of {OOM_ATTEMPTS_MAX} attempts, last with "
        f"{deaths[-1]}; it fails after {OOM_ATTEMPTS_MAX}.",
        "Lower its batch size or sequence length, or permit more GPUs.",
        f"ebbtide describe {job.id}",
        queue=job.spec.queue,
        numbers={"attempts": float(len(deaths)), "attempts_max": float(OOM_ATTEMPTS_MAX)},
    )


def _find_thrashing(job: Job, activity: JobActivity) -> Iterator[Problem]:
    is_interrupted = activity.preemptions >= PREEMPTIONS_MIN or activity.restarts >= RESTARTS_MIN
    if not is_interrupted and activity.resizes < RESIZES_MIN:
        return
    counts = {"restart": activity.restarts, "preemption": activity.preemptions, "resize": activity.resizes}
    if activity.restarts >= RESTARTS_MIN:
        advice, command = "Read its log. Suspend it until its fault is corrected.", f"ebbtide logs {job.id}"
    else:
        advice, command = "Narrow its range of GPUs, or raise its priority.", f"ebbtide explain {job.id}"
    yield Problem(
        ProblemCode.JOB_THRASHING,
        Severity.WARNING,
        SubjectKind.JOB,
        job.id,
        f"Job {job.spec.name} had {join_counts(counts)} within the last hour.",
        advice,
        command,
        since_s=activity.first_at_s,
        queue=job.spec.queue,
        numbers={f"{name}s": float(count) for name, count in counts.items()},
    )


def _find_lost_work(job: Job) -> Iterator[Problem]:
    account = job.account
    counts = {"resize": account.resizes, "preemption": account.preemptions, "failure": account.failures}
    if sum(counts.values()) < LOSSES_MIN or account.lost_gpu_s < LOST_SHARE_MIN * account.gpu_s:
        return
    if job.has_reported:
        advice = "Save more often, and save when a notice arrives."
    else:
        advice = "Save and resume with `ebbtide.elastic`; without a session, each change starts from step 0."
    yield Problem(
        ProblemCode.JOB_LOSES_WORK,
        Severity.WARNING,
        SubjectKind.JOB,
        job.id,
        f"Job {job.spec.name} lost {describe_gpu_hours(account.lost_gpu_s)} of its "
        f"{describe_gpu_hours(account.gpu_s)} in {join_counts(counts)}.",
        advice,
        f"ebbtide describe {job.id}",
        queue=job.spec.queue,
        numbers={
            "lost_gpu_s": account.lost_gpu_s,
            "gpu_s": account.gpu_s,
            **{f"{name}s": float(count) for name, count in counts.items()},
        },
    )
