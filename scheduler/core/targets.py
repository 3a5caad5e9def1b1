"""Exact targets: present GPUs plus new ones, or a part of the present ones, each with its plan."""

from __future__ import annotations

from scheduler.core.course import Course
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.gpus import Gpus
from scheduler.domain.job import Job
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.policies.placement import rooms_by_model, usable_by

Target = tuple[Gpus, ParallelPlan]


def extended(course: Course, job: Job, most: int, least: int) -> Target | None:
    """Present GPUs plus new ones: `most` in all, or the largest count down to `least` that has room and a plan.

    A plan may fit one GPU model and not another, so each model that has room is tried.
    """
    present, view = job.allocation.target, course.view
    groups = rooms_by_model(view, usable_by(job, course.draft.rooms), present)
    most_room = max((sum(len(room.free) for room in group) for group in groups), default=0)
    held = gpu_sets.count(present)
    for count in range(min(most, held + most_room), least - 1, -1):
        for group in groups:
            more = course.policies.place(view, group, job, count - held)
            if more is None:
                continue
            gpus = gpu_sets.union(present, more)
            plan = course.plan_for(job, gpus)
            if plan is not None:
                return gpus, plan
    return None


def reduced(course: Course, job: Job, kept: Gpus, most: int) -> Target | None:
    """A part of `kept`: `most` GPUs of it, or the largest count down to the job's minimum that has a plan."""
    for count in range(min(most, gpu_sets.count(kept)), job.spec.min_gpus - 1, -1):
        gpus = _part(course, kept, count)
        plan = course.plan_for(job, gpus)
        if plan is not None:
            return gpus, plan
    return None


def _part(course: Course, kept: Gpus, count: int) -> Gpus:
    """Give up lent nodes first, then the nodes with the fewest of the job's GPUs."""
    nodes, view = course.draft.base.nodes, course.view
    order = sorted(kept, key=lambda name: (view.is_lent(nodes[name]), -len(kept[name]), name))
    part: dict[str, tuple[int, ...]] = {}
    for name in order:
        if count > 0:
            part[name] = kept[name][:count]
            count -= len(part[name])
    return part
