"""Exact targets: present GPUs plus new ones, or a part of the present ones, each with its plan.

Mixed shapes: GPUs of two models for a job that neither model alone could ever hold.

Only such jobs are mixed: a plan over two models is as fast as its slower part allows, and it ties up both. The solver
cuts the pipeline where the models meet.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import permutations
from math import inf

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import FreeGpus, Gpus
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import LinearCurve
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policies.placement import filter_usable, group_by_model
from scheduler.scheduling.policies.speed import packed
from scheduler.scheduling.shrink_selection import select_cheapest_part, select_part, select_part_of_shape

Target = tuple[Gpus, ParallelPlan]


def extend_target(cycle: SchedulingCycle, job: Job, most: int, least: int) -> Target | None:
    """Present GPUs plus new ones: `most` in all, or the largest count down to `least` that has room and a plan.

    Each GPU model that has room is tried, and of equal counts the fastest taken. Above its minimum a job takes
    only what makes it faster; the free GPUs may lie otherwise than whoever counted them assumed. Where plans are not
    solved yet the largest count's is asked for, not every one's: each way to lie on the nodes is a shape of its own.
    """
    present, view = job.allocation.target, cycle.view
    bar_s = _max_step_time_s(cycle, job)
    groups = group_by_model(view, filter_usable(job, cycle.rooms_for(job)), present)
    most_room = max((sum(len(room.indices) for room in group) for group in groups), default=0)
    held, wanted = gpu_sets.count(present), len(cycle.missing_shapes)
    for count in range(min(most, held + most_room), least - 1, -1):
        found: list[Target] = []
        for group in groups:
            if _is_infeasible(cycle, job, group[0].gpu, count, bar_s):
                continue
            more = cycle.policies.place(view, group, job, count - held)
            if more is None:
                continue
            target = trim_target(
                cycle, job, gpu_sets.union(present, more), request_missing=len(cycle.missing_shapes) == wanted
            )
            if target and gpu_sets.count(target[0]) >= least and target[1].iteration_time_s < bar_s:
                found.append(target)
        if found:
            return min(found, key=lambda target: target[1].iteration_time_s)
    return None


def _is_infeasible(cycle: SchedulingCycle, job: Job, gpu: str, count: int, max_step_time_s: float) -> bool:
    """Even on as few nodes as possible so many GPUs have no plan, or none that is fast enough."""
    curve = cycle.snapshot.original.curve(job)
    if isinstance(curve, LinearCurve):
        return False
    if plan := curve.packed_plans(gpu, cycle.node_sizes[gpu]).get(count):
        return plan.iteration_time_s >= max_step_time_s
    return packed(gpu, count, cycle.node_sizes[gpu]) in curve.infeasible


def reduce_target(cycle: SchedulingCycle, job: Job, kept: Gpus, most: int) -> Target | None:
    """A part of `kept`: `most` GPUs of it, or the largest count down to the job's minimum that has a plan, less what
    would only slow the job down."""
    for count in range(min(most, gpu_sets.count(kept)), job.spec.min_gpus - 1, -1):
        target = trim_target(cycle, job, select_part(cycle, kept, count))
        if target is not None:
            gpus, plan = target
            return select_cheapest_part(cycle, job, kept, gpus, plan), plan
    return None


def move_target(
    cycle: SchedulingCycle, job: Job, left: Gpus, rooms: Collection[FreeGpus], *, most: int, least: int
) -> Target | None:
    """The GPUs that stay, and new ones in `rooms` for those that do not: `most` in all, or the largest count down to
    `least` that has room and a plan."""
    kept, usable = gpu_sets.count(left), filter_usable(job, rooms)
    for count in range(min(most, kept + sum(len(room.indices) for room in usable)), max(kept, least - 1), -1):
        more = cycle.policies.place(cycle.view, usable, job, count - kept)
        target = trim_target(cycle, job, gpu_sets.union(left, more)) if more is not None else None
        if target is not None:
            return target
    return None


def is_resizable(cycle: SchedulingCycle, job: Job) -> bool:
    """It runs undisturbed, by decisions of this tick too."""
    return job.state is JobState.RUNNING and job.intent is Intent.RUN and job.id not in cycle.changed_jobs


def trim_target(cycle: SchedulingCycle, job: Job, gpus: Gpus, *, request_missing: bool = True) -> Target | None:
    """The GPUs with their plan, less those without which the job is at least as fast; None where no plan is solved."""
    shape = cycle.snapshot.original.shape_of(gpus)
    if (plan := cycle.plan_on(job, shape, request_missing=request_missing)) is None:
        return None
    if not cycle.policies.requires_speedup:
        return gpus, plan
    better = cycle.snapshot.original.curve(job).faster_subset(shape, job.spec.min_gpus)
    if better is None or (faster := cycle.plan_on(job, better)) is None:
        return gpus, plan
    return select_cheapest_part(cycle, job, gpus, select_part_of_shape(cycle, gpus, better), faster), faster


def _max_step_time_s(cycle: SchedulingCycle, job: Job) -> float:
    """The job's present step time; infinite for one that has not got its minimum yet, or under a set that wastes."""
    if job.allocation.target_gpus < job.spec.min_gpus or not cycle.policies.requires_speedup:
        return inf
    present = cycle.plan_for(job, job.allocation.target) or job.allocation.plan
    return present.iteration_time_s if present else inf


def find_mixed_target(cycle: SchedulingCycle, job: Job, need: int) -> Target | None:
    """`need` free GPUs of two models with their plan, the fastest of the splits that are solved; None where there are
    none. Each split takes all that it can of one model in whole nodes, and the rest of another; those that are not
    solved are wanted."""
    if not job.spec.has_profile or job.spec.gpu:
        return None
    by_model = group_by_model(cycle.view, filter_usable(job, cycle.rooms_for(job)), {})
    rooms = {group[0].gpu: group for group in by_model}
    found: list[Target] = []
    for first, second in permutations(sorted(rooms), 2):
        whole = [room for room in rooms[first] if len(room.indices) == cycle.node_sizes[first]]
        count = min(sum(len(room.indices) for room in whole), need - 1)
        if not count or sum(len(room.indices) for room in rooms[second]) < need - count:
            continue
        one = cycle.policies.place(cycle.view, whole, job, count)
        other = cycle.policies.place(cycle.view, rooms[second], job, need - count)
        if one is not None and other is not None:
            gpus = gpu_sets.union(one, other)
            if plan := cycle.plan_for(job, gpus):
                found.append((gpus, plan))
    return min(found, key=lambda target: target[1].iteration_time_s, default=None)
