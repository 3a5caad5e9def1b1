"""Job states with their transitions, and the allocation of a job."""

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
    (_S.SUBMITTED, _S.PLANNING): "its scaling curve is not solved yet",
    (_S.SUBMITTED, _S.QUEUED): "its scaling curve is solved",
    (_S.SUBMITTED, _S.SUSPENDED): "suspended by its owner",
    (_S.SUBMITTED, _S.FAILED): "no plan fits any GPU of the fleet",
    (_S.SUBMITTED, _S.CANCELLED): "cancelled by its owner",
    (_S.PLANNING, _S.QUEUED): "the shape of its minimum is solved",
    (_S.PLANNING, _S.SUCCEEDED): "workers finished before they received the notice to leave",
    (_S.PLANNING, _S.FAILED): "no plan fits any GPU of the fleet",
    (_S.PLANNING, _S.SUSPENDED): "suspended by its owner",
    (_S.PLANNING, _S.CANCELLED): "cancelled by its owner",
    (_S.QUEUED, _S.PLANNING): "it ran out of memory, or nodes refused its pods; it waits for its backoff to expire",
    (_S.QUEUED, _S.STARTING): "it received GPUs",
    (_S.QUEUED, _S.SUCCEEDED): "workers finished before they received the notice to leave",
    (_S.QUEUED, _S.FAILED): "no plan fits any GPU of the fleet",
    (_S.QUEUED, _S.SUSPENDED): "suspended by its owner",
    (_S.QUEUED, _S.CANCELLED): "cancelled by its owner",
    (_S.STARTING, _S.RUNNING): "all workers run",
    (_S.STARTING, _S.RESIZING): "a node on which it was starting must be vacated",
    (_S.STARTING, _S.PREEMPTED): "preempted before it ran",
    (_S.STARTING, _S.QUEUED): "its workers failed; retries remain",
    (_S.STARTING, _S.PLANNING): "its workers ran out of memory; it needs another plan",
    (_S.STARTING, _S.SUSPENDED): "suspended by its owner",
    (_S.STARTING, _S.SUCCEEDED): "it finished between two observations",
    (_S.STARTING, _S.FAILED): "its workers failed; no retries remain",
    (_S.STARTING, _S.CANCELLED): "cancelled by its owner",
    (_S.RUNNING, _S.RESIZING): "its GPUs or its plan changed",
    (_S.RUNNING, _S.PREEMPTED): "preempted",
    (_S.RUNNING, _S.QUEUED): "its workers failed; retries remain",
    (_S.RUNNING, _S.PLANNING): "its workers ran out of memory; it needs another plan",
    (_S.RUNNING, _S.SUSPENDED): "suspended by its owner",
    (_S.RUNNING, _S.SUCCEEDED): "it finished",
    (_S.RUNNING, _S.FAILED): "its workers failed; no retries remain",
    (_S.RUNNING, _S.CANCELLED): "cancelled by its owner",
    (_S.RESIZING, _S.RUNNING): "all workers of the new plan run",
    (_S.RESIZING, _S.RESIZING): "a second recall changes its target",
    (_S.RESIZING, _S.PREEMPTED): "preempted",
    (_S.RESIZING, _S.QUEUED): "its workers failed; retries remain",
    (_S.RESIZING, _S.PLANNING): "its workers ran out of memory; it needs another plan",
    (_S.RESIZING, _S.SUSPENDED): "suspended by its owner",
    (_S.RESIZING, _S.SUCCEEDED): "it finished before its deadline to leave",
    (_S.RESIZING, _S.FAILED): "its workers failed; no retries remain",
    (_S.RESIZING, _S.CANCELLED): "cancelled by its owner",
    (_S.PREEMPTED, _S.QUEUED): "its GPUs were observed free",
    (_S.PREEMPTED, _S.SUSPENDED): "suspended by its owner",
    (_S.PREEMPTED, _S.SUCCEEDED): "it finished before its deadline to leave",
    (_S.PREEMPTED, _S.CANCELLED): "cancelled by its owner",
    (_S.SUSPENDED, _S.QUEUED): "resumed by its owner",
    (_S.SUSPENDED, _S.SUCCEEDED): "it finished before its deadline to leave",
    (_S.SUSPENDED, _S.CANCELLED): "cancelled by its owner",
}


@dataclass(frozen=True, slots=True)
class Allocation:
    """The GPUs of a job, and the plan that it runs on them.

    `target` are the GPUs of generation `generation` of the workers, under `plan`. `seats` is the GPU of each rank;
    empty means the order of `Snapshot.rank_placement`. `releasing` are GPUs of earlier generations that no executor has
    observed as free yet; they count as held. Workers that must move have until `leave_by_s`. The snapshot of generation
    `asked_at_generation` requested the release, so older observations do not confirm it. After a restore from a backup,
    generations up to `skipped_generation` may have been issued; the next one is later.
    """

    generation: int = 0
    target: Gpus = field(default_factory=dict)
    releasing: Gpus = field(default_factory=dict)
    plan: ParallelPlan | None = None
    leave_by_s: float | None = None
    asked_at_generation: int = 0
    seats: RankPlacement = ()
    skipped_generation: int = 0

    @property
    def next_generation(self) -> int:
        return max(self.generation, self.skipped_generation) + 1

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
