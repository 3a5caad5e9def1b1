"""SimulationTask: a simulation that a user submitted and that the service runs in the background."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TaskState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE_TASK_STATES = (TaskState.QUEUED, TaskState.RUNNING)


@dataclass(frozen=True, slots=True)
class SimulationFiles:
    """Texts of the input files. `demand` is empty if none was given."""

    jobs: str
    demand: str
    cluster: str


@dataclass(frozen=True, slots=True)
class SimulationTask:
    """A submitted simulation. `jobs_done` of `jobs_total` jobs have ended, over all policy sets.

    `playing` is the policy set that runs now. `tries` counts the attempts. `reason` says why it failed or waits for
    another attempt. `number` ascends with creation. `owner` is a display name, `owner_id` the owner's stable id.
    `description` says what a replay simulates, one sentence a line.
    """

    id: str
    owner: str
    created_at_s: float
    policies: tuple[str, ...]
    seed: int
    jobs_total: int
    state: TaskState = TaskState.QUEUED
    playing: str = ""
    jobs_done: int = 0
    tries: int = 0
    started_at_s: float | None = None
    ended_at_s: float | None = None
    reason: str = ""
    number: int = 0
    owner_id: str = ""
    description: str = ""
