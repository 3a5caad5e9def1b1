"""SimulationTask: a simulation that somebody handed in, which a process of the service plays in the background."""

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
    """The texts of the files; `demand` is empty where none was given."""

    jobs: str
    demand: str
    cluster: str


@dataclass(frozen=True, slots=True)
class SimulationTask:
    """`jobs_done` of `jobs_total` jobs have ended, over all policy sets; `playing` is the one that is played now. It
    was begun `tries` times. `reason` says why it failed, or waits again. `number` ascends with creation."""

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
