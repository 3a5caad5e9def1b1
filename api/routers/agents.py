"""Node agents: they report the ranks that they run, and hear in the reply what they have to do."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import Field

from api.answers.agent import AssignmentView
from api.assignment import assignment
from api.dependencies import ServiceDep, require_agent
from api.errors import not_found, refuse
from api.notices import notice_for, save_notice
from api.routers.progress import ByteCount, StepNumber
from api.routing import noun_router
from scheduler.documents.document import Document
from scheduler.domain.agent_report import AgentReport, RankReport
from scheduler.executors.rank_status import rank_status

router = noun_router("jobs")

RANKS_MAX = 256
TEXT_LENGTH_MAX = 8192
ExitCode = Annotated[int, Field(strict=True, ge=-255, le=255)]
Text = Annotated[str, Field(max_length=TEXT_LENGTH_MAX)]


class RankStatement(Document):
    """One rank. `exit_code`: null while it lives, minus the signal's number where one ended it. `status`: what it
    says of itself, as in its status file, written at `written_at_ns`. `tail`: the end of its log where it did not end
    well. `oom_kills`: the kernel's count for its control group, read after its end."""

    rank: StepNumber
    exit_code: ExitCode | None = None
    status: dict[str, Any] | None = None
    written_at_ns: ByteCount = 0
    tail: Text = ""
    oom_kills: StepNumber | None = None


class AgentStatement(Document):
    """`pod` tells this agent from others before and after it on the node. `generation`: whose ranks these are, 0 for
    none. `failure`: why they could not be started. `killed`: why they were killed, where the reply had not asked for
    it. `terminated`: they were sent SIGTERM."""

    pod: Annotated[str, Field(min_length=1, max_length=200)]
    generation: StepNumber
    ranks: Annotated[list[RankStatement], Field(max_length=RANKS_MAX)] = []  # noqa: RUF012  # pydantic copies it
    failure: Text = ""
    killed: Text = ""
    terminated: bool = False


@router.post("/jobs/{job_id}/agents/{node}", response_model=AssignmentView)
def report_agent(
    job_id: str, node: str, statement: AgentStatement, request: Request, service: ServiceDep
) -> JSONResponse:
    """Needs the token of the job's agents. The reply is the agent's assignment; it asks again after `poll_after_s`."""
    require_agent(service, request, job_id=job_id)
    now_s = service.clock.now_s()
    job = service.agents.job(job_id, now_s)
    if job is None:
        not_found("job", job_id)
    report = _report(job_id, node, statement, now_s)
    if not job.is_ended:
        if node not in service.agents.snapshot(now_s).nodes:
            not_found("node", node)
        service.agents.take(report)
    begun = service.agents.begun_of(job_id, now_s)
    notice = notice_for(job, report.generation, now_s, service.agents) if report.has_living_ranks else None
    if notice is None and report.has_living_ranks:
        notice = save_notice(job, report)
    reply = assignment(job, begun, report, notice=notice, settings=service.settings, secret=service.token_secret)
    return JSONResponse(reply)  # as it is: to look at it once more would cost more than all of the above


def _report(job_id: str, node: str, statement: AgentStatement, now_s: float) -> AgentReport:
    ranks = tuple(_rank(number, rank) for number, rank in enumerate(statement.ranks))
    return AgentReport(
        job_id=job_id,
        node=node,
        pod=statement.pod,
        at_s=now_s,
        generation=statement.generation,
        ranks=ranks,
        failure=statement.failure,
        killed=statement.killed,
        terminated=statement.terminated,
        since_s=now_s,
    )


def _rank(number: int, told: RankStatement) -> RankReport:
    try:
        status = None if told.status is None else rank_status(told.status, told.written_at_ns)
    except ValueError as wrong:
        refuse(f"ranks.{number}.status", told.status, f"what a rank's status file may hold: {wrong}")
    return RankReport(told.rank, told.exit_code, status, told.tail, told.oom_kills)
