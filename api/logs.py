"""Logs: what the ranks of a job print, as pages and as a stream."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from api.events import STREAM_RESPONSES, LastEventIdHeader, StreamsDep
from api.events import stream_router as streams_router
from api.http.dependencies import ContextDep, LimitParameter, Service, ServiceDep, create_router
from api.http.errors import ProblemError, problem_responses, raise_invalid_field
from api.state import RequestContext
from api.streams.server_sent_events import EventStreamResponse
from api.streams.sources import JobLogReader, LogPageView, LogPosition, follow_logs, parse_position
from scheduler.domain.job import Job
from scheduler.executors.local_records import RunRoot

router = create_router("jobs")

RankParameter = Annotated[int, Query(ge=0, lt=2**31, description="Whose lines: ranks print into a file each.")]
GenerationParameter = Annotated[
    int | None, Query(ge=1, lt=2**31, description="Only of this one; default: the newest, and on.")
]
TailParameter = Annotated[int | None, Query(ge=0, le=100_000, description="Begin with the last so many lines.")]


@streams_router.get("/jobs/{job_id}/logs")
def stream_logs(
    job_id: str,
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
    """Lines as they are printed, until an event `end` says that the job has ended. `gap` tells of bytes that are
    gone."""
    logs = _log_reader(context, service, job_id, rank, generation)
    field = "Last-Event-ID" if last_event_id else "cursor"
    place = _start_position(logs, tail, field, last_event_id or cursor)

    def has_ended() -> bool:
        now_s = service.clock.now_s()  # what has just been submitted still waits in the inbox
        job = service.agent_state.job(job_id, now_s) or service.state_reader.read(now_s).snapshot.jobs.get(job_id)
        return job is None or job.is_ended

    return EventStreamResponse(follow_logs(streams, logs, place, has_ended), streams)


@router.get("/jobs/{job_id}/logs", responses=STREAM_RESPONSES | problem_responses(501))
def get_logs(
    job_id: str,
    context: ContextDep,
    service: ServiceDep,
    *,
    rank: RankParameter = 0,
    generation: GenerationParameter = None,
    tail: TailParameter = None,
    limit: LimitParameter = 1000,
    cursor: str = "",
) -> LogPageView:
    """What a rank has printed, oldest first; nothing for one that has not begun."""
    logs = _log_reader(context, service, job_id, rank, generation)
    read = logs.read(_start_position(logs, tail, "cursor", cursor), limit)
    more = bool(read.lines) and bool(logs.read(read.position, 1).lines)
    return {
        "job_id": job_id,
        "generations": logs.generations(),
        "items": list(read.lines),
        "dropped_bytes": read.dropped_bytes,
        "next": str(read.position) if more else None,
        "resume": str(read.position),
    }


def _start_position(logs: JobLogReader, tail: int | None, field: str, cursor: str) -> LogPosition:
    if cursor:
        return parse_position(cursor) or raise_invalid_field(field, cursor, "the cursor of a line in an earlier answer")
    return LogPosition(logs.newest_generation()) if tail is None else logs.tail_position(tail)


def _log_reader(
    context: RequestContext, service: Service, job_id: str, rank: int, generation: int | None
) -> JobLogReader:
    job = context.job(job_id)
    logs = JobLogReader(RunRoot(service.settings.run_dir), job_id, rank, only=generation)
    if not logs.generations():
        _require_available(job, service, generation)
    return logs


def _require_available(job: Job, service: Service, generation: int | None) -> None:
    """Raises ProblemError where what was printed is not to be found here: elsewhere, or no more."""
    if service.agent_state.begun_runs(job.id, service.clock.now_s()):
        where = job.spec.namespace or service.settings.job_namespace
        asked = f"kubectl logs --namespace {where} --selector ebbtide.dev/job={job.id} --prefix --tail=-1"
        raise ProblemError(501, "logs-elsewhere", f"job {job.id} prints in pods, whose logs the cluster has: {asked}")
    if generation is not None and generation <= job.allocation.generation:
        raise ProblemError(404, "not-found", f"nothing is kept of generation {generation} of job {job.id}")
    if job.is_ended and job.account.first_started_at_s is not None:
        raise ProblemError(404, "not-found", f"what job {job.id} has printed is not kept any more")
