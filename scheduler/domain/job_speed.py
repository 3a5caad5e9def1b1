"""The linear curve of one job: prior speeds of the GPU models, replaced by those that the job has measured."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.domain.job import Job
from scheduler.domain.relative_speed import RelativeSpeed, SpeedSource
from scheduler.domain.scaling_curve import LinearCurve

_ROUNDING_MAX = 1e-9


def with_measured_speeds(job: Job, prior: LinearCurve) -> LinearCurve:
    """Return the curve of a job without a model. Declared speeds precede measured ones, and those precede profiles.

    Step times of its plans times the job's correction are step times as measured, on each model that the job ran on.
    Models on which it did not run keep their prior speed relative to the model on which it runs, or ran last. The
    measurement on the most similar number of GPUs counts.

    Args:
        prior: curve with the speeds of `resolve_prior_speeds`.
    """
    scale, progress = _compute_scale(job, prior), job.progress
    measured_one = not progress.measured_gpu or job.allocated_gpu in ("", progress.measured_gpu)
    if abs(scale - 1.0) < _ROUNDING_MAX and measured_one and not progress.other_gpus:
        return prior
    speeds = {gpu: RelativeSpeed(speed.value * scale, speed.source) for gpu, speed in prior.speeds.items()}
    return LinearCurve({**speeds, **_compute_measured_speeds(job)})


def _compute_scale(job: Job, prior: LinearCurve) -> float:
    """Return the factor between prior speeds and those to which the job's correction applies. It is usually 1.

    The correction applies to the speed of the current plan, or else to that of the last measurement. Both can be older
    than the table of throughputs.
    """
    plan, progress = job.allocation.plan, job.progress
    if plan is not None:
        expected = sum(stage.gpus * prior.speed_on(stage.gpu).value for stage in plan.stages)
        return plan.samples_per_s / expected
    if not progress.corrections or not progress.measured_gpu:
        return 1.0
    return progress.correction / progress.corrections[-1][1] / prior.speed_on(progress.measured_gpu).value


def _compute_measured_speeds(job: Job) -> Mapping[str, RelativeSpeed]:
    """Return the speeds of the models that the job ran on, without declared ones, on the scale of its correction."""
    progress, plan, current = job.progress, job.allocation.plan, job.allocated_gpu
    gpus = job.allocation.target_gpus or job.spec.min_gpus
    speeds = {}
    for gpu in (progress.measured_gpu, *(known.gpu for known in progress.other_gpus)):
        pairs = progress.measured_gpu_s(gpu)
        if pairs and gpu and gpu not in job.spec.speeds:
            _, gpu_s = min(pairs, key=lambda pair: abs(pair[0] - gpus))
            speeds[gpu] = RelativeSpeed(progress.correction / gpu_s, SpeedSource.MEASURED)
    if plan is not None and current in speeds:
        speeds[current] = RelativeSpeed(plan.samples_per_s / plan.world_size, SpeedSource.MEASURED)
    return speeds
