"""EASY backfilling: which jobs may pass the first pending job that does not fit, without delaying it.

Sources: Lifka, JSSPP'95; Mu'alem and Feitelson, TPDS'01. The expected ends of running jobs give the time at which the
first pending job can start, and how many GPUs are left over then. A later job may start now if it ends before that time
or fits into the left-over GPUs. GPUs that elastic jobs hold above their starting count are treated as free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.snapshot_index import GpuKind

CountStartingGpus = Callable[[Snapshot, Job, Mapping[str, int], str | None], int]
"""The GPUs that a job starts on: snapshot, job, GPUs of a node of each model, and the model or None for its own."""


@dataclass(slots=True)
class Reservation:
    """The start of a pending job: at `start_at_s` on GPUs of `model`, of which `extra_gpus` are left over.

    Mutable: jobs that start in the meantime use up the extra GPUs.
    """

    job_id: str
    start_at_s: float
    model: str
    extra_gpus: int

    def permits(self, model: str, gpus: int, end_s: float) -> bool:
        """Return whether a job that ends at `end_s` can start on these GPUs without delaying the reserved start."""
        return model != self.model or end_s <= self.start_at_s or gpus <= self.extra_gpus

    def charge(self, model: str, gpus: int, end_s: float) -> None:
        """Count a job that starts on these GPUs."""
        if model == self.model and end_s > self.start_at_s:
            self.extra_gpus -= gpus


class Backfill(Protocol):
    """Make the reservation of a job that needs `need` GPUs of `kinds`, all of one model, while `free` can be had.

    `nodes` are the only ones that the job can use, None for all.
    """

    def __call__(
        self,
        snapshot: Snapshot,
        job: Job,
        kinds: Collection[GpuKind],
        need: int,
        free: int,
        *,
        starting_gpus: CountStartingGpus,
        nodes: frozenset[str] | None = None,
    ) -> Reservation | None: ...


def reserve_earliest_start(
    snapshot: Snapshot,
    job: Job,
    kinds: Collection[GpuKind],
    need: int,
    free: int,
    *,
    starting_gpus: CountStartingGpus,
    nodes: frozenset[str] | None = None,
) -> Reservation | None:
    """Reserve the earliest start, or return None if too few running jobs have a known end."""
    (model,) = {model for model, _ in kinds}
    extra, at_s, sizes = free - need, snapshot.now_s, snapshot.typical_node_sizes
    for end_s, job_id in _list_expected_ends(snapshot) if extra < 0 else ():
        ending = snapshot.jobs[job_id]
        held = _count_held(snapshot, ending, kinds, nodes)
        base = min(held, starting_gpus(snapshot, ending, sizes, None)) if held else 0
        extra, at_s = extra + base, end_s
        if extra >= 0:
            break
    return Reservation(job.id, at_s, model, extra) if extra >= 0 else None


def estimate_end_s(job: Job, now_s: float) -> float:
    """Return when a running job ends at its current speed, infinity if its length is unknown."""
    steps = job.remaining_steps(now_s)
    return inf if steps is None else now_s + steps * job.step_time_s()


def _list_expected_ends(snapshot: Snapshot) -> list[tuple[float, str]]:
    running = map(snapshot.jobs.__getitem__, snapshot.index.running)
    ends = ((estimate_end_s(job, snapshot.now_s), job.id) for job in running)
    return sorted(end for end in ends if end[0] < inf)


def _count_held(snapshot: Snapshot, job: Job, kinds: Collection[GpuKind], among: frozenset[str] | None) -> int:
    """Count the GPUs of these kinds that a job holds, on the nodes `among` only if given."""
    held = job.allocation.target.items()
    nodes = ((snapshot.nodes.get(name), len(indices)) for name, indices in held if among is None or name in among)
    return sum(gpus for node, gpus in nodes if node is not None and (node.gpu, snapshot.is_lent(node)) in kinds)
