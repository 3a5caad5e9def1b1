"""The few numbers that all policies share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState

RECONFIGURATION_S = 30.0
"""What a start or resize is taken to cost where nobody says otherwise, and what the resize pause is meant for."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """`full_pass_period_s`: longest pause between ticks that consider lending and flexible GPUs.
    `reconfiguration_s`: what a start or resize costs a job whose model is not in `reconfiguration_s_by_model`.
    `leave_grace_s`: how long workers may at least take to save and leave where no return deadline says otherwise.
    `ageing_s`: waiting this long halves a job's apparent length. `patience_ageings`: after so many `ageing_s` of
    waiting a job is overdue, and nobody passes it any more. `resize_pause_s`: least time between two resizes that
    nobody was forced into, of a job that a reconfiguration costs `RECONFIGURATION_S` or less; longer in proportion
    for others. `demand_stale_s`: a demand reading older than this permits no new loan, where its pool
    says nothing else. `run_time_min_s`: least time that a job runs before anything but a recall, the loss of a node or
    its owner may preempt it.
    `las_promote_ratio`: under `las`, a job that waits so many times as long as it has run begins anew in the first
    queue; 0: never. `gain_factor`: how many times its reconfiguration a resize has to save, and a running job pays
    when GPUs are dealt out anew. `linear_scaling`: take every job's scaling for linear, whatever its curve says, to
    see what curves are worth.
    `lending_reserve`: free GPUs that lending keeps ready for jobs to come, as a share of those that training has.
    """

    full_pass_period_s: float = 300.0
    reconfiguration_s: float = RECONFIGURATION_S
    leave_grace_s: float = 60.0
    ageing_s: float = 3600.0
    patience_ageings: float = 12.0
    resize_pause_s: float = 120.0
    demand_stale_s: float = 1800.0
    run_time_min_s: float = 600.0
    las_promote_ratio: float = 0.0
    gain_factor: float = 2.0
    linear_scaling: bool = False
    lending_reserve: float = 0.25
    reconfiguration_s_by_model: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name == "reconfiguration_s_by_model":
                continue
            value = getattr(self, item.name)
            if not 0 <= value < float("inf") or (value == 0 and item.name in ("full_pass_period_s", "ageing_s")):
                raise ValueError(f"{item.name} must be a positive, finite number, got {value}")

    def reconfiguration_s_for(self, job: Job) -> float:
        """Seconds that a start or resize costs this job."""
        return self.reconfiguration_s_by_model.get(job.spec.model, self.reconfiguration_s)

    def leave_grace_s_for(self, job: Job) -> float:
        """Seconds that this job's workers have to save and leave: enough for the step that they are in, and for what
        saving takes of a reconfiguration."""
        step_s = job.step_time_s() if job.state is JobState.RUNNING else 0.0
        return max(self.leave_grace_s, step_s + self.reconfiguration_s_for(job))

    def resize_pause_s_for(self, job: Job) -> float:
        """Seconds that this job runs undisturbed between two resizes that nobody was forced into, so that it spends
        the same share of its time on them however long one takes."""
        return self.resize_pause_s * max(1.0, self.reconfiguration_s_for(job) / RECONFIGURATION_S)
