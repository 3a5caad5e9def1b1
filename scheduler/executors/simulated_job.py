"""One simulated job as it is, beside what the desired state says of it."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.domain.job import Job
from scheduler.executors.simulated_run import SimulatedRun


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """One job as it is: the desired state last heard, its live run, and what the ended ones left behind."""

    job: Job
    live: SimulatedRun | None = None
    steps_saved: float = 0.0
    started: bool = False
    succeeded: bool = False
    generation_ended: int = 0
    extra_save_s: float = 0.0
    asked_at_s: float | None = None
