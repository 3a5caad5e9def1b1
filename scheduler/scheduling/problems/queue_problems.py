"""Problems of queues: a guarantee that is not served, or no starts although GPUs are free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from scheduler.domain.job import Intent, Job
from scheduler.domain.problems import Problem, ProblemCode, Severity, SubjectKind
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.quota import QueueUsage, QuotaState, compute_queue_usage
from scheduler.scheduling.problems.evidence import Evidence
from scheduler.scheduling.problems.sentences import describe_count, describe_gpus

UNSERVED_S = 1800.0
"""A guarantee is reclaimed from other queues within minutes: their jobs get a notice, save and leave. Half an hour
includes slow saves and the minimum run time of a job."""
STUCK_S = 7200.0
"""Free GPUs next to a pending job are normal for some time: a reservation keeps them for a larger job, or they are
spread over too many nodes. After two hours without any start, a person should look at it."""


def find_queue_problems(snapshot: Snapshot, evidence: Evidence) -> Iterator[Problem]:
    pending = _group_pending_jobs(snapshot, evidence.now_s)
    if not pending:
        return
    quota, starts, startable = QuotaState(snapshot), _find_last_starts(snapshot), list[Job]()
    for name, jobs in pending.items():
        unserved = next(_find_unserved_guarantee(name, jobs, quota, evidence.now_s), None)
        if unserved is not None:
            yield unserved
        elif evidence.now_s - starts.get(name, float("-inf")) >= STUCK_S:
            # Only the first job counts: the GPUs that later ones could use may be kept for it.
            startable += [job for job in jobs[:1] if _could_start(job, snapshot, quota, evidence.now_s)]
    usages = compute_queue_usage(snapshot) if startable else {}
    yield from (_describe_stuck_queue(job, usages[job.spec.queue], snapshot) for job in startable)


def _group_pending_jobs(snapshot: Snapshot, now_s: float) -> Mapping[str, list[Job]]:
    """Return the jobs that wait for nothing but GPUs, by queue: the most urgent first, then the oldest submission.

    Queues whose jobs have all waited less than `UNSERVED_S` are left out.
    """
    waiting: defaultdict[str, list[Job]] = defaultdict(list)
    for job in (snapshot.jobs[job_id] for job_id in snapshot.index.waiting):
        if job.intent is Intent.RUN and job.retry_at_s <= now_s and not job.awaits_review:
            waiting[job.spec.queue].append(job)
    return {
        name: sorted(jobs, key=lambda job: (-job.spec.priority, job.submitted_at_s, job.id))
        for name, jobs in waiting.items()
        if now_s - min(job.state_since_s for job in jobs) >= UNSERVED_S
    }


def _find_last_starts(snapshot: Snapshot) -> Mapping[str, float]:
    """Return when a live job of each queue last started."""
    starts: dict[str, float] = {}
    for job in snapshot.jobs.values():
        started_s = job.account.last_started_at_s
        if started_s is not None and started_s > starts.get(job.spec.queue, float("-inf")):
            starts[job.spec.queue] = started_s
    return starts


def _find_unserved_guarantee(name: str, jobs: Sequence[Job], quota: QuotaState, now_s: float) -> Iterator[Problem]:
    guaranteed, used = quota.queue(quota.account(jobs[0])).guaranteed_gpus, quota.used(name)
    for job in jobs:
        needed = job.spec.min_gpus
        is_old = now_s - job.state_since_s >= UNSERVED_S
        if not is_old or used + needed > guaranteed or quota.check_limits(job, needed) is not None:
            continue
        yield Problem(
            ProblemCode.GUARANTEE_UNSERVED,
            Severity.WARNING,
            SubjectKind.QUEUE,
            name,
            f"Queue {name} holds {used} of its {guaranteed} guaranteed GPUs, and job {job.spec.name}, which needs "
            f"{needed}, is pending.",
            "Read why the job waits: its GPU model, its nodes or its volumes may not be available.",
            f"ebbtide explain {job.id}",
            since_s=job.state_since_s,
            queue=name,
            numbers={"used_gpus": float(used), "guaranteed_gpus": float(guaranteed), "needed_gpus": float(needed)},
        )


def _could_start(job: Job, snapshot: Snapshot, quota: QuotaState, now_s: float) -> bool:
    """Return whether the job has waited at least `STUCK_S` although enough GPUs are free and the quota permits them."""
    needed, is_old = job.spec.min_gpus, now_s - job.state_since_s >= STUCK_S
    return is_old and needed <= _count_free_gpus(job, snapshot) and quota.check_limits(job, needed) is None


def _describe_stuck_queue(job: Job, usage: QueueUsage, snapshot: Snapshot) -> Problem:
    name, pending = job.spec.queue, usage.waiting_jobs
    free, needed = _count_free_gpus(job, snapshot), job.spec.min_gpus
    return Problem(
        ProblemCode.QUEUE_STUCK,
        Severity.WARNING,
        SubjectKind.QUEUE,
        name,
        f"Queue {name} has {describe_count(pending, 'pending job')} and starts none, although "
        f"{describe_gpus(free, 'free')} and job {job.spec.name} needs {needed}.",
        "Read why the job waits, such as free GPUs that are spread over too many nodes.",
        f"ebbtide explain {job.id}",
        since_s=job.state_since_s,
        queue=name,
        numbers={"pending_jobs": float(pending), "free_gpus": float(free), "needed_gpus": float(needed)},
    )


def _count_free_gpus(job: Job, snapshot: Snapshot) -> int:
    """Count the free GPUs that the job may use by their model, and by whether they are lent."""
    return sum(
        count
        for (gpu, is_lent), count in snapshot.index.free_gpus.items()
        if job.spec.gpu in ("", gpu) and (not is_lent or job.accepts_lent_nodes)
    )
