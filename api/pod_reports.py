"""Reports of the agents in pods, one per job and node, and what each agent has to do about its runs.

Report and reply have the form of those of machines (`machine_reports`). An agent in a pod also learns that its job has
ended, so that the pod can end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import Field

from api.http.dependencies import JobIdPath, NodeNamePath, Service, ServiceDep, create_router, require_agent
from api.http.errors import raise_invalid_field, raise_not_found
from api.identity.authorization import Caller, RouteRule, requires
from api.machine_reports import (
    AgentReplyView,
    OrderBuilder,
    RunsReportDocument,
    build_reply,
    find_job_version,
    has_orders,
    read_reports,
    wait_for_orders,
)
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import AgentReport
from scheduler.domain.snapshot import Snapshot

router = create_router("jobs")

POLL_S = 1.0
"""Pause of the agent between a reply and its next report, unless that has news. A thousand pods may report at once."""
STEADY_RECHECK_S, CHANGING_RECHECK_S = 2.0, 0.5
"""Pause between two looks at what a pod with runs has to do: while they go on, and while one starts or ends."""


class PodReportDocument(RunsReportDocument):
    """The state of the runs of a job on one node."""

    pod: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        description="Name that tells this agent from earlier and later ones on the node."
    )
    address: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        description="Address at which ranks in other pods of the job reach this one."
    )


class PodReplyView(AgentReplyView):
    """The reply to the report of an agent in a pod."""

    done: Annotated[bool, Field(description="Whether the job has ended, so that the agent can exit.")]
    failed: Annotated[bool, Field(description="Whether the job has ended as failed.")]


@router.post("/jobs/{job_id}/agents/{node}", response_model=PodReplyView)
@requires(RouteRule(Caller.AGENTS))
async def report_agent(
    job_id: JobIdPath, node: NodeNamePath, document: PodReportDocument, request: Request, service: ServiceDep
) -> JSONResponse:
    """Report the state of the runs of a job in a pod. Needs the token of the job's agents.

    The reply waits until there is something to do, at most `wait_s` and a quarter of EBBTIDE_DISCONNECT_S.
    """
    require_agent(service, request, job_id=job_id)
    for number, run in enumerate(document.runs):
        if (run.job_id, run.node) != (job_id, node):
            raise_invalid_field(f"runs.{number}", f"{run.job_id} on {run.node}", f"a run of {job_id} on {node}")
    recheck_after_s = CHANGING_RECHECK_S if document.is_changing else STEADY_RECHECK_S
    reports = read_reports(document, document.pod, service.clock.now_s(), address=document.address)
    # A JSONResponse skips validation, which costs more than everything else.
    return JSONResponse(
        await wait_for_orders(
            service,
            lambda: _build_reply(service, job_id, node, document.pod, reports),
            lambda reply: reply["done"] or has_orders(reply),
            lambda snapshot: find_job_version(snapshot.jobs.get(job_id)),
            wait_s=document.wait_s,
            recheck_after_s=recheck_after_s if document.runs else math.inf,
        )
    )


def _build_reply(
    service: Service, job_id: str, node: str, pod: str, reports: Sequence[AgentReport]
) -> tuple[Snapshot, PodReplyView]:
    """Return the reply, and the snapshot that it follows from.

    Raises:
        ProblemError: 404 without the job, or without the node while the job goes on.
    """
    now_s = service.clock.now_s()
    snapshot, epoch = service.agent_state.decisions(now_s)
    job = service.agent_state.job(job_id, now_s)
    if job is None:
        raise_not_found("job", job_id)
    if not job.is_ended and node not in snapshot.nodes:
        raise_not_found("node", node)
    is_wanted = not job.is_ended and node in job.allocation.target
    empty = AgentReport(job_id, node, pod, now_s, since_s=now_s)
    wanted = {(job_id, node): empty} if is_wanted else {}
    orders = OrderBuilder(service, snapshot, now_s).build_orders(wanted, reports)
    reply = build_reply(service, epoch, orders, poll_after_s=POLL_S)
    return snapshot, {**reply, "done": job.is_ended, "failed": job.state is JobState.FAILED}
