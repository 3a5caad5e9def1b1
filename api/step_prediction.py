"""The step of a job as it was predicted, as other jobs make it likely, and as it is measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.step_learning import predict_step_factor


class StepPredictionView(TypedDict):
    """Seconds per step of the current plan. `expected_s` and `interval_s` use the measured steps of other jobs."""

    predicted_s: Annotated[float, Field(description="By the cost model, with the constants that were known then.")]
    expected_s: Annotated[
        float | None,
        Field(
            description="Median of the posterior given the measured steps of other jobs. Null: no model, no GPUs, or a "
            "plan on several GPU models."
        ),
    ]
    interval_s: Annotated[
        tuple[float, float] | None,
        Field(description="Seconds between which a measured step lies in 80% of cases. Null as `expected_s`."),
    ]
    measured_s: Annotated[float | None, Field(description="By the job's own reports. Null: it has never reported.")]


def step_prediction_view(job: Job, snapshot: Snapshot, predicted_s: float) -> StepPredictionView:
    """Return the step times of a job that has a plan."""
    plan = job.allocation.plan
    factor = predict_step_factor(snapshot, job) if job.allocation.target else None
    profile_s = plan.profile_time_s if plan is not None else 0.0
    low, high = factor.interval if factor is not None else (0.0, 0.0)
    return {
        "predicted_s": predicted_s,
        "expected_s": None if factor is None else profile_s * factor.mean,
        "interval_s": None if factor is None else (profile_s * low, profile_s * high),
        "measured_s": predicted_s * job.progress.correction if job.has_reported else None,
    }
