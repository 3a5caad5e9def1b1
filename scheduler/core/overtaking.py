"""Overtaking: a waiting job takes the place of one that has several times as much to do."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from scheduler.core.course import Course
from scheduler.domain.decision import PreemptJob
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.policies.outranking import overtaken

TAKERS_MAX = 64
"""How many waiting jobs are looked at in one tick, those that come first: where thousands wait, nobody else has a
chance, and looking costs time."""


def overtake(course: Course, queue: Iterable[str]) -> None:
    """Preempt running jobs for those that wait for GPUs which nobody gives up for them."""
    if not course.policies.overtakes or course.draft.base.switches.resizes_frozen:
        return
    jobs, waiting = course.draft.jobs, course.waiting
    short = (jobs[job_id] for job_id in queue if job_id in waiting and _is_short(waiting[job_id]))
    takers = tuple(islice(short, TAKERS_MAX))
    exempt = course.touched.union(course.evacuees, course.draft.ledger.releasing)
    for job_id, served in overtaken(course.view, takers, exempt, course.settings).items() if takers else ():
        job = jobs[job_id]
        detail = f"{', '.join(served)} with far less to do {'gets' if len(served) == 1 else 'get'} its GPUs"
        course.take(PreemptJob(job_id, course.leave_by_s(job), Reason(ReasonCode.OUTRANKED, detail)))
        course.touched.add(job_id)


def _is_short(reason: Reason) -> bool:
    return reason.code is ReasonCode.INSUFFICIENT_GPUS
