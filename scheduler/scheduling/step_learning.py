"""Learning from the steps of running jobs: what is recorded of them, and what it says about a job's plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from scheduler.domain.fleet import Node
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.step_measurements import (
    StepMeasurement,
    build_measurements_key,
    get_gpu,
    record_measurement,
)
from scheduler.learning.owner_pooling import predict_for_owner
from scheduler.learning.plan_features import PlanFeatures, describe_layout
from scheduler.learning.step_time_posterior import StepTimeFactor
from scheduler.scheduling.mutable_snapshot import MutableSnapshot

MEASUREMENT_S_MIN = 120.0
"""Run time under a plan after which its step counts as measured. Drifts of 5 s are corrected, so it is within 4%."""


def record_step_times(snapshot: MutableSnapshot) -> None:
    """Record the measured steps of running jobs that have changed in this tick."""
    for job_id in sorted(snapshot.jobs.changed_keys):
        job = snapshot.jobs.get(job_id)
        if job is None or not _is_measured(job, snapshot.now_s):
            continue
        if (plan := _describe_plan(snapshot.nodes, job)) is not None:
            key, features = plan
            row = StepMeasurement.from_ratio(
                job.id, job.owner_key, features.terms, features.layout, job.progress.correction
            )
            snapshot.step_measurements = record_measurement(snapshot.step_measurements, key, row, snapshot.now_s)


def _is_measured(job: Job, now_s: float) -> bool:
    """Return whether the job's correction is that of its current plan."""
    return (
        job.state is JobState.RUNNING
        and job.progress.is_reported
        and not job.freezing.needs_new_plan
        and now_s - job.state_since_s >= MEASUREMENT_S_MIN
    )


def predict_step_factor(snapshot: Snapshot, job: Job) -> StepTimeFactor | None:
    """Return what all jobs but this one say about its current plan: the factor for the predicted step.

    None if the job has no plan that the cost model predicted.
    """
    if (plan := _describe_plan(snapshot.nodes, job)) is None:
        return None
    model, features = plan
    measured: defaultdict[str, dict[str, tuple[StepMeasurement, ...]]] = defaultdict(dict)
    for key, known in sorted(snapshot.step_measurements.items()):
        for row in known.rows if get_gpu(key) == job.allocated_gpu else ():
            if row.job != job.id:
                measured[row.owner][key] = (*measured[row.owner].get(key, ()), row)
    return predict_for_owner(measured, job.owner_key, model, features)


def _describe_plan(nodes: Mapping[str, Node], job: Job) -> tuple[str, PlanFeatures] | None:
    """Return the key of the job's model on its GPU model, and the features of its plan.

    None if the cost model has not predicted the plan, or the plan mixes GPU models, or a node of the job is gone.
    """
    plan, request, target = job.allocation.plan, job.spec.curve_request, job.allocation.target
    if plan is None or request is None or not plan.terms or plan.is_mixed or not target.keys() <= nodes.keys():
        return None
    shape = GpuShape.from_node_counts((nodes[name].gpu, len(indices)) for name, indices in target.items())
    return build_measurements_key(job.allocated_gpu, request), PlanFeatures(plan.terms, describe_layout(plan, shape))
