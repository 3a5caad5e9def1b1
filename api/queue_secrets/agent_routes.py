"""Values of secrets. Only the agent that runs the job's current generation receives them."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from typing import Annotated

from fastapi import Query, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import (
    JobIdPath,
    Service,
    ServiceDep,
    create_router,
    identify_machine,
    require_agent,
    with_hosted_nodes,
)
from api.http.errors import ProblemError, problem_responses, raise_conflict
from api.identity.authorization import Caller, RouteRule, requires
from api.queue_secrets.missing_secrets import report_missing_secret
from api.queue_secrets.routes import describe_undecryptable
from api.queue_secrets.vault import SecretKeyError
from scheduler.domain.job import Job
from scheduler.domain.machine import MACHINE_CREDENTIAL_PREFIX

router = create_router("secrets")
logger = logging.getLogger(__name__)


class SecretValuesView(TypedDict):
    """Values of the secrets that a job names."""

    values: Annotated[dict[str, str], Field(description="Value by name of the secret, in base64.")]


@router.get("/jobs/{job_id}/secrets", responses=problem_responses(409))
@requires(RouteRule(Caller.AGENTS, or_callers=(Caller.MACHINES,)))
def fetch_secrets(
    job_id: JobIdPath,
    request: Request,
    service: ServiceDep,
    response: Response,
    *,
    node: Annotated[str, Query(max_length=253, description="Node on which the agent runs the job.")],
    generation: Annotated[int, Query(ge=1, lt=2**63, description="Run of the job that the agent prepares.")],
) -> SecretValuesView:
    """Return the values of the job's secrets. Needs the agent of the job, or the machine, that is to run this
    generation now. Users cannot call it, whatever their role is."""
    job = _authorize(service, request, job_id, node, generation)
    response.headers["Cache-Control"] = "no-store"
    return {"values": dict(_open_secrets(service, job))}


def _authorize(service: Service, request: Request, job_id: str, node: str, generation: int) -> Job:
    """Return the job whose current run the caller has on this node.

    Raises:
        ProblemError: 401 or 403 for another caller, 409 if the run is not the current one.
    """
    now_s = service.clock.now_s()
    snapshot = service.agent_state.snapshot(now_s)
    authorization = request.headers.get("Authorization", "")
    if authorization.partition(" ")[2].strip().startswith(MACHINE_CREDENTIAL_PREFIX):
        machine = with_hosted_nodes(service, identify_machine(service, request), snapshot)
        may_run = node in machine.nodes
    else:
        require_agent(service, request, job_id=job_id)
        may_run = True
    job = snapshot.jobs.get(job_id)
    if not may_run or job is None or node not in job.allocation.target:
        raise ProblemError(403, "forbidden", f"job {job_id:.200} does not run on a node of this agent")
    if job.is_ended or job.allocation.generation != generation:
        raise_conflict(f"generation {generation} of job {job_id} is not the current one")
    return job


def _open_secrets(service: Service, job: Job) -> Mapping[str, str]:
    """Return the values. If some cannot be given out, their jobs wait until they can, and this start costs no retry."""
    values, problems, queue = dict[str, str](), dict[str, str](), job.spec.queue
    for name in job.spec.program.secret_names:
        sealed = service.store.secrets.find(queue, name)
        if sealed is None:
            problems[name] = f"secret {name} of queue {queue} was deleted. Set it again"
            continue
        try:
            values[name] = base64.b64encode(service.vault.open(sealed)).decode()
        except SecretKeyError as error:
            logger.error("job %s cannot start: %s", job.id, error)
            problems[name] = describe_undecryptable(name, queue)
    for name in problems:
        report_missing_secret(service, queue, name)
    if problems:
        raise_conflict(". ".join(problems.values()))
    return values
