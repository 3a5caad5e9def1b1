"""Who gives way where a recall leaves jobs without room: those with most to do, not whoever sat on the node.

A node comes home and its jobs have nowhere to go. To stop a few that have long to run on many GPUs keeps fewer people
waiting than to stop many that are nearly done: least service first (Tiresias, NSDI'19, section 3), applied at the one
moment at which somebody has to stop anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.minimum_runtime import held_until_s
from scheduler.policies.ordering import service_gpu_s
from scheduler.policies.settings import PolicySettings
from scheduler.policies.speed import gpu_model, node_sizes

OUTRANKED_RATIO = 2.0
"""How many times as much service a job must have to go as each of those that get its GPUs."""


def outranked(
    snapshot: Snapshot, stranded: Iterable[Job], exempt: Collection[str], settings: PolicySettings
) -> Mapping[str, tuple[str, ...]]:
    """Running jobs that give way, each with the stranded jobs that get its GPUs, those with least to do first.

    None of `exempt`, none that has just begun or must not be moved about, none of a higher priority, of another queue
    or on another GPU model.
    """
    sizes = node_sizes(snapshot)
    running = [
        job
        for job in map(snapshot.jobs.__getitem__, snapshot.ledger.running)
        if job.id not in exempt
        and job.state is JobState.RUNNING
        and job.intent is Intent.RUN
        and job.spec.fungible
        and held_until_s(job, settings) <= snapshot.now_s
    ]
    service = {job.id: service_gpu_s(snapshot, job, sizes) for job in (*running, *stranded)}
    waiting = deque(sorted(stranded, key=lambda job: (service[job.id], job.id)))
    ways: dict[str, tuple[str, ...]] = {}
    for job in sorted(running, key=lambda job: (-service[job.id], job.id)):
        if not waiting or OUTRANKED_RATIO * service[waiting[0].id] > service[job.id]:  # nor has any that comes after it
            break
        room, takers = job.allocation.target_gpus, list[str]()
        while waiting and (taker := waiting[0]).spec.min_gpus <= room:
            if not _outranks(snapshot, taker, job) or OUTRANKED_RATIO * service[taker.id] > service[job.id]:
                break
            room -= taker.spec.min_gpus
            takers.append(waiting.popleft().id)
        if takers:
            ways[job.id] = tuple(takers)
    return ways


def _outranks(snapshot: Snapshot, taker: Job, job: Job) -> bool:
    sizes = node_sizes(snapshot)
    return (
        taker.spec.queue == job.spec.queue
        and taker.spec.priority >= job.spec.priority
        and gpu_model(snapshot, taker, sizes) == gpu_model(snapshot, job, sizes)
    )
