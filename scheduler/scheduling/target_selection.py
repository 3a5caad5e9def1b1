"""Choose the exact GPUs of a job, with their plan: more GPUs, fewer, or others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import permutations
from math import inf

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import FreeGpus, Gpus
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import LinearCurve
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policies.model_mix import GPU_MODELS_MAX, split_unlike
from scheduler.scheduling.policies.placement import group_by_model
from scheduler.scheduling.policies.speed import packed
from scheduler.scheduling.shrink_selection import select_cheapest_part, select_part, select_part_of_shape

Target = tuple[Gpus, ParallelPlan]


def extend_target(cycle: SchedulingCycle, job: Job, max_gpus: int, min_gpus: int) -> Target | None:
    """Add free GPUs to those that the job holds.

    The job gets `max_gpus` GPUs in all, or the largest count down to `min_gpus` that is free and has a plan. Every GPU
    model is tried, and of equal counts the fastest plan is taken. Above its minimum a job takes only GPUs that make it
    faster. If no plan is solved, only the shape of the largest count is requested, because each distribution over nodes
    is a shape of its own.
    """
    current, view = job.allocation.target, cycle.view
    max_step_s = _max_step_time_s(cycle, job)
    models = group_by_model(view, cycle.usable_gpus(job), current)
    most_free = max((_count_free(free) for free in models), default=0)
    held, requested = gpu_sets.count(current), len(cycle.missing_shapes)
    for count in range(min(max_gpus, held + most_free), min_gpus - 1, -1):
        found: list[Target] = []
        for free in models:
            if _is_infeasible(cycle, job, free[0].gpu, count, max_step_s):
                continue
            more = cycle.policies.place(view, free, job, count - held)
            if more is None:
                continue
            request_missing = len(cycle.missing_shapes) == requested
            target = trim_target(cycle, job, gpu_sets.union(current, more), request_missing=request_missing)
            if target and gpu_sets.count(target[0]) >= min_gpus and target[1].iteration_time_s < max_step_s:
                found.append(target)
        if found:
            return min(found, key=lambda target: target[1].iteration_time_s)
    return None


def reduce_target(cycle: SchedulingCycle, job: Job, kept: Gpus, max_gpus: int) -> Target | None:
    """Choose a part of `kept`: `max_gpus` GPUs, or the largest count down to the job's minimum that has a plan.

    Of GPUs of several models, those that are not of the home model are kept in whole nodes or not at all.
    """
    own, unlike = split_unlike(cycle.view, job, kept)
    if unlike and (mixed := _reduce_unlike(cycle, job, kept, unlike, max_gpus)):
        return mixed
    kept = own or kept
    for count in range(min(max_gpus, gpu_sets.count(kept)), job.spec.min_gpus - 1, -1):
        target = trim_target(cycle, job, select_part(cycle.view, kept, count))
        if target is not None:
            gpus, plan = target
            return select_cheapest_part(cycle.view, job, kept, gpus, plan), plan
    return None


def _reduce_unlike(cycle: SchedulingCycle, job: Job, kept: Gpus, unlike: Gpus, max_gpus: int) -> Target | None:
    """Return what is left without as few nodes of other models as possible, if a plan is solved, or None.

    Only the first shape is requested from the solver.
    """
    leaving = sorted(unlike, key=lambda name: (not cycle.view.is_lent(cycle.view.nodes[name]), name), reverse=True)
    requested = len(cycle.missing_shapes)
    for count in range(len(leaving)):
        part = gpu_sets.without_nodes(kept, leaving[len(leaving) - count :])
        if not job.spec.min_gpus <= gpu_sets.count(part) <= max_gpus:
            continue
        shape, is_first = cycle.view.shape_of(part), len(cycle.missing_shapes) == requested
        if plan := cycle.plan_on(job, shape, request_missing=is_first):
            return part, plan
    return None


def move_target(
    cycle: SchedulingCycle, job: Job, kept: Gpus, free_gpus: Collection[FreeGpus], *, max_gpus: int, min_gpus: int
) -> Target | None:
    """Add free GPUs to `kept`: up to `max_gpus` in all, the largest count from `min_gpus` on that has a plan."""
    kept_gpus, usable = gpu_sets.count(kept), cycle.usable_gpus(job, free_gpus)
    for count in range(min(max_gpus, kept_gpus + _count_free(usable)), max(kept_gpus, min_gpus - 1), -1):
        more = cycle.policies.place(cycle.view, usable, job, count - kept_gpus)
        target = trim_target(cycle, job, gpu_sets.union(kept, more)) if more is not None else None
        if target is not None:
            return target
    return None


def find_mixed_target(cycle: SchedulingCycle, job: Job, need: int) -> Target | None:
    """Choose `need` free GPUs of as few models as can hold them, for a job that no single model can hold.

    Each split takes whole nodes of all its models but the last, as many as possible, and the rest of the last one. The
    fastest split with a solved plan is taken; unsolved ones are requested. Other jobs start on one model.
    `stages/mixed_growth` may add nodes of another model later.
    """
    if not job.spec.has_profile or job.spec.gpu or cycle.fit.needs_one_node(job):
        return None
    by_model = group_by_model(cycle.view, cycle.usable_gpus(job), {})
    free = {group[0].gpu: group for group in by_model}
    for models in range(2, GPU_MODELS_MAX + 1):
        splits = [
            _select_split(cycle, job, [free[gpu] for gpu in gpus], need) for gpus in permutations(sorted(free), models)
        ]
        possible = [gpus for gpus in splits if gpus is not None]
        found = [(gpus, plan) for gpus in possible if (plan := cycle.plan_for(job, gpus))]
        if possible:
            return min(found, key=lambda target: target[1].iteration_time_s, default=None)
    return None


def _select_split(cycle: SchedulingCycle, job: Job, rooms: Sequence[Sequence[FreeGpus]], need: int) -> Gpus | None:
    """Return `need` GPUs from the rooms of each GPU model in turn, or None if a model cannot give its part."""
    taken = gpu_sets.NO_GPUS
    for number, room in enumerate(rooms, start=1):
        missing, is_last = need - gpu_sets.count(taken), number == len(rooms)
        usable = room if is_last else [node for node in room if len(node.indices) == cycle.node_sizes[node.gpu]]
        count = missing if is_last else min(_count_free(usable), missing - len(rooms) + number)
        if count < 1 or _count_free(usable) < count:
            return None
        if (part := cycle.policies.place(cycle.view, usable, job, count)) is None:
            return None
        taken = gpu_sets.union(taken, part)
    return taken


def trim_target(cycle: SchedulingCycle, job: Job, gpus: Gpus, *, request_missing: bool = True) -> Target | None:
    """Return the GPUs and their plan without GPUs that do not make the job faster, or None if no plan is solved."""
    shape = cycle.snapshot.original.shape_of(gpus)
    if (plan := cycle.plan_on(job, shape, request_missing=request_missing)) is None:
        return None
    if not cycle.policies.requires_speedup:
        return gpus, plan
    better = cycle.snapshot.original.curve(job).faster_subset(shape, job.spec.min_gpus)
    if better is None or (faster := cycle.plan_on(job, better)) is None:
        return gpus, plan
    part = select_part_of_shape(cycle.view, gpus, better)
    return select_cheapest_part(cycle.view, job, gpus, part, faster), faster


def is_resizable(cycle: SchedulingCycle, job: Job) -> bool:
    """Return whether the job may be resized in this cycle: it is undecided, and can go on after a resize."""
    return job.is_resizable and is_undecided(cycle, job)


def is_undecided(cycle: SchedulingCycle, job: Job) -> bool:
    """Return whether the job runs, is to go on, and was not decided on in this cycle."""
    return job.state is JobState.RUNNING and job.intent is Intent.RUN and job.id not in cycle.settled_jobs


def _is_infeasible(cycle: SchedulingCycle, job: Job, gpu: str, count: int, max_step_s: float) -> bool:
    """Return whether `count` GPUs have no plan that is fast enough even on as few nodes as possible."""
    curve = cycle.snapshot.original.curve(job)
    if isinstance(curve, LinearCurve):
        return False
    if plan := curve.packed_plans(gpu, cycle.node_sizes[gpu]).get(count):
        return plan.iteration_time_s >= max_step_s
    return packed(gpu, count, cycle.node_sizes[gpu]) in curve.infeasible


def _max_step_time_s(cycle: SchedulingCycle, job: Job) -> float:
    """Return the step time that more GPUs must beat: the current one, or infinity below the minimum."""
    if job.allocation.target_gpus < job.spec.min_gpus or not cycle.policies.requires_speedup:
        return inf
    current = cycle.plan_for(job, job.allocation.target) or job.allocation.plan
    return current.iteration_time_s if current else inf


def _count_free(free_gpus: Collection[FreeGpus]) -> int:
    return sum(len(node.indices) for node in free_gpus)
