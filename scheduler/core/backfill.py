"""Backfill: who may pass the first waiting job that does not fit, without delaying it.

EASY backfilling (Lifka, JSSPP'95; Mu'alem and Feitelson, TPDS'01): from when running jobs are expected to end follows
the shadow time, at which that job can start, and how many GPUs are extra then. Whoever comes behind it may start if
it ends before, or on extra GPUs. GPUs that elastic jobs hold above their base are not in its way: they count as free.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from scheduler.core.course import Course
from scheduler.domain.job import Job
from scheduler.domain.ledger import Kind


@dataclass(slots=True)
class Shadow:
    """`job_id` can start at `at_s` on GPUs of `model` if nobody delays it, and `extra_gpus` of them are left then.

    Mutable: extra GPUs are dealt out.
    """

    job_id: str
    at_s: float
    model: str
    extra_gpus: int

    def permits(self, model: str, gpus: int, end_s: float) -> bool:
        """A job that would end at `end_s` may start on these GPUs."""
        return model != self.model or end_s <= self.at_s or gpus <= self.extra_gpus

    def take(self, model: str, gpus: int, end_s: float) -> None:
        """A job that may start does."""
        if model == self.model and end_s > self.at_s:
            self.extra_gpus -= gpus


def cast_shadow(course: Course, job: Job, kinds: Collection[Kind], need: int, free: int) -> Shadow | None:
    """The shadow of a job that needs `need` GPUs of these kinds, of one model, while `free` are free or can be; None
    where no end is known of enough running jobs."""
    (model,) = {model for model, _ in kinds}
    extra, at_s = free - need, course.now_s
    for end_s, job_id in _ends(course) if extra < 0 else ():
        extra, at_s = extra + _base_on(course, course.view.jobs[job_id], kinds), end_s
        if extra >= 0:
            break
    return Shadow(job.id, at_s, model, extra) if extra >= 0 else None


def _ends(course: Course) -> list[tuple[float, str]]:
    """When each running job of known length is expected to end, soonest first."""
    running = map(course.view.jobs.__getitem__, course.draft.ledger.running)
    ends = ((expected_end_s(job, course.now_s), job.id) for job in running)
    return sorted(end for end in ends if end[0] < inf)


def _base_on(course: Course, job: Job, kinds: Collection[Kind]) -> int:
    """What a job gives back of its base on nodes of these kinds when it ends."""
    held = sum(len(indices) for name, indices in job.allocation.target.items() if _kind(course, name) in kinds)
    return min(held, course.policies.base(course.view, job, course.node_sizes, None)) if held else 0


def expected_end_s(job: Job, now_s: float) -> float:
    """When a running job ends at its present speed; infinite where its length is unknown."""
    steps = job.remaining_steps(now_s)
    return inf if steps is None else now_s + steps * job.step_time_s()


def _kind(course: Course, name: str) -> Kind | None:
    node = course.view.nodes.get(name)
    return (node.gpu, course.view.is_lent(node)) if node else None
