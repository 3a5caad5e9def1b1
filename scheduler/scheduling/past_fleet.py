"""PastFleet: fleet, live jobs and queue at a time, compact enough to store one every few minutes."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple

from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import WAITING_STATES
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.capacity_use import NodeUse, find_node_use

PENDING_JOBS_MAX = 200
"""Pending jobs that are named, those that waited longest. The others are counted by queue."""


class PastNode(NamedTuple):
    """A node with its GPU model, and the numbers of GPUs that jobs held, that inference used and that were lent."""

    name: str
    pool: str
    gpu: str
    use: NodeUse
    gpus: int
    held: int
    inference: int
    lent: int = 0


class PastJob(NamedTuple):
    """A live job. `gpus` are those it held, 0 for a pending one; `nodes` the number of their nodes."""

    id: str
    name: str
    queue: str
    owner: str
    owner_key: str
    state: str
    gpus: int
    nodes: int
    min_gpus: int
    max_gpus: int
    submitted_at_s: float


@dataclass(frozen=True, slots=True)
class PastFleet:
    """State at `at_s`.

    Args:
        newest_event: number of the newest event at that time.
        holding: jobs that held GPUs, by id.
        pending: the pending jobs that waited longest, oldest first.
        pending_by_queue: pending jobs and the sum of their smallest numbers of GPUs, by queue.
    """

    at_s: float
    generation: int
    newest_event: int
    nodes: tuple[PastNode, ...]
    holding: tuple[PastJob, ...]
    pending: tuple[PastJob, ...]
    pending_by_queue: Mapping[str, tuple[int, int]]

    def has_same_content(self, other: PastFleet) -> bool:
        """Return whether nodes and jobs are the same. Time and generation may differ."""
        return (
            self.nodes == other.nodes
            and self.holding == other.holding
            and self.pending == other.pending
            and self.pending_by_queue == other.pending_by_queue
        )


def capture_fleet(snapshot: Snapshot, newest_event: int) -> PastFleet:
    """Return the state of a snapshot."""
    pending = [job for job in snapshot.jobs.values() if is_pending(job)]
    jobs, gpus = Counter[str](), Counter[str]()
    for job in pending:
        jobs[job.spec.queue] += 1
        gpus[job.spec.queue] += job.spec.min_gpus
    return PastFleet(
        at_s=snapshot.now_s,
        generation=snapshot.generation,
        newest_event=newest_event,
        nodes=tuple(capture_node(snapshot, name) for name in sorted(snapshot.nodes)),
        holding=tuple(capture_job(job) for _, job in sorted(snapshot.jobs.items()) if job.allocation.held),
        pending=tuple(map(capture_job, nsmallest(PENDING_JOBS_MAX, pending, key=_get_age_key))),
        pending_by_queue={queue: (jobs[queue], gpus[queue]) for queue in sorted(jobs)},
    )


def encode_past_fleet(past: PastFleet) -> bytes:
    """Return the state as compressed JSON."""
    document = {
        "at_s": past.at_s, "generation": past.generation, "newest_event": past.newest_event, "nodes": past.nodes,
        "holding": past.holding, "pending": past.pending, "pending_by_queue": past.pending_by_queue,
    }  # fmt: skip
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)


def decode_past_fleet(body: bytes) -> PastFleet:
    document = json.loads(gzip.decompress(body))
    return PastFleet(
        at_s=document["at_s"],
        generation=document["generation"],
        newest_event=document["newest_event"],
        nodes=tuple(PastNode(*each) for each in document["nodes"]),
        holding=tuple(PastJob(*each) for each in document["holding"]),
        pending=tuple(PastJob(*each) for each in document["pending"]),
        pending_by_queue={queue: (jobs, gpus) for queue, (jobs, gpus) in document["pending_by_queue"].items()},
    )


def is_pending(job: Job) -> bool:
    """Tell whether the job waits for GPUs and should run."""
    return job.state in WAITING_STATES and job.intent is Intent.RUN


def capture_node(snapshot: Snapshot, name: str) -> PastNode:
    """Return the state of one node."""
    node = snapshot.nodes[name]
    held = len(snapshot.index.holders.get(name, ()))
    use, loan = find_node_use(node, snapshot, held), snapshot.loans.get(name)
    lent = loan.count_gpus(node) if loan is not None and loan.is_lent else 0
    return PastNode(name, node.pool, node.gpu, use, node.gpus, held, node.inference_gpus, lent)


def capture_job(job: Job) -> PastJob:
    """Return the state of one job."""
    held, spec = job.allocation.held, job.spec
    gpus = sum(map(len, held.values()))
    return PastJob(
        job.id, spec.name, spec.queue, job.owner, job.owner_key, job.state.value, gpus, len(held), spec.min_gpus,
        spec.max_gpus, job.submitted_at_s,
    )  # fmt: skip


def _get_age_key(job: Job) -> tuple[float, str]:
    return job.submitted_at_s, job.id
