"""What the API tells of simulations."""

from __future__ import annotations

from typing_extensions import TypedDict

from scheduler.domain.simulation_task import SimulationTask, TaskState


class SimulationProgressView(TypedDict):
    """Jobs that have ended, over all policy sets. `playing` is the policy set that is played now, empty: none is."""

    fraction: float
    jobs_done: int
    jobs_total: int
    playing: str


class SimulationView(TypedDict):
    """`state`: queued, running, succeeded, failed or cancelled. `reason` says why it failed, or waits again."""

    id: str
    owner: str
    state: str
    policies: list[str]
    seed: int
    created_at_s: float
    started_at_s: float | None
    ended_at_s: float | None
    progress: SimulationProgressView
    tries: int
    reason: str


def simulation_view(task: SimulationTask) -> SimulationView:
    return {
        "id": task.id,
        "owner": task.owner,
        "state": task.state.value,
        "policies": list(task.policies),
        "seed": task.seed,
        "created_at_s": task.created_at_s,
        "started_at_s": task.started_at_s,
        "ended_at_s": task.ended_at_s,
        "progress": {
            "fraction": 1.0 if task.state is TaskState.SUCCEEDED else task.jobs_done / task.jobs_total,
            "jobs_done": task.jobs_done,
            "jobs_total": task.jobs_total,
            "playing": task.playing,
        },
        "tries": task.tries,
        "reason": task.reason,
    }
