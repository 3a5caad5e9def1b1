"""Who gives way to jobs with far less to do: least service first (Tiresias, NSDI'19, section 3), applied sparingly.

A node comes home and its jobs have nowhere to go: to stop a few that have long to run on many GPUs keeps fewer people
waiting than to stop many that are nearly done. Where nobody has to stop, a job that waits may still take the place of
one that has several times as much to do; then its restart is in the price.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.minimum_runtime import held_until_s
from scheduler.policies.ordering import is_overdue, service_gpu_s
from scheduler.policies.settings import PolicySettings
from scheduler.policies.speed import efficient_gpus, gpu_model, node_sizes

OUTRANKED_RATIO = 2.0
"""How many times as much service a job has to go as each of those that get its GPUs, where somebody has to stop."""
OVERTAKEN_RATIO = 4.0
"""The same where nobody has to, for a job that was never stopped."""

Ways = Mapping[str, tuple[str, ...]]
"""Running jobs that give way, each with the jobs that get its GPUs, those with least to do first."""


@dataclass(frozen=True, slots=True)
class _Taker:
    job: Job
    gpus: int
    service_gpu_s: float


def outranked(snapshot: Snapshot, stranded: Iterable[Job], exempt: Collection[str], settings: PolicySettings) -> Ways:
    """Who gives way to jobs that would have to stop otherwise.

    None of `exempt`, none that has just begun or must not be moved about, none of a higher priority, of another queue
    or on another GPU model.
    """
    sizes = node_sizes(snapshot)
    takers = [_Taker(job, job.spec.min_gpus, service_gpu_s(snapshot, job, sizes)) for job in stranded]
    running = _may_stop(snapshot, exempt, settings)
    limits = {job.id: service_gpu_s(snapshot, job, sizes) / OUTRANKED_RATIO for job in running}
    return _ways(snapshot, takers, running, limits)


def overtaken(snapshot: Snapshot, waiting: Iterable[Job], exempt: Collection[str], settings: PolicySettings) -> Ways:
    """As `outranked`, to jobs that wait. Only those of known length are given way to, for nobody knows whether another
    has little to do; and nobody gives way who has a deadline, or has waited for so long in all that nobody passes it.
    Whoever was stopped before needs to have that many times more to do.
    """
    sizes, now_s = node_sizes(snapshot), snapshot.now_s
    known = [job for job in waiting if job.spec.fungible and job.remaining_steps(now_s) is not None]
    takers = [_Taker(job, efficient_gpus(snapshot, job, sizes), service_gpu_s(snapshot, job, sizes)) for job in known]
    running = [
        job
        for job in (_may_stop(snapshot, exempt, settings) if takers else ())
        if job.spec.deadline_s is None and not is_overdue(job, now_s, settings)
    ]
    limits = {
        job.id: service_gpu_s(snapshot, job, sizes) / (OVERTAKEN_RATIO * (1 + job.account.preemptions))
        - settings.reconfiguration_of(job) * job.allocation.target_gpus
        for job in running
    }
    return _ways(snapshot, takers, running, limits)


def _may_stop(snapshot: Snapshot, exempt: Collection[str], settings: PolicySettings) -> list[Job]:
    return [
        job
        for job in map(snapshot.jobs.__getitem__, snapshot.ledger.running)
        if job.id not in exempt
        and job.state is JobState.RUNNING
        and job.intent is Intent.RUN
        and job.spec.fungible
        and held_until_s(job, settings) <= snapshot.now_s
    ]


def _ways(
    snapshot: Snapshot, takers: Iterable[_Taker], running: Iterable[Job], limits_gpu_s: Mapping[str, float]
) -> Ways:
    """A running job gives way to takers with no more to do than its limit, if they fit onto its GPUs."""
    waiting = deque(sorted(takers, key=lambda taker: (taker.service_gpu_s, taker.job.id)))
    ways: dict[str, tuple[str, ...]] = {}
    for job in sorted(running, key=lambda job: (-limits_gpu_s[job.id], job.id)):
        limit_gpu_s = limits_gpu_s[job.id]
        if not waiting or waiting[0].service_gpu_s > limit_gpu_s:  # nor has any that comes after it a higher one
            break
        room, served = job.allocation.target_gpus, list[str]()
        while waiting and waiting[0].gpus <= room and waiting[0].service_gpu_s <= limit_gpu_s:
            if not _outranks(snapshot, waiting[0].job, job):
                break
            room -= waiting[0].gpus
            served.append(waiting.popleft().job.id)
        if served:
            ways[job.id] = tuple(served)
    return ways


def _outranks(snapshot: Snapshot, taker: Job, job: Job) -> bool:
    sizes = node_sizes(snapshot)
    return (
        taker.spec.queue == job.spec.queue
        and taker.spec.priority >= job.spec.priority
        and gpu_model(snapshot, taker, sizes) == gpu_model(snapshot, job, sizes)
    )
