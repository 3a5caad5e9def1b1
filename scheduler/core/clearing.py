"""Clearing: whole nodes for a waiting job whose plans need them, where enough GPUs are free or could be, but not so.

Other jobs are moved off the nodes that are cheapest to clear, if that pays: the moves cost fewer GPU-seconds, by what
reconfiguration takes, than the job's GPUs would be idle or elsewhere until such nodes come free by themselves. Until
the job starts, nobody behind it is put onto them. Nothing is remembered for that: what has been cleared stays cheapest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

from scheduler.core.backfill import expected_end_s
from scheduler.core.course import Course
from scheduler.core.targets import Target, may_shrink, moved, reduced
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.decision import ResizeJob
from scheduler.domain.fleet import Node
from scheduler.domain.job import Job
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.domain.scaling_curve import LinearCurve
from scheduler.policies.speed import gpu_model


@dataclass(frozen=True, slots=True)
class _Site:
    """A node, and how it could be cleared: by moving `jobs`, for so many GPU-seconds, or by waiting for them."""

    node: str
    jobs: frozenset[str]
    cost_gpu_s: float
    clear_at_s: float


def keep_cleared(course: Course, queue: Sequence[str]) -> None:
    """Keep nobody behind the first job that needs whole nodes on the nodes that are being left, if they are enough."""
    for position, job_id in enumerate(queue):
        job = course.draft.jobs[job_id]
        count = whole_nodes(course, job)
        if count:
            cleared = [site.node for site in _sites(course, job) if not site.jobs]
            if len(cleared) >= count:
                course.keep(cleared[:count], frozenset(queue[: position + 1]))
            return


def clear_nodes(course: Course, job: Job) -> int:
    """Move others off whole nodes for a job that is first to need some. How many; 0 where none are to be had, or where
    it does not pay."""
    count = whole_nodes(course, job)
    if not count or course.draft.base.switches.resizes_frozen or len(sites := _sites(course, job)) < count:
        return 0
    chosen, by_itself_s = sites[:count], sorted(site.clear_at_s for site in sites)[count - 1]
    cost_gpu_s = sum(site.cost_gpu_s for site in chosen)
    if not cost_gpu_s <= course.policies.base(course.view, job, course.node_sizes, None) * (by_itself_s - course.now_s):
        return 0
    nodes = [site.node for site in chosen]
    targets = _targets(course, nodes, frozenset[str]().union(*(site.jobs for site in chosen)))
    if targets is None:
        return 0
    course.keep(nodes, frozenset((job.id,)))
    reason = Reason(ReasonCode.DEFRAGMENTED, f"{job.id} needs whole nodes and is to have {', '.join(sorted(nodes))}")
    for moving, (gpus, plan) in targets:
        course.take(ResizeJob(moving.id, gpus, plan, course.leave_by_s(moving), reason))
        course.touched.add(moving.id)
    return count


def whole_nodes(course: Course, job: Job) -> int:
    """How many whole nodes the job starts on; 0 where nothing is known against lying otherwise."""
    curve = course.view.curve(job)
    if isinstance(curve, LinearCurve) or not curve.infeasible:
        return 0
    gpu = gpu_model(course.view, job, course.node_sizes)
    size = course.node_sizes[gpu] if gpu else 0
    need = course.policies.base(course.view, job, course.node_sizes, gpu) if size else 0
    return need // size if need and need % size == 0 and curve.fails_on_some(need) else 0


def _sites(course: Course, job: Job) -> list[_Site]:
    """The nodes that the job may use, cheapest first: of the commonest size of its GPU model, serving training."""
    view, gpu = course.view, gpu_model(course.view, job, course.node_sizes)
    found = [
        _site(course, node)
        for node in view.nodes.values()
        if node.gpu == gpu and node.gpus == course.node_sizes[gpu] and view.serves_training(node)
        if job.spec.fungible or not view.is_lent(node)
    ]
    return sorted(found, key=lambda site: (site.cost_gpu_s, site.node))


def _site(course: Course, node: Node) -> _Site:
    """Each job counts as if it were on this node alone."""
    users = [course.draft.jobs[job_id] for job_id in sorted(course.draft.users(node.name))]
    staying = [user for user in users if node.name in user.allocation.target]
    cost_gpu_s = sum(
        course.settings.reconfiguration_of(user) * user.allocation.target_gpus if may_shrink(course, user) else inf
        for user in staying
    )
    clear_at_s = max((expected_end_s(user, course.now_s) for user in staying), default=course.now_s)
    return _Site(node.name, frozenset(user.id for user in staying), cost_gpu_s, clear_at_s)


def _targets(course: Course, nodes: Collection[str], job_ids: Collection[str]) -> list[tuple[Job, Target]] | None:
    """Where each of these jobs goes, the widest first; None where one finds no room beside `nodes`."""
    jobs = [course.draft.jobs[job_id] for job_id in sorted(job_ids)]
    rooms = {room.node: room for room in course.draft.rooms if room.node not in nodes}
    found: list[tuple[Job, Target]] = []
    for job in sorted(jobs, key=lambda job: -job.allocation.target_gpus):
        left = gpu_sets.without_nodes(job.allocation.target, nodes)
        present, base = job.allocation.target_gpus, course.policies.base(course.view, job, course.node_sizes, None)
        target = moved(course, job, left, rooms.values(), most=present, least=base) or reduced(
            course, job, left, present
        )
        if target is None or gpu_sets.count(target[0]) < min(base, present):
            return None
        found.append((job, target))
        for name, taken in gpu_sets.minus(target[0], left).items():
            rooms[name] = rooms[name].without(taken)
    return found
