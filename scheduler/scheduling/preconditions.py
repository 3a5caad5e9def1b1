"""Preconditions: what a command was made for, looked at once more when it is obeyed.

Commands are obeyed one after the other, so that of two that were made for the same state the second is refused here,
whichever processes they came through. A tag covers what people can change (a job's spec and intent, a pool's lending
policy, a node's shape and cordon, a queue's quota) and not how things fare, so that a job may train on meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

from scheduler.domain.codec import encode
from scheduler.domain.commands import (
    CancelJob,
    ChangeJob,
    ChangeQueue,
    Command,
    CommandBody,
    CordonNode,
    DeletePool,
    DeleteQueue,
    RemoveNode,
    ResumeJob,
    ScaleJob,
    SetLendingPolicy,
    SubmitJob,
    SuspendJob,
    UncordonNode,
)
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import Node, Pool
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.scheduling.mutable_snapshot import SnapshotBuilder


def check_preconditions(snapshot: SnapshotBuilder, command: Command) -> Event | None:
    """The refusal of a command that was made for another state than the present; None where it still fits."""
    if command.basis:
        subject, tag = _current_etag(snapshot, command.body)
        if tag != command.basis:
            why = f"{subject} has changed since it was read: its ETag was {command.basis} and is {tag or 'gone'}"
            return _build_refusal(snapshot, command, subject, why)
    match command.body:
        case SubmitJob(job_id, spec) if command.is_counted:
            queue, owner = spec.queue, command.actor
        case ChangeJob(job_id, queue=str(queue)) if command.is_counted and job_id in snapshot.jobs:
            if snapshot.jobs[job_id].spec.queue == queue:
                return None
            owner = snapshot.jobs[job_id].owner
        case _:
            return None
    why = user_job_limit_error(snapshot.jobs, snapshot.queues.get(queue), owner)
    return _build_refusal(snapshot, command, job_id, why) if why else None


def user_job_limit_error(jobs: Mapping[str, Job], queue: JobQueue | None, owner: str) -> str:
    """Why the queue takes no further job of an owner who has so many waiting there; empty where it does."""
    if queue is None or queue.user_jobs_max is None:
        return ""
    own = (job for job in jobs.values() if job.spec.queue == queue.name and job.owner == owner)
    waiting = sum(not job.is_placed and not job.is_ended for job in own)
    if waiting < queue.user_jobs_max:
        return ""
    return (
        f"{owner} has {waiting} waiting jobs in queue {queue.name}, which takes {queue.user_jobs_max} of one user "
        "(user_jobs_max): wait until one starts, or cancel one"
    )


def job_etag(job: Job) -> str:
    return _hash_etag([job.id, encode(job.spec), job.intent.value])


def pool_etag(pool: Pool) -> str:
    return _hash_etag(encode(pool))


def node_etag(node: Node) -> str:
    return _hash_etag([node.name, node.pool, node.gpu, node.gpus, node.gpu_memory_bytes, node.cordoned, node.draining])


def queue_etag(queue: JobQueue) -> str:
    return _hash_etag(encode(queue))


def _current_etag(snapshot: SnapshotBuilder, body: CommandBody) -> tuple[str, str]:
    """What a command changes, and its tag; the tag is empty where that is gone."""
    match body:
        case ScaleJob(name) | ChangeJob(name) | CancelJob(name) | SuspendJob(name) | ResumeJob(name):
            return name, job_etag(snapshot.jobs[name]) if name in snapshot.jobs else ""
        case SetLendingPolicy(name) | DeletePool(name):
            return name, pool_etag(snapshot.pools[name]) if name in snapshot.pools else ""
        case RemoveNode(name) | CordonNode(name) | UncordonNode(name):
            return name, node_etag(snapshot.nodes[name]) if name in snapshot.nodes else ""
        case ChangeQueue(JobQueue(name)) | DeleteQueue(name):
            return name, queue_etag(snapshot.queues[name]) if name in snapshot.queues else ""
    raise ValueError(f"nothing that a {type(body).__name__} changes has a tag")


def _build_refusal(snapshot: SnapshotBuilder, command: Command, subject: str, why: str) -> Event:
    return Event(snapshot.now_s, EventCode.COMMAND_REFUSED, subject, why, cause=command.id)


def _hash_etag(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return f'"{sha256(text.encode()).hexdigest()[:20]}"'
