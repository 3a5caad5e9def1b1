"""FleetChange: how one commit changed the fleet as checkpoints hold it, and the replay of such changes.

A checkpoint and the changes of all later commits give the fleet as it was at any second. A change is written in the
transaction of its commit, so none is lost or applied twice, whichever process fails.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from scheduler.domain.job import Job
from scheduler.domain.job_state import Allocation
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.past_fleet import (
    PENDING_JOBS_MAX,
    PastFleet,
    PastJob,
    PastNode,
    capture_job,
    capture_node,
    is_pending,
)

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class FleetChange:
    """Changed records of one commit. Each replaces the earlier record of its name or id.

    Args:
        removed_nodes: names of nodes that left the fleet.
        released: ids of jobs that hold no GPUs any longer; `started_or_left`: of jobs that are no longer pending.
        pending_by_queue: by how much the pending jobs and the sum of their minima changed, by queue.
    """

    at_s: float
    generation: int
    nodes: tuple[PastNode, ...] = ()
    removed_nodes: tuple[str, ...] = ()
    holding: tuple[PastJob, ...] = ()
    released: tuple[str, ...] = ()
    pending: tuple[PastJob, ...] = ()
    started_or_left: tuple[str, ...] = ()
    pending_by_queue: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (
            self.nodes or self.removed_nodes or self.holding or self.released or self.pending or self.started_or_left
        )


def compute_fleet_change(previous: Snapshot, snapshot: Snapshot) -> FleetChange:
    """Return what changed from `previous` to `snapshot`. Records that are the same objects cost nothing."""
    jobs = list(_find_changed_jobs(previous, snapshot))
    nodes, removed_nodes = _compare_nodes(previous, snapshot, jobs)
    held_before = {job.id: capture_job(job) for job, _ in jobs if job is not None and job.allocation.held}
    held = {job.id: capture_job(job) for _, job in jobs if job is not None and job.allocation.held}
    pending_before = {job.id: capture_job(job) for job, _ in jobs if job is not None and is_pending(job)}
    pending = {job.id: capture_job(job) for _, job in jobs if job is not None and is_pending(job)}
    return FleetChange(
        at_s=snapshot.now_s,
        generation=snapshot.generation,
        nodes=nodes,
        removed_nodes=removed_nodes,
        holding=tuple(job for job_id, job in held.items() if job != held_before.get(job_id)),
        released=tuple(held_before.keys() - held.keys()),
        pending=tuple(job for job_id, job in pending.items() if job != pending_before.get(job_id)),
        started_or_left=tuple(pending_before.keys() - pending.keys()),
        pending_by_queue=_count_queue_changes(pending_before.values(), pending.values()),
    )


def encode_fleet_change(change: FleetChange) -> bytes:
    """Return the change as compressed JSON without its empty fields."""
    document = {
        "at_s": change.at_s, "generation": change.generation, "nodes": change.nodes,
        "removed_nodes": change.removed_nodes, "holding": change.holding, "released": change.released,
        "pending": change.pending, "started_or_left": change.started_or_left,
        "pending_by_queue": change.pending_by_queue,
    }  # fmt: skip
    written = {name: value for name, value in document.items() if value or name in ("at_s", "generation")}
    return gzip.compress(json.dumps(written, separators=(",", ":")).encode(), compresslevel=6, mtime=0)


def decode_fleet_change(body: bytes) -> FleetChange:
    document = json.loads(gzip.decompress(body))
    counts = document.get("pending_by_queue", {})
    return FleetChange(
        at_s=document["at_s"],
        generation=document["generation"],
        nodes=tuple(PastNode(*each) for each in document.get("nodes", ())),
        removed_nodes=tuple(document.get("removed_nodes", ())),
        holding=tuple(PastJob(*each) for each in document.get("holding", ())),
        released=tuple(document.get("released", ())),
        pending=tuple(PastJob(*each) for each in document.get("pending", ())),
        started_or_left=tuple(document.get("started_or_left", ())),
        pending_by_queue={queue: (jobs, gpus) for queue, (jobs, gpus) in counts.items()},
    )


def replay_changes(checkpoint: PastFleet, changes: Iterable[FleetChange]) -> PastFleet:
    """Return the fleet after the changes of all commits that follow a checkpoint, in their order.

    Its time is that of the last change. A checkpoint may count more pending jobs than it names. Then only pending jobs
    that are no younger than its youngest named one are named, because all of these are known.
    """
    nodes = {node.name: node for node in checkpoint.nodes}
    holding = {job.id: job for job in checkpoint.holding}
    pending = {job.id: job for job in checkpoint.pending}
    jobs, gpus = Counter[str](), Counter[str]()
    _add_counts(jobs, gpus, checkpoint.pending_by_queue)
    names_all = len(pending) == jobs.total()
    youngest = (float("inf"), "") if names_all else max(map(_get_age_key, checkpoint.pending))
    at_s, generation = checkpoint.at_s, checkpoint.generation
    for change in changes:
        at_s, generation = change.at_s, change.generation
        _apply(nodes, {node.name: node for node in change.nodes}, change.removed_nodes)
        _apply(holding, {job.id: job for job in change.holding}, change.released)
        _apply(pending, {job.id: job for job in change.pending}, change.started_or_left)
        _add_counts(jobs, gpus, change.pending_by_queue)
    oldest = sorted((job for job in pending.values() if _get_age_key(job) <= youngest), key=_get_age_key)
    return PastFleet(
        at_s=at_s,
        generation=generation,
        newest_event=checkpoint.newest_event,
        nodes=tuple(node for _, node in sorted(nodes.items())),
        holding=tuple(job for _, job in sorted(holding.items())),
        pending=tuple(oldest[:PENDING_JOBS_MAX]),
        pending_by_queue={queue: (jobs[queue], gpus[queue]) for queue in sorted(jobs) if jobs[queue]},
    )


def _find_changed_jobs(previous: Snapshot, snapshot: Snapshot) -> Iterator[tuple[Job | None, Job | None]]:
    """Yield jobs before and after a change that checkpoints show. None: the job did not exist, or was archived."""
    if previous.jobs is snapshot.jobs:
        return
    for job_id, job in snapshot.jobs.items():
        before = previous.jobs.get(job_id)
        if job is not before and (before is None or not _looks_alike(before, job)):
            yield before, job
    for job_id in previous.jobs.keys() - snapshot.jobs.keys():
        yield previous.jobs[job_id], None


def _looks_alike(before: Job, after: Job) -> bool:
    return (
        before.state is after.state
        and before.allocation is after.allocation
        and before.spec is after.spec
        and before.intent is after.intent
    )


def _compare_nodes(
    previous: Snapshot, snapshot: Snapshot, jobs: Iterable[tuple[Job | None, Job | None]]
) -> tuple[tuple[PastNode, ...], tuple[str, ...]]:
    """Return the changed nodes, and the names of removed ones."""
    names = {node for before, after in jobs for node in _find_changed_hosts(before, after)}
    for mine, others in ((previous.nodes, snapshot.nodes), (previous.loans, snapshot.loans)):
        if mine is not others:
            names.update(name for name, each in others.items() if mine.get(name) is not each)
            names.update(mine.keys() - others.keys())
    changed = (name for name in sorted(names & snapshot.nodes.keys()))
    after = ((name, capture_node(snapshot, name)) for name in changed)
    rows = [row for name, row in after if name not in previous.nodes or row != capture_node(previous, name)]
    return tuple(rows), tuple(sorted(previous.nodes.keys() - snapshot.nodes.keys() if names else ()))


def _find_changed_hosts(before: Job | None, after: Job | None) -> Iterator[str]:
    old, new = _get_allocation(before), _get_allocation(after)
    if old is not new:
        yield from () if old is None else old.held
        yield from () if new is None else new.held


def _get_allocation(job: Job | None) -> Allocation | None:
    return None if job is None else job.allocation


def _count_queue_changes(before: Iterable[PastJob], after: Iterable[PastJob]) -> dict[str, tuple[int, int]]:
    jobs, gpus = Counter[str](), Counter[str]()
    for sign, records in ((-1, before), (1, after)):
        for job in records:
            jobs[job.queue] += sign
            gpus[job.queue] += sign * job.min_gpus
    return {queue: (jobs[queue], gpus[queue]) for queue in sorted(jobs) if jobs[queue] or gpus[queue]}


def _add_counts(jobs: Counter[str], gpus: Counter[str], counts: Mapping[str, tuple[int, int]]) -> None:
    for queue, (more_jobs, more_gpus) in counts.items():
        jobs[queue] += more_jobs
        gpus[queue] += more_gpus


def _apply(records: dict[str, Record], changed: Mapping[str, Record], removed: Iterable[str]) -> None:
    records.update(changed)
    for key in removed:
        records.pop(key, None)


def _get_age_key(job: PastJob) -> tuple[float, str]:
    return job.submitted_at_s, job.id
