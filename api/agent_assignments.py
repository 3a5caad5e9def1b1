"""Instructions to the ranks of a job: notices, kill orders, and the run that an agent may start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from api.agent_state import AgentStateCache
from scheduler.domain import gpu_sets
from scheduler.domain.job import Job
from scheduler.domain.observation import AgentReport, BegunRun
from scheduler.domain.snapshot import Snapshot


class NoticeView(TypedDict):
    """Action that the ranks of a job must take at a step boundary."""

    action: Annotated[
        Literal["leave", "replan", "checkpoint"],
        Field(
            description=(
                "`leave`: save and exit. `replan`: the same, as a newer generation is due. `checkpoint`: "
                "save and continue."
            )
        ),
    ]
    step: Annotated[int | None, Field(description="Optimizer step at which to act. Null: the next step boundary.")]
    seconds_left: Annotated[float | None, Field(description="Seconds until the ranks are killed. Null: no deadline.")]
    request: NotRequired[
        Annotated[str, Field(description="Name to save the checkpoint under. Absent unless `action` is `checkpoint`.")]
    ]


class ProgressReplyView(TypedDict):
    notice: Annotated[NoticeView | None, Field(description="What the workers have to do now. Null: continue.")]


NEW_AGENTS_WAIT_S_MAX = 600.0
"""Longest wait for a newer generation; pulling a large image takes minutes."""
RELEASE_WAIT_S_MAX = 30.0
"""The same for ranks with GPUs to give up, which other jobs may wait for; loading the modules takes seconds."""


def select_notice(job: Job, generation: int, now_s: float, agent_state: AgentStateCache) -> NoticeView | None:
    """Return the notice for the ranks of a generation, or None.

    Ranks continue while the newer generation is prepared: for half of the time that they have to leave, and for at most
    NEW_AGENTS_WAIT_S_MAX, or RELEASE_WAIT_S_MAX if they have GPUs to give up.
    """
    notice = departure_notice(job, generation, now_s)
    if notice is None or notice["action"] != "replan":
        return notice
    own = next((run for run in agent_state.begun_runs(job.id, now_s) if run.generation == generation), None)
    wait_s = 0.0 if own is None else _preparation_wait_s(job, own, agent_state.snapshot(now_s))
    leave_by_s = job.allocation.leave_by_s
    half_s = math.inf if leave_by_s is None else (job.state_since_s + leave_by_s) / 2
    may_wait = now_s < min(half_s, job.state_since_s + wait_s)
    target, prepared = job.allocation.target, job.allocation.generation
    return None if may_wait and not agent_state.have_all_prepared(job.id, target, now_s, prepared) else notice


def _preparation_wait_s(job: Job, own: BegunRun, snapshot: Snapshot) -> float:
    """Return for how long the ranks of a run may wait for a newer generation.

    Those on a node that must be vacated do not wait. Neither do pods with GPUs to give up: the newer pods may need them
    to be scheduled.
    """
    given_up = gpu_sets.difference(own.gpus, job.allocation.target)
    if not given_up:
        return NEW_AGENTS_WAIT_S_MAX
    nodes = [snapshot.nodes[name] for name in given_up if name in snapshot.nodes]
    must_leave = own.in_pods or any(map(snapshot.must_vacate, nodes))
    return 0.0 if must_leave else RELEASE_WAIT_S_MAX


def checkpoint_notice(job: Job, report: AgentReport) -> NoticeView | None:
    """Return the checkpoint notice for the agent of rank 0, or None.

    Rank 0 tells the other ranks the step to save at.
    """
    request = job.pending_checkpoint_request
    if request is None or request.steps is None or request.generation != report.generation:
        return None
    if all(rank.rank != 0 for rank in report.ranks):
        return None
    return {
        "action": "checkpoint",
        "step": int(request.steps),
        "seconds_left": None,
        "request": str(request.asked_at_s),
    }


def departure_notice(job: Job, generation: int, now_s: float) -> NoticeView | None:
    """Return `leave` if the job has no place to continue, `replan` if a newer generation is due, else None."""
    allocation = job.allocation
    has_place = bool(allocation.target) and not job.is_ended
    if has_place and allocation.generation <= generation:
        return None
    seconds_left = None if allocation.leave_by_s is None else max(0.0, allocation.leave_by_s - now_s)
    return {"action": "replan" if has_place else "leave", "step": None, "seconds_left": seconds_left}


def find_startable_run(begun_runs: Sequence[BegunRun], report: AgentReport) -> BegunRun | None:
    """Return the newest run that this agent, and no other agent on its node, may start or has started."""
    own = [run for run in begun_runs if run.may_start and run.pods.get(report.node) == report.pod]
    return own[-1] if own else None


def find_kill_reason(begun_runs: Sequence[BegunRun], report: AgentReport) -> str:
    if not report.has_living_ranks:
        return ""
    own = next((run for run in begun_runs if run.generation == report.generation), None)
    if own is None:
        # The cached runs may lack the newest one, but an older run is missing only if it was deleted.
        has_newer = any(run.generation > report.generation for run in begun_runs)
        return "a newer generation has started and this one is unknown" if has_newer else ""
    if own.pods.get(report.node) != report.pod:
        return "another agent runs this generation on this node"
    if own.end is not None:
        return "the run has ended"
    if own.doom is not None and report.at_s >= own.kill_at_s:
        return own.doom.fault or own.doom.loss or "rank 0 ended some time ago"
    return ""
