"""Learning from the steps of running jobs: what is recorded of them, and what it says about a job's plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial

from scheduler.domain.fleet import Node
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.learned_constants import ADJUSTABLE_TERMS, LearnedConstants, settle_levels
from scheduler.domain.parallel_plan import STEP_TERMS
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.step_measurements import (
    ModelMeasurements,
    StepMeasurement,
    build_measurements_key,
    get_gpu,
    record_measurement,
)
from scheduler.learning.owner_pooling import estimate_own_constants, predict_for_owner
from scheduler.learning.plan_features import PlanFeatures, describe_layout
from scheduler.learning.step_time_posterior import StepTimeFactor
from scheduler.scheduling.mutable_snapshot import MutableSnapshot

MEASUREMENT_S_MIN = 120.0
"""Run time under a plan after which its step counts as measured. Drifts of 5 s are corrected, so it is within 4%."""
MEMORY_PLANS_MIN = 2
"""Measured plans of a model from which less memory than predicted is expected."""

OwnRows = tuple[tuple[str, tuple[tuple[str, tuple[StepMeasurement, ...]], ...]], ...]
"""Measured plans of one owner: pairs (GPU model, pairs (key of measurements, rows))."""


def record_step_times(snapshot: MutableSnapshot) -> None:
    """Record the measured steps of running jobs that have changed in this tick."""
    for job_id in sorted(snapshot.jobs.changed_keys):
        job = snapshot.jobs.get(job_id)
        if job is None or not _is_measured(job, snapshot.now_s):
            continue
        if (plan := _describe_plan(snapshot.nodes, job)) is not None:
            key, features = plan
            row = StepMeasurement.from_ratio(job.id, job.owner_key, features.terms, features.layout, _get_ratio(job))
            row = row.with_memory(_get_memory_ratio(job))
            snapshot.step_measurements = record_measurement(snapshot.step_measurements, key, row, snapshot.now_s)


def _is_measured(job: Job, now_s: float) -> bool:
    """Return whether the job's correction is that of its current plan."""
    return (
        job.state is JobState.RUNNING
        and job.progress.is_reported
        and not job.freezing.needs_new_plan
        and now_s - job.state_since_s >= MEASUREMENT_S_MIN
    )


def _get_ratio(job: Job) -> float:
    """Return the measured step of the job's plan over that predicted by the GPU profiles."""
    plan = job.allocation.plan
    assert plan is not None, "a job with a described plan has one"
    return job.progress.correction * plan.iteration_time_s / plan.profile_time_s


def _get_memory_ratio(job: Job) -> float:
    """Return the measured peak memory of the job's plan over the predicted one, or 0 if either is unknown."""
    plan, measured = job.allocation.plan, job.progress.peak_bytes
    return measured / plan.peak_bytes_per_gpu if plan is not None and plan.peak_bytes_per_gpu and measured else 0.0


def learn_constants(snapshot: MutableSnapshot) -> None:
    """Give live jobs the constants that the measured steps of their owner say.

    Jobs that were submitted in this tick get them, and all jobs of an owner whose rows have changed.
    """
    known, before = snapshot.step_measurements, snapshot.original.step_measurements
    if not known:
        return
    learners = {
        row.owner for key, measured in known.items() if measured is not before.get(key) for row in measured.rows
    }
    job_ids = snapshot.jobs.changed_keys | (snapshot.original.index.profiled if learners else frozenset())
    rows_of_owner, settled = cache(partial(_select_own_rows, known)), cache(_settle_constants)
    for job in [job for job_id in sorted(job_ids) if (job := snapshot.jobs.get(job_id)) is not None]:
        request, is_new = job.spec.curve_request, job.id not in snapshot.original.jobs
        if request is None or job.is_ended or not (is_new or job.owner_key in learners):
            continue
        rows = rows_of_owner(job.owner_key)
        constants = settled(rows, request.model_key, job.constants.newest)
        learned = job if constants == job.constants.newest else job.with_constants(constants)
        if job.allocation.plan is None:
            learned = _correct_memory(learned, rows, request.model_key)
        if learned is not job:
            snapshot.put_job(learned)


def _correct_memory(job: Job, measured: OwnRows, model_key: str) -> Job:
    """Return a job without a plan with the memory that plans of its model were measured to take."""
    known = [
        row.memory
        for gpu, rows in measured
        for key, plans in rows
        for row in plans
        if key == build_measurements_key(gpu, model_key) and row.memory
    ]
    memory = job.memory.with_measured(max(known) if len(known) >= MEMORY_PLANS_MIN else 1.0)
    return job if memory is job.memory else replace(job, memory=memory)


def _select_own_rows(known: Mapping[str, ModelMeasurements], owner: str) -> OwnRows:
    by_gpu: defaultdict[str, list[tuple[str, tuple[StepMeasurement, ...]]]] = defaultdict(list)
    for key, measured in sorted(known.items()):
        if rows := tuple(row for row in measured.rows if row.owner == owner):
            by_gpu[get_gpu(key)].append((key, rows))
    return tuple((gpu, tuple(rows)) for gpu, rows in sorted(by_gpu.items()))


def _settle_constants(measured: OwnRows, model_key: str, newest: LearnedConstants) -> LearnedConstants:
    """Return the constants for a model on all GPU models that were measured, after `newest`."""
    levels, nothing = dict(newest), (0,) * len(STEP_TERMS)
    for gpu, rows in measured:
        learned = estimate_own_constants(dict(rows), build_measurements_key(gpu, model_key))
        adjustable = [each if name in ADJUSTABLE_TERMS else 0.0 for name, each in zip(STEP_TERMS, learned, strict=True)]
        levels[gpu] = settle_levels(levels.get(gpu, nothing), adjustable)
    return tuple(sorted((gpu, each) for gpu, each in levels.items() if any(each)))


def forget_measurements(snapshot: MutableSnapshot, gpus: frozenset[str] | None = None) -> None:
    """Forget what was measured on these GPU models, or on all: it was relative to predictions that hold no more.

    Running jobs keep their plans, but say nothing about the new predictions until they get another one.
    """

    def is_forgotten(gpu: str) -> bool:
        return gpus is None or gpu in gpus

    known = snapshot.step_measurements.items()
    snapshot.step_measurements = {key: rows for key, rows in known if not is_forgotten(get_gpu(key))}
    for job in [job for job_id in sorted(snapshot.original.index.profiled) if (job := snapshot.jobs.get(job_id))]:
        constants = tuple(each for each in job.constants.newest if not is_forgotten(each[0]))
        changed = job if constants == job.constants.newest else job.with_constants(constants)
        plan = changed.allocation.plan
        if plan is not None and plan.terms and any(is_forgotten(stage.gpu) for stage in plan.stages):
            unrelated = replace(plan, terms=(), profile_time_s=0.0)
            changed = replace(changed, allocation=replace(changed.allocation, plan=unrelated))
        if changed is not job:
            snapshot.put_job(changed)


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
    features = PlanFeatures(plan.terms, describe_layout(plan, shape))
    return build_measurements_key(job.allocated_gpu, request.model_key), features
