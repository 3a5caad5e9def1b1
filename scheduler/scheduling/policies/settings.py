"""The numbers that all policies share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState

RECONFIGURATION_S = 30.0
"""Assumed cost of a start or resize, unless configured otherwise; the resize pause is meant for jobs of this cost."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Numbers that all policies share. Times are in seconds.

    Attributes:
        full_pass_period_s: longest pause between ticks that consider lending and flexible GPUs.
        reconfiguration_s: cost of a start or resize for a job whose model is not in `reconfiguration_s_by_model`.
        leave_grace_s: minimum time that workers have to save and exit if no return deadline applies.
        ageing_s: waiting this long halves a job's apparent length.
        patience_ageings: after this many `ageing_s` of waiting a job is overdue, and no other job may pass it.
        resize_pause_s: minimum time between two voluntary resizes of a job whose reconfiguration costs
            `RECONFIGURATION_S` or less; longer in proportion for others.
        demand_stale_s: a demand reading older than this permits no new loan, unless its pool has its own value.
        run_time_min_s: time that a job runs before it can be preempted, except by a recall, the loss of a node or
            its owner.
        las_promote_ratio: under `las`, a job that waits this many times as long as it has run returns to the first
            queue; 0: never.
        gain_factor: a resize must save this many times its reconfiguration; also the price for running jobs when GPUs
            are redistributed.
        linear_scaling: assume linear scaling of every job, whatever its curve says, to measure the value of curves.
        lending_reserve: free GPUs that lending adds for future jobs when a job can use the GPU model, as a share of
            training's GPUs of the model.
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
        """Return the seconds that a start or resize costs this job."""
        return self.reconfiguration_s_by_model.get(job.spec.model, self.reconfiguration_s)

    def leave_grace_s_for(self, job: Job) -> float:
        """Return the seconds that this job's workers have to save and exit.

        They suffice for the current step and for saving. A script that saves at intervals alone has the time of one.
        """
        step_s = job.step_time_s() if job.state is JobState.RUNNING else 0.0
        checkpoint = job.spec.checkpoint
        interval_s = checkpoint.interval_s if checkpoint.path and not checkpoint.signal else 0.0
        return max(self.leave_grace_s, interval_s + step_s + self.reconfiguration_s_for(job))

    def resize_pause_s_for(self, job: Job) -> float:
        """Return the minimum time between two voluntary resizes of this job.

        It grows with the job's reconfiguration time, so that every job spends the same share of its time on resizes.
        """
        return self.resize_pause_s * max(1.0, self.reconfiguration_s_for(job) / RECONFIGURATION_S)
