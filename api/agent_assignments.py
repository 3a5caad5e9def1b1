"""Assignments of node agents: the ranks to start or kill for one job, and the notices for its ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from api.agent_state import AgentStateCache
from api.plans import PlanView, plan_view
from scheduler.domain import gpu_sets
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import AgentReport, BegunRun
from scheduler.domain.worker_token import issue_worker_token
from scheduler.executors.rank_launch import LaunchSpec, assign_rank_slots, build_rank_environment
from scheduler.settings import Settings


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


class AgentRankView(TypedDict):
    rank: Annotated[int, Field(description="Number of the process among all ranks of the job, from 0.")]
    local_rank: Annotated[int, Field(description="Number of the process on its node, from 0.")]
    gpu: Annotated[int, Field(description="Index of the GPU on the node.")]
    env: Annotated[dict[str, str], Field(description="Environment variables to start the process with, by name.")]


class AssignmentView(TypedDict):
    """The reply to an agent's report. Fields from `world_size` on are absent unless the agent has to start ranks."""

    generation: Annotated[int, Field(description="Run that the agent should serve, or serves already.")]
    begun: Annotated[bool, Field(description="Whether the ranks of `generation` may start.")]
    ranks: Annotated[
        list[AgentRankView], Field(description="Processes to start on this node. Empty: nothing to start.")
    ]
    notice: Annotated[NoticeView | None, Field(description="What the reported ranks have to do now. Null: continue.")]
    kill: Annotated[str, Field(description="Why the reported ranks must be killed now. Empty: they may continue.")]
    done: Annotated[bool, Field(description="Whether the job has ended, so that the agent can exit.")]
    failed: Annotated[bool, Field(description="Whether the job has ended as failed.")]
    poll_after_s: Annotated[float, Field(description="Seconds to wait before the next report.")]
    world_size: NotRequired[Annotated[int, Field(description="Number of ranks of the job on all nodes.")]]
    command: NotRequired[Annotated[list[str], Field(description="Program to run as each rank, with its arguments.")]]
    steps: NotRequired[Annotated[int, Field(description="Declared number of optimizer steps. 0: unknown.")]]
    checkpoint_dir: NotRequired[
        Annotated[str, Field(description="Directory for checkpoints. Empty: the agent chooses one.")]
    ]
    plan: NotRequired[Annotated[PlanView, Field(description="Parallel plan that the ranks have to follow.")]]


NEW_AGENTS_WAIT_S_MAX = 600.0
"""Longest wait for agents on new nodes; pulling a large image takes minutes."""


def select_notice(
    job: Job, generation: int, now_s: float, agent_state: AgentStateCache, *, prepared: int = 0
) -> NoticeView | None:
    """Return the notice for the ranks of a generation, or None.

    Ranks that have no GPU to give up continue while agents start on their new nodes: for half of the time that they
    have to leave, and for at most NEW_AGENTS_WAIT_S_MAX.

    Args:
        prepared: generation that the agents must have prepared, if agents of machines run the job; 0 for pods.
    """
    notice = departure_notice(job, generation, now_s)
    if notice is None or notice["action"] != "replan":
        return notice
    own = next((run for run in agent_state.begun_runs(job.id, now_s) if run.generation == generation), None)
    target, leave_by_s = job.allocation.target, job.allocation.leave_by_s
    if own is None or gpu_sets.difference(own.gpus, target):
        return notice
    half_s = math.inf if leave_by_s is None else (job.state_since_s + leave_by_s) / 2
    may_wait = now_s < min(half_s, job.state_since_s + NEW_AGENTS_WAIT_S_MAX)
    return None if may_wait and not agent_state.have_all_reported(job.id, target, now_s, prepared=prepared) else notice


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


POLL_INTERVAL_S = 2.0
FAST_POLL_INTERVAL_S = 1.0
"""Poll interval while the agent does not run its assignment yet."""


def build_assignment(
    job: Job,
    begun_runs: Sequence[BegunRun],
    report: AgentReport,
    *,
    notice: NoticeView | None,
    settings: Settings,
    secret: bytes,
) -> AssignmentView:
    """Return the reply to an agent's report. `notice` is for the ranks that it reports. A pure function."""
    if job.is_ended:
        failed = job.state is JobState.FAILED
        return {**_EMPTY_ASSIGNMENT, "done": True, "failed": failed, "notice": {**_LEAVE_NOTICE}}
    run = find_startable_run(begun_runs, report)
    generation = job.allocation.generation if run is None else run.generation
    kill = find_kill_reason(begun_runs, report)
    is_settled = report.generation == job.allocation.generation and notice is None and not kill
    reply: AssignmentView = {
        **_EMPTY_ASSIGNMENT,
        "generation": generation,
        "begun": run is not None,
        "notice": notice,
        "kill": kill,
        "poll_after_s": POLL_INTERVAL_S if is_settled else FAST_POLL_INTERVAL_S,
    }
    if run is not None and report.generation < run.generation:
        _add_start_fields(reply, job, run, report.node, settings=settings, secret=secret)
    return reply


_LEAVE_NOTICE: NoticeView = {"action": "leave", "step": None, "seconds_left": None}
_EMPTY_ASSIGNMENT: AssignmentView = {
    "generation": 0,
    "begun": False,
    "ranks": [],
    "notice": None,
    "kill": "",
    "done": False,
    "failed": False,
    "poll_after_s": FAST_POLL_INTERVAL_S,
}


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


def _add_start_fields(
    reply: AssignmentView, job: Job, run: BegunRun, node: str, *, settings: Settings, secret: bytes
) -> None:
    """Add everything the agent needs to start its ranks.

    The agent chooses its own folders: EBBTIDE_RUN_ROOT, EBBTIDE_RUN_DIR, EBBTIDE_PLAN and, unless the job sets one,
    EBBTIDE_CHECKPOINT_DIR stay empty.
    """
    briefing = LaunchSpec(
        job_id=job.id,
        generation=run.generation,
        world_size=len(run.seats),
        steps=job.spec.steps,
        store_host=settings.store_host,
        store_port=settings.store_port,
        run_root="",
        run_dir="",
        plan_path="",
        checkpoint_dir=job.spec.checkpoint.dir,
        url=settings.worker_url,
        token=issue_worker_token(secret, job.id, run.generation),
        frozen_layers=run.frozen_layers,
        checkpoint_step=int(job.progress.checkpoint_steps),
        checkpoint_interval_s=job.spec.checkpoint.interval_s,
        checkpoint_keep=job.spec.checkpoint.keep,
        env=job.spec.env,
    )
    places = [place for place in assign_rank_slots(run.seats) if place.node == node]
    reply["world_size"] = briefing.world_size
    reply["command"] = list(job.spec.command)
    reply["steps"] = briefing.steps
    reply["checkpoint_dir"] = briefing.checkpoint_dir
    reply["plan"] = plan_view(run.plan)
    reply["ranks"] = [
        {
            "rank": place.rank,
            "local_rank": place.local_rank,
            "gpu": place.gpu,
            "env": build_rank_environment(briefing, place, inherited={}),
        }
        for place in places
    ]
