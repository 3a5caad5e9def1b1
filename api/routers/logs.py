"""Logs: what the ranks of a job print, as pages and as a stream."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from api.answers.logs import LogPageView
from api.dependencies import Limit, Service, ServiceDep, WorldDep
from api.errors import ProblemError, refuse
from api.problems import problems
from api.routers.streams import STREAMED, LastEventId, StreamsDep
from api.routers.streams import router as streams_router
from api.routing import noun_router
from api.streams.event_stream import EventStream
from api.streams.following import follow_logs
from api.streams.job_logs import JobLogs, LogPlace, parse_place
from api.world import World
from scheduler.domain.job import Job
from scheduler.executors.local_records import RunRoot

router = noun_router("jobs")

RankNumber = Annotated[int, Query(ge=0, lt=2**31, description="Whose lines: ranks print into a file each.")]
Generation = Annotated[int | None, Query(ge=1, lt=2**31, description="Only of this one; default: the newest, and on.")]
Tail = Annotated[int | None, Query(ge=0, le=100_000, description="Begin with the last so many lines.")]


@streams_router.get("/jobs/{job_id}/logs")
def stream_logs(
    job_id: str,
    world: WorldDep,
    service: ServiceDep,
    streams: StreamsDep,
    *,
    rank: RankNumber = 0,
    generation: Generation = None,
    tail: Tail = None,
    cursor: str = "",
    last_event_id: LastEventId = "",
) -> Response:
    """Lines as they are printed, until an event `end` says that the job has ended. `gap` tells of bytes that are
    gone."""
    logs = _logs(world, service, job_id, rank, generation)
    field = "Last-Event-ID" if last_event_id else "cursor"
    place = _place(logs, tail, field, last_event_id or cursor)

    def has_ended() -> bool:
        now_s = service.clock.now_s()  # what has just been submitted still waits in the inbox
        job = service.agents.job(job_id, now_s) or service.present.look(now_s).snapshot.jobs.get(job_id)
        return job is None or job.is_ended

    return EventStream(follow_logs(streams, logs, place, has_ended), streams)


@router.get("/jobs/{job_id}/logs", responses=STREAMED | problems(501))
def get_logs(
    job_id: str,
    world: WorldDep,
    service: ServiceDep,
    *,
    rank: RankNumber = 0,
    generation: Generation = None,
    tail: Tail = None,
    limit: Limit = 1000,
    cursor: str = "",
) -> LogPageView:
    """What a rank has printed, oldest first; nothing for one that has not begun."""
    logs = _logs(world, service, job_id, rank, generation)
    read = logs.read(_place(logs, tail, "cursor", cursor), limit)
    more = bool(read.lines) and bool(logs.read(read.place, 1).lines)
    return {
        "job_id": job_id,
        "generations": logs.generations(),
        "items": list(read.lines),
        "dropped_bytes": read.dropped_bytes,
        "next": str(read.place) if more else None,
        "resume": str(read.place),
    }


def _place(logs: JobLogs, tail: int | None, field: str, cursor: str) -> LogPlace:
    if cursor:
        return parse_place(cursor) or refuse(field, cursor, "the cursor of a line in an earlier answer")
    return LogPlace(logs.newest()) if tail is None else logs.tail(tail)


def _logs(world: World, service: Service, job_id: str, rank: int, generation: int | None) -> JobLogs:
    job = world.job(job_id)
    logs = JobLogs(RunRoot(service.settings.run_dir), job_id, rank, only=generation)
    if not logs.generations():
        _require_kept(job, service, generation)
    return logs


def _require_kept(job: Job, service: Service, generation: int | None) -> None:
    """Raises ProblemError where what was printed is not to be found here: elsewhere, or no more."""
    if service.agents.begun_of(job.id, service.clock.now_s()):
        where = job.spec.namespace or service.settings.job_namespace
        asked = f"kubectl logs --namespace {where} --selector ebbtide.dev/job={job.id} --prefix --tail=-1"
        raise ProblemError(501, "logs-elsewhere", f"job {job.id} prints in pods, whose logs the cluster has: {asked}")
    if generation is not None and generation <= job.allocation.generation:
        raise ProblemError(404, "not-found", f"nothing is kept of generation {generation} of job {job.id}")
    if job.is_ended and job.account.first_started_at_s is not None:
        raise ProblemError(404, "not-found", f"what job {job.id} has printed is not kept any more")
