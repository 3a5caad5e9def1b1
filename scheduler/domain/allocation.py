"""Allocation: which GPUs a job has, which it is leaving, and the plan it runs on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.domain import gpus as gpu_sets
from scheduler.domain.gpus import Gpus, Seats
from scheduler.domain.parallel_plan import ParallelPlan


@dataclass(frozen=True, slots=True)
class Allocation:
    """`target` is where generation `generation` of the job's workers belongs, under `plan`.

    `seats` is the GPU of each rank, all of `target`; empty means the order in which `Snapshot.seats_of` lists them.
    `releasing` are GPUs of earlier generations that no executor has yet seen free: they count as held.
    Workers that must move have until `leave_by_s`. The release was asked for by the snapshot of generation
    `asked_at_generation`: an observation older than that says nothing about it.
    """

    generation: int = 0
    target: Gpus = field(default_factory=dict)
    releasing: Gpus = field(default_factory=dict)
    plan: ParallelPlan | None = None
    leave_by_s: float | None = None
    asked_at_generation: int = 0
    seats: Seats = ()

    @property
    def held(self) -> Gpus:
        return gpu_sets.union(self.target, self.releasing)

    @property
    def held_gpus(self) -> int:
        return gpu_sets.count(self.target) + gpu_sets.count(self.releasing)

    @property
    def target_gpus(self) -> int:
        return gpu_sets.count(self.target)


EMPTY_ALLOCATION = Allocation()
