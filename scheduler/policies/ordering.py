"""Who comes next: functions Snapshot -> ids of the waiting jobs, first come first."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from scheduler.domain.job import Intent, Job
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.settings import PolicySettings
from scheduler.policies.speed import efficient_gpus, node_sizes, remaining_s, step_time_s


def first_come(snapshot: Snapshot, settings: PolicySettings) -> tuple[str, ...]:
    """Order of submission within priority."""
    queued = _waiting(snapshot)
    return tuple(job.id for job in sorted(queued, key=lambda job: (-job.spec.priority, job.submitted_at_s, job.id)))


def shortest_remaining(snapshot: Snapshot, settings: PolicySettings) -> tuple[str, ...]:
    """Least remaining time at the job's minimum first, within priority, with ageing.

    Remaining time is divided by 1 + waited / ageing_s, so that a long job comes nearer to the front while it waits
    (Lyra, EuroSys'23, section 5: shortest job first for base demand; the ageing is ours). That alone lets an endless
    stream of short jobs pass, so overdue ones come first, in order of submission.
    """
    sizes = node_sizes(snapshot)

    def key(job: Job) -> tuple[float, float, float, str]:
        if is_overdue(job, snapshot.now_s, settings):
            return (-job.spec.priority, -1.0, job.submitted_at_s, job.id)
        length_s = remaining_s(snapshot, job, job.spec.min_gpus, sizes)
        ageing = 1.0 + _waited_s(job, snapshot.now_s) / settings.ageing_s
        return (-job.spec.priority, length_s / ageing, job.submitted_at_s, job.id)

    return tuple(job.id for job in sorted(_waiting(snapshot), key=key))


def least_service(snapshot: Snapshot, settings: PolicySettings) -> tuple[str, ...]:
    """As `shortest_remaining`, by remaining time x GPUs: of jobs that want the same GPUs more can start with those that
    want little of them (smallest service first, Tiresias, NSDI'19, section 3).

    Both are those on the fewest GPUs that are used well. A job with a deadline is taken for no longer than the time it
    can still wait and meet it on those.
    """
    sizes, now_s, patience_s = node_sizes(snapshot), snapshot.now_s, _patience_s(settings)

    def key(job: Job) -> tuple[float, float, float, str]:
        waited_s = _waited_s(job, now_s)
        if waited_s > patience_s:
            return (-job.spec.priority, -1.0, job.submitted_at_s, job.id)
        gpus = efficient_gpus(snapshot, job, sizes)
        length_s = remaining_s(snapshot, job, gpus, sizes)
        slack_s = max(0.0, job.deadline_at_s - now_s - length_s)
        ageing = 1.0 + waited_s / settings.ageing_s
        urgent_gpu_s = min(length_s, slack_s) * gpus
        return (-job.spec.priority, urgent_gpu_s / ageing, job.submitted_at_s, job.id)

    return tuple(job.id for job in sorted(_waiting(snapshot), key=key))


def service_gpu_s(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> float:
    """GPU-seconds that the job has to go, on the fewest GPUs that are used well."""
    gpus = efficient_gpus(snapshot, job, sizes)
    return remaining_s(snapshot, job, gpus, sizes) * gpus


def shortest_first(snapshot: Snapshot, settings: PolicySettings) -> tuple[str, ...]:
    """Least run time in all at the job's smallest count first, within priority; last come those of unknown length."""
    sizes = node_sizes(snapshot)

    def key(job: Job) -> tuple[float, float, float, str]:
        step_s = step_time_s(snapshot, job, job.spec.min_gpus, sizes)
        known_s = job.spec.steps * step_s if step_s is not None else 0.0
        return (-job.spec.priority, known_s or job.spec.duration_estimate_s or inf, job.submitted_at_s, job.id)

    return tuple(job.id for job in sorted(_waiting(snapshot), key=key))


def is_overdue(job: Job, now_s: float, settings: PolicySettings) -> bool:
    """The job has waited so long that nobody behind it may take GPUs that it could use."""
    return _waited_s(job, now_s) > _patience_s(settings)


def _patience_s(settings: PolicySettings) -> float:
    return settings.patience_ageings * settings.ageing_s


def _waited_s(job: Job, now_s: float) -> float:
    return job.account.waited_s + max(0.0, now_s - job.account.settled_at_s)


def _waiting(snapshot: Snapshot) -> list[Job]:
    jobs = snapshot.jobs
    return [job for job_id in snapshot.ledger.waiting if (job := jobs[job_id]).intent is Intent.RUN]
