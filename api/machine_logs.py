"""Output of ranks on machines, which their agents send. The routes of job logs read it."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from api.http.dependencies import JobIdPath, MachineNamePath, Service, ServiceDep, create_router, require_machine
from api.http.errors import ProblemError, problem_responses, raise_not_found
from api.identity.authorization import Caller, RouteRule, requires
from scheduler.domain.observation import BegunRun
from scheduler.executors.agent_executor import agent_id
from scheduler.executors.log_files import LogLimits
from scheduler.executors.shipped_logs import (
    LogGapError,
    LogsDeletedError,
    RunMachines,
    ShippedLogs,
    read_run_machines,
)
from scheduler.executors.stored_logs import LogRoot

CHUNK_BYTES_MAX = 262_144
OFFSET_HEADER = "Upload-Offset"
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_OFFSET = {OFFSET_HEADER: {"description": "Offset at which the stored output ends.", "schema": {"type": "integer"}}}

logger = logging.getLogger(__name__)
router = create_router("machines")

GenerationPath = Annotated[int, Path(ge=1, lt=2**31, description="Run of the job that printed the output.")]
RankPath = Annotated[int, Path(ge=0, lt=2**31, description="Number of the worker process that printed it, from 0.")]


@router.put(
    "/machines/{machine}/logs/{job_id}/{generation}/{rank}",
    status_code=204,
    response_class=Response,
    responses={204: {"description": "The output is stored.", "headers": _OFFSET}, **problem_responses(409)},
    openapi_extra={"requestBody": {"required": False, "content": _BINARY}},
)
@requires(RouteRule(Caller.MACHINES))
async def store_rank_output(
    machine: MachineNamePath,
    job_id: JobIdPath,
    generation: GenerationPath,
    rank: RankPath,
    *,
    request: Request,
    service: ServiceDep,
    offset: Annotated[
        int, Query(ge=0, lt=2**62, description="Number of bytes that the rank printed before these, in this run.")
    ],
    complete: Annotated[bool, Query(description="Whether the rank has ended and these are its last bytes.")] = False,
) -> Response:
    """Store the next output of a rank, at most 262144 bytes. Needs the credential of the machine that runs it.

    Output that is stored already is skipped. After a gap, the header `Upload-Offset` of the error tells where to
    continue."""
    machines = await run_in_threadpool(
        _authorize, service, request, machine, job_id=job_id, generation=generation, rank=rank
    )
    try:
        data = await request.body()
    except ClientDisconnect:
        raise ProblemError(400, "malformed", "the upload was interrupted; nothing was stored. Send it again") from None
    if len(data) > CHUNK_BYTES_MAX:
        detail = f"the output has {len(data)} bytes; at most {CHUNK_BYTES_MAX} are accepted at once. Send it in parts"
        raise ProblemError(413, "body-too-large", detail)

    def store() -> int:
        logs = ShippedLogs(service.settings.run_dir, _limits(service))
        if machines is not None:
            logs.begin(job_id, generation, machines)
        return logs.append(job_id, generation, rank, data, offset=offset, is_complete=complete)

    try:
        end = await run_in_threadpool(store)
    except LogGapError as gap:
        detail = f"offset is {offset}, but the stored output ends at {gap.expected}. Continue there"
        raise ProblemError(409, "conflict", detail, headers={OFFSET_HEADER: str(gap.expected)}) from None
    except (LogsDeletedError, FileNotFoundError):
        detail = f"the logs of generation {generation} of job {job_id} were deleted"
        raise ProblemError(404, "not-found", detail) from None
    except OSError as error:
        detail = f"the output cannot be stored: {error.strerror}. Check EBBTIDE_RUN_DIR of the service, then retry"
        raise ProblemError(503, "store-unavailable", detail, headers={"Retry-After": "30"}) from error
    return Response(status_code=204, headers={OFFSET_HEADER: str(end)})


def claim_logs(service: Service, run: BegunRun) -> None:
    """Reserve the logs of a run for its machines, before its ranks start.

    If the disk refuses, the first output tries again, which fails once the run has ended.
    """
    folder = LogRoot(service.settings.run_dir).folder(run.job_id, run.generation)
    logs = ShippedLogs(service.settings.run_dir, _limits(service))
    try:
        if read_run_machines(folder) is None:
            logs.begin(run.job_id, run.generation, RunMachines.of(run))
    except OSError as error:
        logger.warning("the logs of generation %d of %s cannot be stored: %s", run.generation, run.job_id, error)


def _authorize(
    service: Service, request: Request, machine: str, *, job_id: str, generation: int, rank: int
) -> RunMachines | None:
    """Check that the machine runs this rank. Return the machines of the run if their folder is still to be created.

    Records of runs are deleted soon after their end. Then the folder, created at their begin, names its writers.

    Raises:
        ProblemError: as of `require_machine`; 404 if the run does not exist, 403 if another machine has the rank.
    """
    agent, now_s = agent_id(require_machine(service, request, machine)), service.clock.now_s()
    if service.agent_state.job(job_id, now_s) is None:
        raise_not_found("job", job_id)
    stored = read_run_machines(LogRoot(service.settings.run_dir).folder(job_id, generation))
    begun = (run for run in service.agent_state.begun_runs(job_id, now_s) if run.generation == generation)
    machines = stored or next((RunMachines.of(run) for run in begun), None)
    if machines is None:
        raise ProblemError(404, "not-found", f"generation {generation} of job {job_id} is not running")
    if rank >= len(machines.agents) or machines.agents[rank] != agent:
        raise ProblemError(
            403, "forbidden", f"rank {rank} of generation {generation} of job {job_id} is not on machine {machine}"
        )
    return None if stored else machines


def _limits(service: Service) -> LogLimits:
    return LogLimits(service.settings.log_bytes, service.settings.log_generations)
