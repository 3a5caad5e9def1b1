"""Placement policies: best-fit decreasing over nodes, with one GPU model per job."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import FreeGpus, Gpus
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot


def filter_usable(job: Job, rooms: Iterable[FreeGpus]) -> list[FreeGpus]:
    """Return the free GPUs that `job` may take: of its GPU model, and lent ones only if it accepts them."""
    gpu, fungible = job.spec.gpu, job.accepts_lent_nodes
    return [room for room in rooms if (fungible or not room.is_lent) and (not gpu or room.gpu == gpu)]


def best_fit(snapshot: Snapshot, rooms: Iterable[FreeGpus], job: Job, count: int) -> Gpus | None:
    """Return `count` more GPUs for `job`, or None if there are not enough.

    A job's base prefers nodes that training owns; GPUs above its minimum prefer lent nodes, so that a recall takes
    flexible workers first (Lyra, EuroSys'23, section 5.3). Within a class, the tightest single node is taken, else the
    emptiest nodes first, so that whole NVLink domains are used.
    """
    grows = gpu_sets.count(job.allocation.target) >= job.spec.min_gpus
    return _best_fit(snapshot, rooms, job, count, prefer_lent=grows)


def owned_first(snapshot: Snapshot, rooms: Iterable[FreeGpus], job: Job, count: int) -> Gpus | None:
    """Place as `best_fit`, but always prefer nodes that training owns, because no recall disturbs them.

    A recall then finds unused lent nodes more often.
    """
    return _best_fit(snapshot, rooms, job, count, prefer_lent=False)


def _best_fit(snapshot: Snapshot, rooms: Iterable[FreeGpus], job: Job, count: int, *, prefer_lent: bool) -> Gpus | None:
    current = job.allocation.target
    for of_model in group_by_model(snapshot, filter_usable(job, rooms), current):
        if sum(len(room.indices) for room in of_model) >= count:
            return _pack(of_model, count, prefer_lent=prefer_lent, beside=current)
    return None


def group_by_model(snapshot: Snapshot, rooms: Iterable[FreeGpus], current: Gpus) -> list[list[FreeGpus]]:
    """Return the free GPUs by GPU model, the model with most first; only the current model for a job that has one."""
    models = {snapshot.nodes[node].gpu for node in current if node in snapshot.nodes}
    groups: dict[str, list[FreeGpus]] = {}
    for room in rooms:
        if not models or room.gpu in models:
            groups.setdefault(room.gpu, []).append(room)
    return sorted(groups.values(), key=lambda group: (-sum(len(room.indices) for room in group), group[0].gpu))


def _pack(candidates: list[FreeGpus], count: int, *, prefer_lent: bool, beside: Gpus) -> Gpus:
    taken: dict[str, tuple[int, ...]] = {}
    for lent in (prefer_lent, not prefer_lent):
        group = [room for room in candidates if room.is_lent is lent]
        wanted = count - gpu_sets.count(taken)
        if wanted and sum(len(room.indices) for room in group) >= wanted:
            taken.update(_fit(group, wanted, beside))
            return taken
        if wanted:
            taken.update({room.node: room.indices for room in group})
    assert gpu_sets.count(taken) == count, "the caller checked that there are enough GPUs"
    return taken


def _fit(group: list[FreeGpus], count: int, beside: Gpus) -> Gpus:
    """Return `count` GPUs of a group that has them: the tightest single node, else the emptiest nodes first."""
    taken: dict[str, tuple[int, ...]] = {}
    emptiest_first = sorted(group, key=lambda room: (-len(room.indices), room.node not in beside, room.node))
    for room in emptiest_first:
        wanted = count - gpu_sets.count(taken)
        if wanted <= 0:
            break
        tight = [r for r in emptiest_first if r.node not in taken and len(r.indices) >= wanted]
        if tight:
            best = min(tight, key=lambda r: (len(r.indices), r.node not in beside, r.node))
            taken[best.node] = best.indices[:wanted]
        else:
            taken[room.node] = room.indices
    return taken
