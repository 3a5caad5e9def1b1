"""Logs of a job's ranks, as pages and as a stream."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from api.events import STREAM_RESPONSES, LastEventIdHeader, StreamsDep, stream_router
from api.http.dependencies import ContextDep, JobIdPath, LimitParameter, Service, ServiceDep, create_router
from api.http.errors import ProblemError, problem_responses, raise_invalid_field
from api.identity.authorization import VIEWER, requires
from api.state import RequestContext
from api.streams.server_sent_events import EventStreamResponse
from api.streams.sources import JobLogReader, LogPageView, LogPosition, follow_logs, parse_position
from scheduler.domain.job import Job
from scheduler.executors.stored_logs import LogRoot

router = create_router("jobs")

RankParameter = Annotated[
    int, Query(ge=0, lt=2**31, description="Number of the worker process whose output to read, from 0.")
]
GenerationParameter = Annotated[
    int | None, Query(ge=1, lt=2**31, description="Run of the job to read. Default: the newest, and later ones.")
]
TailParameter = Annotated[
    int | None,
    Query(ge=0, le=100_000, description="Number of last lines to start with, at most 100000. Default: all lines."),
]
LogCursorParameter = Annotated[
    str,
    Query(description="Position from an earlier response: `next`, `resume` or that of a line. Empty: `tail` decides."),
]


@stream_router.get("/jobs/{job_id}/logs")
@requires(VIEWER)
def stream_logs(
    job_id: JobIdPath,
    context: ContextDep,
    service: ServiceDep,
    streams: StreamsDep,
    *,
    rank: RankParameter = 0,
    generation: GenerationParameter = None,
    tail: TailParameter = None,
    cursor: str = "",
    last_event_id: LastEventIdHeader = "",
) -> Response:
    """Stream lines until the job ends, which an event `end` marks. An event `gap` stands for deleted output."""
    logs = _log_reader(context, service, job_id, rank, generation)
    field = "Last-Event-ID" if last_event_id else "cursor"
    place = _start_position(logs, tail, field, last_event_id or cursor)

    def has_ended() -> bool:
        now_s = service.clock.now_s()  # a job that was just submitted is still in the inbox
        job = service.agent_state.job(job_id, now_s) or service.state_reader.read(now_s).snapshot.jobs.get(job_id)
        return job is None or job.is_ended

    return EventStreamResponse(follow_logs(streams, logs, place, has_ended), streams)


@router.get("/jobs/{job_id}/logs", responses=STREAM_RESPONSES | problem_responses(501))
@requires(VIEWER)
def get_logs(
    job_id: JobIdPath,
    context: ContextDep,
    service: ServiceDep,
    *,
    rank: RankParameter = 0,
    generation: GenerationParameter = None,
    tail: TailParameter = None,
    limit: LimitParameter = 1000,
    cursor: LogCursorParameter = "",
) -> LogPageView:
    """List what a rank has printed, oldest first. Empty if the rank has not started."""
    logs = _log_reader(context, service, job_id, rank, generation)
    batch = logs.read(_start_position(logs, tail, "cursor", cursor), limit)
    has_more = bool(batch.lines) and bool(logs.read(batch.position, 1).lines)
    return {
        "job_id": job_id,
        "generations": logs.generations(),
        "items": list(batch.lines),
        "dropped_bytes": batch.dropped_bytes,
        "next": str(batch.position) if has_more else None,
        "resume": str(batch.position),
    }


def _start_position(logs: JobLogReader, tail: int | None, field: str, cursor: str) -> LogPosition:
    if cursor:
        return parse_position(cursor) or raise_invalid_field(
            field, cursor, "the cursor of a line in an earlier response"
        )
    return LogPosition(logs.newest_generation()) if tail is None else logs.tail_position(tail)


def _log_reader(
    context: RequestContext, service: Service, job_id: str, rank: int, generation: int | None
) -> JobLogReader:
    job = context.job(job_id)
    root = LogRoot(service.settings.run_dir)
    logs = JobLogReader(root, job_id, rank, generation=generation, now=service.clock.now_s)
    _require_rank(job, logs, rank)
    if not logs.generations():
        _require_available(job, service, generation)
    return logs


def _require_rank(job: Job, logs: JobLogReader, rank: int) -> None:
    """Check that the rank can exist: the job has at most one for each GPU, and a larger range may have had more.

    Raises:
        InvalidDocumentError: it cannot.
    """
    printed = logs.ranks()
    if rank >= job.spec.max_gpus and rank not in printed:
        listed = f"; with output: {', '.join(map(str, printed))}" if printed else ""
        raise_invalid_field("rank", rank, f"0 to {job.spec.max_gpus - 1}{listed}")


def _require_available(job: Job, service: Service, generation: int | None) -> None:
    """Check why there is no output.

    Raises:
        InvalidDocumentError: the job has not had this generation.
        ProblemError: 501 if the logs are in the cluster, 404 if they were deleted.
    """
    runs = service.agent_state.begun_runs(job.id, service.clock.now_s())
    if any(run.in_pods or run.master is None for run in runs):  # None: begun by an older version
        namespace = job.spec.namespace or service.settings.job_namespace
        command = f"kubectl logs --namespace {namespace} --selector ebbtide.dev/job={job.id} --prefix --tail=-1"
        raise ProblemError(501, "logs-elsewhere", f"job {job.id} runs in pods; the cluster has their logs: {command}")
    newest = job.allocation.generation
    if generation is not None and generation > newest:
        raise_invalid_field("generation", generation, f"1 to {newest}" if newest else "none; the job has not started")
    if generation is not None:
        raise ProblemError(404, "not-found", f"the logs of generation {generation} of job {job.id} were deleted")
    if job.is_ended and job.account.first_started_at_s is not None:
        raise ProblemError(404, "not-found", f"the logs of job {job.id} were deleted")
