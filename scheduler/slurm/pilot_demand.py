"""The pilots that pending jobs of a service can use: a pure decision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler.domain.decisions import ReasonCode
from scheduler.slurm.slurm_client import SlurmJob

_COMING_STATES = ("PENDING", "CONFIGURING", "RUNNING")
REASONS_OF_SHORTAGE = (
    ReasonCode.INSUFFICIENT_GPUS,
    ReasonCode.NO_MATCHING_FLAVOR,
    ReasonCode.TOPOLOGY_PLACEMENT_FAILED,
    ReasonCode.HELD_BY_MINIMUM_RUNTIME,
    ReasonCode.BEHIND_HEAD_OF_QUEUE,
)
"""Reasons of jobs that more nodes can start. A job that waits for a quota, a secret, a volume or the end of its backoff
would leave them idle."""


@dataclass(frozen=True, slots=True)
class PilotLimits:
    """Limits of automatic submission.

    Args:
        nodes_max: nodes of all pilots of the pool together, pending ones included.
        gpus_per_node: GPUs that each new node has.
    """

    nodes_max: int
    gpus_per_node: int

    def count_nodes(self, gpus: int) -> int:
        """Return the new nodes that have this many GPUs together."""
        return math.ceil(gpus / self.gpus_per_node)


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A pending job that the GPU model of the new nodes can serve.

    Args:
        min_gpus: smallest number of GPUs that it starts on.
    """

    queue: str
    min_gpus: int
    reason: ReasonCode

    @property
    def can_use_free_gpus(self) -> bool:
        """Whether free GPUs count for the job. They lie too far apart for one whose placement failed."""
        return self.reason is not ReasonCode.TOPOLOGY_PLACEMENT_FAILED


@dataclass(frozen=True, slots=True)
class PilotSupply:
    """GPUs that pending jobs get without another pilot.

    Args:
        free_gpus: GPUs that no job holds.
        coming_nodes: nodes of submitted pilots that have not joined yet.
        submitted_nodes: nodes of all pilots of the pool that have not ended.
    """

    free_gpus: int
    coming_nodes: int
    submitted_nodes: int


@dataclass(frozen=True, slots=True)
class PilotProposal:
    """Pilots to submit, as their numbers of nodes. `wanted` are those without the cap.

    Args:
        pending_gpus: smallest number of GPUs of all jobs that pilots can start.
    """

    pilots: tuple[int, ...]
    wanted: tuple[int, ...]
    pending_gpus: int


def count_coming_nodes(pilots: Iterable[SlurmJob], machines: Iterable[str]) -> int:
    """Return how many nodes of the pilots have not joined yet.

    Args:
        machines: names of all machines that ever joined, so that a node that has left again is not awaited.
    """
    joined = Counter(name.split("-")[1] for name in machines if name.startswith("slurm-"))
    return sum(max(0, job.nodes - joined[job.id]) for job in pilots if job.state in _COMING_STATES)


def select_startable_jobs(
    jobs: Sequence[PendingJob], limits: PilotLimits, headroom: Mapping[str, int]
) -> list[PendingJob]:
    """Return the jobs that pilots within the cap can start, in order.

    Args:
        headroom: GPUs that the jobs of a queue may get in addition, of queues with a limit.
    """
    left = dict(headroom)
    startable = []
    for job in jobs:
        if limits.count_nodes(job.min_gpus) > limits.nodes_max or job.min_gpus > left.get(job.queue, job.min_gpus):
            continue
        if job.queue in left:
            left[job.queue] -= job.min_gpus
        startable.append(job)
    # Jobs behind the head of a queue start only if the head does, which may need another GPU model.
    has_head = any(job.reason is not ReasonCode.BEHIND_HEAD_OF_QUEUE for job in startable)
    return startable if has_head else []


def propose_pilots(jobs: Iterable[PendingJob], supply: PilotSupply, limits: PilotLimits) -> PilotProposal:
    """Return the pilots to submit for these jobs, in their order.

    Nodes that are still coming count as if they were there already, so no demand is submitted twice. A job that needs
    several nodes gets them from one pilot, because nodes of several may never be there at the same time.
    """
    free_gpus, coming_gpus = supply.free_gpus, supply.coming_nodes * limits.gpus_per_node
    wanted: list[int] = []
    pending_gpus = 0
    for job in jobs:
        usable_gpus = free_gpus if job.can_use_free_gpus else 0
        if job.min_gpus > usable_gpus + coming_gpus:
            nodes = limits.count_nodes(job.min_gpus)
            wanted.append(nodes)
            coming_gpus += nodes * limits.gpus_per_node
            usable_gpus = usable_gpus if nodes == 1 else 0
        taken_gpus = min(job.min_gpus, usable_gpus)
        free_gpus -= taken_gpus
        coming_gpus -= job.min_gpus - taken_gpus
        pending_gpus += job.min_gpus
    room = limits.nodes_max - supply.submitted_nodes
    return PilotProposal(_cap(wanted, room), tuple(wanted), pending_gpus)


def _cap(wanted: Iterable[int], room: int) -> tuple[int, ...]:
    """Return the first pilots that fit into `room` nodes. None passes one before it, whose nodes it would take."""
    chosen: list[int] = []
    for nodes in wanted:
        room -= nodes
        if room < 0:
            break
        chosen.append(nodes)
    return tuple(chosen)
