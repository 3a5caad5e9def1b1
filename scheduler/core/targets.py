"""Exact targets: present GPUs plus new ones, or a part of the present ones, each with its plan."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from scheduler.core.course import Course
from scheduler.core.keeping import cheapest_part, part_of, part_of_shape
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.gpus import Gpus
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.room import Room
from scheduler.domain.scaling_curve import LinearCurve
from scheduler.policies.placement import rooms_by_model, usable_by
from scheduler.policies.speed import packed

Target = tuple[Gpus, ParallelPlan]


def extended(course: Course, job: Job, most: int, least: int) -> Target | None:
    """Present GPUs plus new ones: `most` in all, or the largest count down to `least` that has room and a plan.

    Each GPU model that has room is tried, and of equal counts the fastest taken. Above its minimum a job takes
    only what makes it faster; the free GPUs may lie otherwise than whoever counted them assumed. Where plans are not
    solved yet the largest count's is asked for, not every one's: each way to lie on the nodes is a shape of its own.
    """
    present, view = job.allocation.target, course.view
    bar_s = _time_to_beat_s(course, job)
    groups = rooms_by_model(view, usable_by(job, course.rooms_for(job)), present)
    most_room = max((sum(len(room.free) for room in group) for group in groups), default=0)
    held, wanted = gpu_sets.count(present), len(course.wanted)
    for count in range(min(most, held + most_room), least - 1, -1):
        found: list[Target] = []
        for group in groups:
            if _is_hopeless(course, job, group[0].gpu, count, bar_s):
                continue
            more = course.policies.place(view, group, job, count - held)
            if more is None:
                continue
            target = thrifty(course, job, gpu_sets.union(present, more), asks=len(course.wanted) == wanted)
            if target and gpu_sets.count(target[0]) >= least and target[1].iteration_time_s < bar_s:
                found.append(target)
        if found:
            return min(found, key=lambda target: target[1].iteration_time_s)
    return None


def _is_hopeless(course: Course, job: Job, gpu: str, count: int, bar_s: float) -> bool:
    """Even on as few nodes as possible so many GPUs have no plan, or none that is fast enough."""
    curve = course.draft.base.curve(job)
    if isinstance(curve, LinearCurve):
        return False
    if plan := curve.packed(gpu, course.node_sizes[gpu]).get(count):
        return plan.iteration_time_s >= bar_s
    return packed(gpu, count, course.node_sizes[gpu]) in curve.infeasible


def reduced(course: Course, job: Job, kept: Gpus, most: int) -> Target | None:
    """A part of `kept`: `most` GPUs of it, or the largest count down to the job's minimum that has a plan, less what
    would only slow the job down."""
    for count in range(min(most, gpu_sets.count(kept)), job.spec.min_gpus - 1, -1):
        target = thrifty(course, job, part_of(course, kept, count))
        if target is not None:
            gpus, plan = target
            return cheapest_part(course, job, kept, gpus, plan), plan
    return None


def moved(course: Course, job: Job, left: Gpus, rooms: Collection[Room], *, most: int, least: int) -> Target | None:
    """The GPUs that stay, and new ones in `rooms` for those that do not: `most` in all, or the largest count down to
    `least` that has room and a plan."""
    kept, usable = gpu_sets.count(left), usable_by(job, rooms)
    for count in range(min(most, kept + sum(len(room.free) for room in usable)), max(kept, least - 1), -1):
        more = course.policies.place(course.view, usable, job, count - kept)
        target = thrifty(course, job, gpu_sets.union(left, more)) if more is not None else None
        if target is not None:
            return target
    return None


def may_shrink(course: Course, job: Job) -> bool:
    """It runs undisturbed, by decisions of this tick too."""
    return job.state is JobState.RUNNING and job.intent is Intent.RUN and job.id not in course.touched


def thrifty(course: Course, job: Job, gpus: Gpus, *, asks: bool = True) -> Target | None:
    """The GPUs with their plan, less those without which the job is at least as fast; None where no plan is solved."""
    shape = course.draft.base.shape_of(gpus)
    if (plan := course.plan_on(job, shape, asks=asks)) is None:
        return None
    if not course.policies.thrifty:
        return gpus, plan
    better = course.draft.base.curve(job).better_part(shape, job.spec.min_gpus)
    if better is None or (faster := course.plan_on(job, better)) is None:
        return gpus, plan
    return cheapest_part(course, job, gpus, part_of_shape(course, gpus, better), faster), faster


def _time_to_beat_s(course: Course, job: Job) -> float:
    """The job's present step time; infinite for one that has not got its minimum yet, or under a set that wastes."""
    if job.allocation.target_gpus < job.spec.min_gpus or not course.policies.thrifty:
        return inf
    present = course.plan_for(job, job.allocation.target) or job.allocation.plan
    return present.iteration_time_s if present else inf
