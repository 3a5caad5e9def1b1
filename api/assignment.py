"""What the agent of one job on one node has to do: which ranks to start, what to tell its ranks, when to end. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from api.answers.agent import AssignmentView, NoticeView
from api.answers.plan import plan_view
from scheduler.domain.agent_report import AgentReport, BegunRun
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.worker_token import issue_token
from scheduler.executors.render import Briefing, rank_environment, rank_places
from scheduler.settings import Settings

POLL_S = 2.0
SOON_S = 1.0
"""An agent asks again after so long; after SOON_S where what it runs is not what is wanted."""


def assignment(
    job: Job,
    begun: Sequence[BegunRun],
    report: AgentReport,
    *,
    notice: NoticeView | None,
    settings: Settings,
    secret: bytes,
) -> AssignmentView:
    """The reply to a report. `notice` is what the ranks that it tells of are to hear.

    `begun`: ranks of `generation` may be started; what they need is there for an agent that has not come to that
    generation. `kill`: why the ranks that it reports have to be killed now, empty where they need not. `done`: the
    job has ended, and `failed` tells how.
    """
    if job.is_ended:
        failed = job.state is JobState.FAILED
        return {**_NOTHING, "done": True, "failed": failed, "notice": {**_LEAVE}}
    run = _startable(begun, report)
    generation = job.allocation.generation if run is None else run.generation
    kill = _kill(begun, report)
    is_settled = report.generation == job.allocation.generation and notice is None and not kill
    reply: AssignmentView = {
        **_NOTHING,
        "generation": generation,
        "begun": run is not None,
        "notice": notice,
        "kill": kill,
        "poll_after_s": POLL_S if is_settled else SOON_S,
    }
    if run is not None and report.generation < run.generation:
        _put_start(reply, job, run, report.node, settings=settings, secret=secret)
    return reply


_LEAVE: NoticeView = {"action": "leave", "step": None, "seconds_left": None}
_NOTHING: AssignmentView = {
    "generation": 0,
    "begun": False,
    "ranks": [],
    "notice": None,
    "kill": "",
    "done": False,
    "failed": False,
    "poll_after_s": SOON_S,
}


def _startable(begun: Sequence[BegunRun], report: AgentReport) -> BegunRun | None:
    """The newest run that this agent, and no other one on its node, may start or has started."""
    own = [run for run in begun if run.may_start and run.pods.get(report.node) == report.pod]
    return own[-1] if own else None


def _kill(begun: Sequence[BegunRun], report: AgentReport) -> str:
    if not report.has_living_ranks:
        return ""
    own = next((run for run in begun if run.generation == report.generation), None)
    if own is None:
        # What was begun a moment ago may not have been read yet, but never where something newer was.
        newer = any(run.generation > report.generation for run in begun)
        return "a newer generation was begun, and nobody knows this one any more" if newer else ""
    if own.pods.get(report.node) != report.pod:
        return "another agent runs this generation here"
    if own.end is not None:
        return "the run has ended"
    if own.doom is not None and report.at_s >= own.kill_at_s:
        return own.doom.fault or own.doom.loss or "rank 0 has said its last word a while ago"
    return ""


def _put_start(reply: AssignmentView, job: Job, run: BegunRun, node: str, *, settings: Settings, secret: bytes) -> None:
    """All that the agent needs to start its ranks. Folders are its own: EBBTIDE_RUN_ROOT, EBBTIDE_RUN_DIR,
    EBBTIDE_PLAN and, unless the job names one, EBBTIDE_CHECKPOINT_DIR are left empty."""
    briefing = Briefing(
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
        token=issue_token(secret, job.id, run.generation),
        frozen_layers=run.frozen_layers,
        checkpoint_step=int(job.progress.checkpoint_steps),
        checkpoint_interval_s=job.spec.checkpoint.interval_s,
        checkpoint_keep=job.spec.checkpoint.keep,
        env=job.spec.env,
    )
    places = [place for place in rank_places(run.seats) if place.node == node]
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
            "env": rank_environment(briefing, place, inherited={}),
        }
        for place in places
    ]
