"""The states a job may pass through, and every step between them with its reason.

Allocation: which GPUs a job has, which it is leaving, and the plan it runs on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import Gpus, RankPlacement
from scheduler.domain.parallel_plan import ParallelPlan


class JobState(StrEnum):
    SUBMITTED = "submitted"
    PLANNING = "planning"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    RESIZING = "resizing"
    PREEMPTED = "preempted"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
PLACED_STATES = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RESIZING})
WAITING_STATES = frozenset({JobState.SUBMITTED, JobState.PLANNING, JobState.QUEUED, JobState.PREEMPTED})

_S = JobState
JOB_TRANSITIONS: dict[tuple[JobState, JobState], str] = {
    (_S.SUBMITTED, _S.PLANNING): "its scaling curve has to be solved first",
    (_S.SUBMITTED, _S.QUEUED): "its curve is known already",
    (_S.SUBMITTED, _S.SUSPENDED): "suspended by its owner",
    (_S.SUBMITTED, _S.FAILED): "no plan fits any GPU of the fleet",
    (_S.SUBMITTED, _S.CANCELLED): "cancelled by its owner",
    (_S.PLANNING, _S.QUEUED): "the shape of its minimum is solved",
    (_S.PLANNING, _S.SUCCEEDED): "workers that were told to leave had finished",
    (_S.PLANNING, _S.FAILED): "no plan fits any GPU of the fleet",
    (_S.PLANNING, _S.SUSPENDED): "suspended by its owner",
    (_S.PLANNING, _S.CANCELLED): "cancelled by its owner",
    (_S.QUEUED, _S.PLANNING): "it died of memory a moment ago and has to pause",
    (_S.QUEUED, _S.STARTING): "it was given GPUs",
    (_S.QUEUED, _S.SUCCEEDED): "workers that were told to leave had finished",
    (_S.QUEUED, _S.FAILED): "no plan fits any GPU of the fleet",
    (_S.QUEUED, _S.SUSPENDED): "suspended by its owner",
    (_S.QUEUED, _S.CANCELLED): "cancelled by its owner",
    (_S.STARTING, _S.RUNNING): "all its workers run",
    (_S.STARTING, _S.RESIZING): "a node it was starting on has to be left",
    (_S.STARTING, _S.PREEMPTED): "its GPUs were needed back before it ran",
    (_S.STARTING, _S.QUEUED): "its workers died and it may try again",
    (_S.STARTING, _S.PLANNING): "its workers died of memory: it needs another plan",
    (_S.STARTING, _S.SUSPENDED): "suspended by its owner",
    (_S.STARTING, _S.SUCCEEDED): "it finished between two looks",
    (_S.STARTING, _S.FAILED): "its workers died too often",
    (_S.STARTING, _S.CANCELLED): "cancelled by its owner",
    (_S.RUNNING, _S.RESIZING): "its GPUs or its plan changed",
    (_S.RUNNING, _S.PREEMPTED): "its GPUs were needed back",
    (_S.RUNNING, _S.QUEUED): "its workers died and it may try again",
    (_S.RUNNING, _S.PLANNING): "its workers died of memory: it needs another plan",
    (_S.RUNNING, _S.SUSPENDED): "suspended by its owner",
    (_S.RUNNING, _S.SUCCEEDED): "it finished",
    (_S.RUNNING, _S.FAILED): "its workers died too often",
    (_S.RUNNING, _S.CANCELLED): "cancelled by its owner",
    (_S.RESIZING, _S.RUNNING): "all workers of the new plan run",
    (_S.RESIZING, _S.RESIZING): "a second recall retargets it",
    (_S.RESIZING, _S.PREEMPTED): "its GPUs were needed back",
    (_S.RESIZING, _S.QUEUED): "its workers died and it may try again",
    (_S.RESIZING, _S.PLANNING): "its workers died of memory: it needs another plan",
    (_S.RESIZING, _S.SUSPENDED): "suspended by its owner",
    (_S.RESIZING, _S.SUCCEEDED): "it finished before it had to leave",
    (_S.RESIZING, _S.FAILED): "its workers died too often",
    (_S.RESIZING, _S.CANCELLED): "cancelled by its owner",
    (_S.PREEMPTED, _S.QUEUED): "its GPUs were seen free",
    (_S.PREEMPTED, _S.SUSPENDED): "suspended by its owner",
    (_S.PREEMPTED, _S.SUCCEEDED): "it finished before it had to leave",
    (_S.PREEMPTED, _S.CANCELLED): "cancelled by its owner",
    (_S.SUSPENDED, _S.QUEUED): "resumed by its owner",
    (_S.SUSPENDED, _S.SUCCEEDED): "it finished before it had to leave",
    (_S.SUSPENDED, _S.CANCELLED): "cancelled by its owner",
}


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
    seats: RankPlacement = ()

    @property
    def held(self) -> Gpus:
        return gpu_sets.union(self.target, self.releasing)

    @property
    def held_gpus(self) -> int:
        return gpu_sets.count(self.target) + gpu_sets.count(self.releasing)

    @property
    def target_gpus(self) -> int:
        return gpu_sets.count(self.target)


NO_ALLOCATION = Allocation()
