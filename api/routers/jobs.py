"""Jobs: submit, list, look at, scale, suspend, resume, cancel."""

from __future__ import annotations

import base64
import secrets
from typing import Annotated, Self

from fastapi import Depends, Response
from pydantic import model_validator

from api.answers.job import JobView, job_view
from api.answers.page import PageOf
from api.checks import check_job, check_queue
from api.dependencies import Limit, ServiceDep, WorldDep
from api.errors import conflict, refuse
from api.idempotency import IdempotencyKey, submit_once
from api.identity.principal import Role
from api.job_filter import JobFilter
from api.paging import Cursor, page_of_jobs
from api.preconditions import IfMatch, put_tag, require_match
from api.problems import problems
from api.routing import noun_router
from api.world import World
from scheduler.core.preconditions import job_tag
from scheduler.documents.document import Document
from scheduler.documents.fields import Label
from scheduler.documents.job import GpuCount, JobDocument, Priority, job_spec
from scheduler.documents.refusal import refused_field
from scheduler.domain.command import CancelJob, ChangeJob, ResumeJob, ScaleJob, SubmitJob, SuspendJob
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState

router = noun_router("jobs")


class RangeChange(Document):
    """A new GPU range; what is left out stays as it is."""

    min: GpuCount | None = None
    max: GpuCount | None = None


class JobChange(Document):
    """What can be changed after submission; what is left out stays."""

    gpus: RangeChange | None = None
    queue: Label | None = None
    priority: Priority | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.gpus is None and self.queue is None and self.priority is None:
            raise refused_field("gpus", None, "something to change: give gpus, queue, priority or several of them")
        return self


def new_job_id(name: str) -> str:
    """`<name>-<10 characters>`: readable, and with 50 random bits never that of another job. To look for it among the
    ended ones would take a fifth of a submission; that it is none of the live ones, the core makes sure of."""
    return f"{name}-{base64.b32encode(secrets.token_bytes(7)).decode().lower()[:10]}"


@router.post("/jobs", status_code=201, responses=problems(409))
def submit_job(
    document: JobDocument, world: WorldDep, service: ServiceDep, response: Response, key: IdempotencyKey = ""
) -> JobView:
    """Submit a job. It is accepted once this answers, and planned and queued by the next tick. With an
    `Idempotency-Key`, asking again is safe: the answer is the job that the first request made, as it is now."""
    spec = job_spec(document)
    check_job(spec)
    world.require(Role.SUBMITTER, spec.queue)

    def new_id() -> str:
        check_queue(spec.queue, world, owner=world.principal.name, undeclared=service.settings.undeclared_queues)
        return new_job_id(spec.name)

    if key:
        after, job_id = submit_once(world, spec, key, new_id)
    else:
        job_id = new_id()
        after = world.send(SubmitJob(job_id, spec))
    response.headers["Location"] = f"/v1/jobs/{job_id}"
    return _told(after, after.job(job_id), response)


@router.get("/jobs")
def list_jobs(
    world: WorldDep, wanted: Annotated[JobFilter, Depends()], limit: Limit = 100, cursor: Cursor = ""
) -> PageOf[JobView]:
    """Jobs, those submitted last first, ended ones included. `next` is the cursor of the following page."""
    query = wanted.query().within(world.principal.queues)
    page = page_of_jobs(world.snapshot.jobs.values(), world.store, query, cursor=cursor, limit=limit)
    sight = world.sight  # one for all rows: it remembers what it has looked up
    return {"items": [job_view(sight.shown(job), world.now_s) for job in page["items"]], "next": page["next"]}


@router.get("/jobs/{job_id}")
def get_job(job_id: str, world: WorldDep, response: Response) -> JobView:
    """A job that lives, or has ended."""
    return _told(world, world.job(job_id), response)


@router.patch("/jobs/{job_id}", status_code=202, responses=problems(409))
def change_job(
    job_id: str,
    change: JobChange,
    world: WorldDep,
    service: ServiceDep,
    response: Response,
    *,
    if_match: IfMatch = "",
) -> JobView:
    """Change the job's GPU range, queue or priority; the next tick acts on it."""
    job = world.live_job(job_id)
    basis = require_match(if_match, job_tag(job), f"job {job_id}")
    if change.queue is not None and change.queue != job.spec.queue:
        world.require(Role.SUBMITTER, change.queue)  # before it is said what this queue takes
        check_queue(change.queue, world, owner=job.owner, undeclared=service.settings.undeclared_queues)
    after = world.send(_changing(job, change), basis=basis)
    return _told(after, after.job(job_id), response)


@router.delete("/jobs/{job_id}", status_code=202, responses=problems(409))
def cancel_job(job_id: str, world: WorldDep, response: Response, if_match: IfMatch = "") -> JobView:
    """Cancel the job: its workers are stopped, its record stays. Cancelling again changes nothing."""
    job = world.job(job_id)
    if job.state is JobState.CANCELLED:
        return _told(world, job, response)
    world.live_job(job_id)
    return _asked(world, job, CancelJob(job_id), if_match, response)


@router.post("/jobs/{job_id}:suspend", status_code=202, responses=problems(409))
def suspend_job(job_id: str, world: WorldDep, response: Response, if_match: IfMatch = "") -> JobView:
    """Take the job's GPUs after a checkpoint; it waits until it is resumed."""
    job = world.live_job(job_id)
    _refuse_cancelled(job)
    return _asked(world, job, SuspendJob(job_id), if_match, response)


@router.post("/jobs/{job_id}:resume", status_code=202, responses=problems(409))
def resume_job(job_id: str, world: WorldDep, response: Response, if_match: IfMatch = "") -> JobView:
    """Let a suspended job queue again; it goes on from its checkpoint."""
    job = world.live_job(job_id)
    _refuse_cancelled(job)
    if job.intent is not Intent.SUSPEND:
        conflict(f"job {job.id} is {job.state}, it was not suspended")
    return _asked(world, job, ResumeJob(job_id), if_match, response)


def _changing(job: Job, change: JobChange) -> ScaleJob | ChangeJob:
    """One command, so that all of it is done or nothing."""
    gpus = change.gpus or RangeChange()
    min_gpus, max_gpus = gpus.min or job.spec.min_gpus, gpus.max or job.spec.max_gpus
    if max_gpus < min_gpus:
        field, value = ("gpus.max", max_gpus) if gpus.max else ("gpus.min", min_gpus)
        refuse(field, value, f"min <= max; the range would be {min_gpus} to {max_gpus}")
    if change.queue is None and change.priority is None:
        return ScaleJob(job.id, min_gpus, max_gpus)
    if change.gpus is None:
        return ChangeJob(job.id, change.queue, change.priority)
    return ChangeJob(job.id, change.queue, change.priority, min_gpus, max_gpus)


def _asked(
    world: World, job: Job, body: CancelJob | SuspendJob | ResumeJob, if_match: str, response: Response
) -> JobView:
    after = world.send(body, basis=require_match(if_match, job_tag(job), f"job {job.id}"))
    return _told(after, after.snapshot.jobs[job.id], response)


def _told(world: World, job: Job, response: Response) -> JobView:
    put_tag(response, job_tag(job))
    return job_view(world.shown(job), world.now_s)


def _refuse_cancelled(job: Job) -> None:
    if job.intent is Intent.CANCEL:
        conflict(f"job {job.id} is being cancelled")
