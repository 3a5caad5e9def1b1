"""Mixed shapes: GPUs of two models for a job that neither model alone could ever hold.

Only such jobs are mixed: a plan over two models is as fast as its slower part allows, and it ties up both. The solver
cuts the pipeline where the models meet.
"""

from __future__ import annotations

from itertools import permutations

from scheduler.core.course import Course
from scheduler.core.targets import Target
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.job import Job
from scheduler.policies.placement import rooms_by_model, usable_by


def mixed_target(course: Course, job: Job, need: int) -> Target | None:
    """`need` free GPUs of two models with their plan, the fastest of the splits that are solved; None where there are
    none. Each split takes all that it can of one model in whole nodes, and the rest of another; those that are not
    solved are wanted."""
    if not job.spec.has_profile or job.spec.gpu:
        return None
    by_model = rooms_by_model(course.view, usable_by(job, course.rooms_for(job)), {})
    rooms = {group[0].gpu: group for group in by_model}
    found: list[Target] = []
    for first, second in permutations(sorted(rooms), 2):
        whole = [room for room in rooms[first] if len(room.free) == course.node_sizes[first]]
        count = min(sum(len(room.free) for room in whole), need - 1)
        if not count or sum(len(room.free) for room in rooms[second]) < need - count:
            continue
        one = course.policies.place(course.view, whole, job, count)
        other = course.policies.place(course.view, rooms[second], job, need - count)
        if one is not None and other is not None:
            gpus = gpu_sets.union(one, other)
            if plan := course.plan_for(job, gpus):
                found.append((gpus, plan))
    return min(found, key=lambda target: target[1].iteration_time_s, default=None)
