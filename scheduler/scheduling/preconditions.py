"""Preconditions of commands: the state that a command was made for, and limits on waiting jobs.

Commands are applied one after the other, so of two commands made for the same state the second is refused, whichever
processes they came through. An ETag covers what users can change (a job's spec and intent, a pool's lending policy and
network, a node's shape, its cordon and whether it can be lent, a queue's quota, a GPU profile) but not run-time status,
so a job's progress does not invalidate it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

from scheduler.domain.codec import encode
from scheduler.domain.commands import (
    CancelJob,
    ChangeJob,
    ChangeNode,
    ChangeQueue,
    Command,
    CommandBody,
    CordonNode,
    DeleteGpuProfile,
    DeletePool,
    DeleteQueue,
    RemoveNode,
    ResumeJob,
    ScaleJob,
    SetDemandSource,
    SetGpuProfile,
    SetLendingPolicy,
    SetPoolNetwork,
    SetServedModels,
    SubmitJob,
    SuspendJob,
    UncordonNode,
)
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import Node, Pool
from scheduler.domain.hardware import GpuProfile
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue, find_limiting_queue
from scheduler.scheduling.mutable_snapshot import MutableSnapshot


def check_preconditions(snapshot: MutableSnapshot, command: Command) -> Event | None:
    """Return the refusal of a command whose preconditions do not hold, or None."""
    if command.basis:
        subject, etag = _current_etag(snapshot, command.body)
        if etag != command.basis:
            now = f"its ETag is now {etag}" if etag else "it no longer exists"
            message = f"{subject} has changed since ETag {command.basis} was read; {now}. Read it again."
            return _build_refusal(snapshot, command, subject, message)
    match command.body:
        case SubmitJob(job_id, spec) if command.is_counted:
            queue, owner, owner_key = spec.queue, command.actor, command.actor_key
        case ChangeJob(job_id, queue=str(queue)) if command.is_counted and job_id in snapshot.jobs:
            before = snapshot.jobs[job_id].spec.queue
            if find_limiting_queue(before, snapshot.queues) == find_limiting_queue(queue, snapshot.queues):
                return None
            owner, owner_key = snapshot.jobs[job_id].owner, snapshot.jobs[job_id].owner_key
        case _:
            return None
    error = user_job_limit_error(snapshot.jobs, snapshot.queues, queue, owner, owner_key=owner_key)
    return _build_refusal(snapshot, command, job_id, error) if error else None


def user_job_limit_error(
    jobs: Mapping[str, Job], queues: Mapping[str, JobQueue], name: str, owner: str, *, owner_key: str
) -> str:
    """Return why the queue `name` accepts no further waiting job of this owner, or an empty string.

    Args:
        owner: the owner's display name, for the text. Jobs are counted by `owner_key`.
    """
    queue = queues.get(find_limiting_queue(name, queues))
    if queue is None or queue.user_jobs_max is None:
        return ""
    own = (job for job in jobs.values() if find_limiting_queue(job.spec.queue, queues) == queue.name)
    own = (job for job in own if job.owner_key == owner_key)
    waiting = sum(not job.is_placed and not job.is_ended for job in own)
    if waiting < queue.user_jobs_max:
        return ""
    return (
        f"{owner} has {waiting} waiting jobs in queue {queue.name}; `user_jobs_max` is {queue.user_jobs_max}. "
        "Wait until a job starts, or cancel one."
    )


def job_etag(job: Job) -> str:
    return _hash_etag([job.id, encode(job.spec), job.intent.value])


def pool_etag(pool: Pool) -> str:
    return _hash_etag(encode(pool))


def node_etag(node: Node) -> str:
    shape = [node.name, node.pool, node.gpu, node.gpus, node.gpu_memory_bytes]
    return _hash_etag([*shape, node.cordoned, node.draining, node.lendable, *node.lendable_gpus])


def queue_etag(queue: JobQueue) -> str:
    return _hash_etag(encode(queue))


def gpu_profile_etag(name: str, profile: GpuProfile | None) -> str:
    """Return the ETag of a GPU model's profile. `profile` is the one that was set, or None."""
    return _hash_etag([name, None if profile is None else encode(profile)])


def _current_etag(snapshot: MutableSnapshot, body: CommandBody) -> tuple[str, str]:
    """Return the name and the ETag of the object that a command changes. The ETag is empty if it no longer exists."""
    match body:
        case ScaleJob(name) | ChangeJob(name) | CancelJob(name) | SuspendJob(name) | ResumeJob(name):
            return name, job_etag(snapshot.jobs[name]) if name in snapshot.jobs else ""
        case SetGpuProfile(name) | DeleteGpuProfile(name):
            return name, gpu_profile_etag(name, snapshot.gpu_profiles.get(name))
        case SetLendingPolicy(name) | SetPoolNetwork(name) | SetDemandSource(name) | SetServedModels(name):
            return name, pool_etag(snapshot.pools[name]) if name in snapshot.pools else ""
        case DeletePool(name):
            return name, pool_etag(snapshot.pools[name]) if name in snapshot.pools else ""
        case RemoveNode(name) | CordonNode(name) | UncordonNode(name) | ChangeNode(name):
            return name, node_etag(snapshot.nodes[name]) if name in snapshot.nodes else ""
        case ChangeQueue(JobQueue(name)) | DeleteQueue(name):
            return name, queue_etag(snapshot.queues[name]) if name in snapshot.queues else ""
    raise ValueError(f"a {type(body).__name__} command changes nothing that has an ETag")


def _build_refusal(snapshot: MutableSnapshot, command: Command, subject: str, message: str) -> Event:
    return Event(snapshot.now_s, EventCode.COMMAND_REFUSED, subject, message, cause=command.id)


def _hash_etag(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return f'"{sha256(text.encode()).hexdigest()[:20]}"'
