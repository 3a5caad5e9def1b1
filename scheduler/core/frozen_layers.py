"""Layers that jobs have frozen: taken in as they are told, and the curves that count on them once those are solved."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.core.intake import Intake
from scheduler.domain.event import EventCode
from scheduler.domain.gpu_shape import GpuShape, canonical_counts
from scheduler.domain.job import Job
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.speed import node_sizes, packed


def freeze(intake: Intake, job: Job, layers: int | None) -> Job:
    """The job with so many layers frozen, if its workers say so.

    Fewer than before are an old report, which says nothing. More than the model has are refused: they would ask for a
    curve that cannot be.
    """
    if layers is None or layers <= job.freezing.layers:
        return job
    fault = frozen_layers_fault(job, layers)
    if fault:
        intake.refuse(job.id, f"frozen_layers is {layers}; {fault}")
        return job
    before = job.freezing.layers
    intake.jobs[job.id] = frozen = job.frozen(layers, intake.now_s)
    message = f"{layers} layers are frozen, {before} before"
    numbers = {"frozen_layers": float(layers), "frozen_layers_before": float(before)}
    intake.tell(EventCode.JOB_FROZE, job.id, message, numbers)
    return frozen


def frozen_layers_fault(job: Job, layers: int) -> str:
    """What a worker's number may be, where it may not be this one; empty where it may."""
    plan = job.allocation.plan
    if layers < job.freezing.layers:
        return f"it must be at least {job.freezing.layers}, as it was told before"
    if job.spec.has_profile and plan is not None and layers > plan.layers:
        return f"it must be at most {plan.layers}, the layers of its model"
    return ""


def take_up_curves(intake: Intake) -> None:
    """A job goes over to the curve that counts on its frozen layers once that has all the points that it needs; until
    then it goes on under the old one."""
    names = intake.base.ledger.refrozen | intake.jobs.written
    waiting = [job for job_id in sorted(names) if (job := intake.jobs.get(job_id)) and _awaits_curve(job)]
    view = intake.view() if waiting else intake.base
    for job in waiting:
        if _has_points(view, job):
            intake.jobs[job.id] = intake.jobs[job.id].on_next_curve()


def shapes_to_solve(snapshot: Snapshot, job: Job) -> Iterator[GpuShape]:
    """What the next curve must have before the job is planned by it: the shape that it runs on, then the canonical ones
    of its range, on the GPU models that it has (on any that it may have, where it has none)."""
    target, sizes = job.allocation.target, node_sizes(snapshot)
    if target:
        yield snapshot.shape_of(target)
    models = {snapshot.nodes[name].gpu for name in target} or {gpu for gpu in sizes if job.spec.gpu in ("", gpu)}
    for gpu in sorted(models):
        for count in canonical_counts(job.spec.min_gpus, job.spec.max_gpus, sizes[gpu]):
            yield packed(gpu, count, sizes[gpu])


def _awaits_curve(job: Job) -> bool:
    return not job.is_ended and job.freezing.awaits_plan and not job.freezing.is_on_curve


def _has_points(snapshot: Snapshot, job: Job) -> bool:
    curve = snapshot.curves.get(job.next_curve_key, ScalingCurve())
    target = job.allocation.target
    if target and curve.plan(snapshot.shape_of(target)) is None:
        return False
    return all(curve.is_solved(shape) for shape in shapes_to_solve(snapshot, job))
