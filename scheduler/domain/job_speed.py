"""The linear curve of one job: prior speeds of the GPU models, replaced by those that the job has measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import isclose

from scheduler.domain.job import Job
from scheduler.domain.relative_speed import RelativeSpeed, SpeedSource, resolve_prior_speeds
from scheduler.domain.scaling_curve import LinearCurve


def build_linear_curve(job: Job, reference: str, throughputs: Mapping[str, float]) -> LinearCurve:
    """Return the curve of a job without a model. Declared speeds precede measured ones, and those precede profiles.

    Step times of its plans times the job's correction are step times as measured, on each model that the job ran on.
    Models on which it did not run keep their prior speed relative to the model on which it runs, or ran last. The
    measurement on the most similar number of GPUs counts.

    Args:
        reference: GPU model whose prior speed is 1.
        throughputs: work per second by GPU model from GPU profiles, in any common unit.
    """
    prior = _build_prior_curve(reference, tuple(job.spec.speeds.items()), tuple(throughputs.items()))
    scale = _compute_scale(job, prior)
    has_measured = bool(job.progress.other_gpus) or job.allocated_gpu not in ("", job.progress.measured_gpu)
    if isclose(scale, 1.0) and not has_measured:
        return prior
    speeds = {gpu: RelativeSpeed(speed.value * scale, speed.source) for gpu, speed in prior.speeds.items()}
    return LinearCurve({**speeds, **_compute_measured_speeds(job)})


@lru_cache(maxsize=1024)
def _build_prior_curve(
    reference: str, declared: tuple[tuple[str, float], ...], throughputs: tuple[tuple[str, float], ...]
) -> LinearCurve:
    return LinearCurve(resolve_prior_speeds(reference, dict(declared), dict(throughputs)))


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
