"""Notices: what the ranks of a generation are told of leaving, whichever way they ask."""

from __future__ import annotations

import math

from api.agent_desk import AgentDesk
from api.answers.agent import NoticeView
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.agent_report import AgentReport
from scheduler.domain.job import Job

AGENTS_S_MAX = 600.0
"""Agents of new nodes are waited for no longer: an image of many gigabytes takes minutes."""


def notice_for(job: Job, generation: int, now_s: float, desk: AgentDesk) -> NoticeView | None:
    """As `notice_view`, but that ranks which have no GPU to give back go on while agents come up on their new nodes:
    for half of the time that they have to leave, and AGENTS_S_MAX at most."""
    notice = notice_view(job, generation, now_s)
    if notice is None or notice["action"] != "replan":
        return notice
    own = next((run for run in desk.begun_of(job.id, now_s) if run.generation == generation), None)
    target, leave_by_s = job.allocation.target, job.allocation.leave_by_s
    if own is None or gpu_sets.minus(own.gpus, target):
        return notice
    half_s = math.inf if leave_by_s is None else (job.state_since_s + leave_by_s) / 2
    may_wait = now_s < min(half_s, job.state_since_s + AGENTS_S_MAX)
    return None if may_wait and not desk.have_reported(job.id, target, now_s) else notice


def save_notice(job: Job, report: AgentReport) -> NoticeView | None:
    """For the agent of rank 0 alone, whose ranks agree with all others on the step at which they save."""
    wish = job.awaited_checkpoint
    if wish is None or wish.steps is None or wish.generation != report.generation:
        return None
    if all(rank.rank != 0 for rank in report.ranks):
        return None
    return {"action": "checkpoint", "step": int(wish.steps), "seconds_left": None, "request": str(wish.asked_at_s)}


def notice_view(job: Job, generation: int, now_s: float) -> NoticeView | None:
    """`leave` where the job has no place to go on, `replan` where newer workers are due, else None.

    Workers act at the next step boundary, hence no step.
    """
    allocation = job.allocation
    has_place = bool(allocation.target) and not job.is_ended
    if has_place and allocation.generation <= generation:
        return None
    seconds_left = None if allocation.leave_by_s is None else max(0.0, allocation.leave_by_s - now_s)
    return {"action": "replan" if has_place else "leave", "step": None, "seconds_left": seconds_left}
