"""Jobs: submit, list, look at, scale, suspend, resume, cancel."""

from __future__ import annotations

import base64
import secrets
from typing import Annotated

from fastapi import APIRouter, Depends, Response
from pydantic import Field

from api.answers.job import JobView, job_view
from api.answers.page import PageOf
from api.checks import check_job
from api.dependencies import Limit, WorldDep
from api.errors import conflict, refuse
from api.idempotency import IdempotencyKey, submit_once
from api.identity.principal import Role
from api.job_filter import JobFilter
from api.paging import Cursor, page_of_jobs
from api.world import World
from scheduler.documents.document import Document
from scheduler.documents.job import GpuCount, JobDocument, job_spec
from scheduler.domain.command import CancelJob, CommandBody, ResumeJob, ScaleJob, SubmitJob, SuspendJob
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState

router = APIRouter(prefix="/v1", tags=["jobs"])


class RangeChange(Document):
    """A new GPU range; what is left out stays as it is."""

    min: GpuCount | None = None
    max: GpuCount | None = None


class JobChange(Document):
    gpus: RangeChange = Field(description="The only thing that can be changed after submission.")


def new_job_id(name: str, world: World) -> str:
    """`<name>-<6 characters>`: readable, and never that of another job, ended ones included."""
    while True:
        job_id = f"{name}-{base64.b32encode(secrets.token_bytes(5)).decode().lower()[:6]}"
        if job_id not in world.snapshot.jobs and world.store.ended_job(job_id) is None:
            return job_id


@router.post("/jobs", status_code=201)
def submit_job(document: JobDocument, world: WorldDep, response: Response, key: IdempotencyKey = "") -> JobView:
    """Submit a job. It is accepted once this answers, and planned and queued by the next tick. With an
    `Idempotency-Key`, asking again is safe: the answer is the job that the first request made, as it is now."""
    spec = job_spec(document)
    check_job(spec)
    world.require(Role.SUBMITTER, spec.queue)
    if key:
        after, job_id = submit_once(world, spec, key, lambda: new_job_id(spec.name, world))
    else:
        job_id = new_job_id(spec.name, world)
        after = world.send(SubmitJob(job_id, spec))
    response.headers["Location"] = f"/v1/jobs/{job_id}"
    return job_view(after.job(job_id), after.now_s)


@router.get("/jobs")
def list_jobs(
    world: WorldDep, wanted: Annotated[JobFilter, Depends()], limit: Limit = 100, cursor: Cursor = ""
) -> PageOf[JobView]:
    """Jobs, those submitted last first, ended ones included. `next` is the cursor of the following page."""
    query = wanted.query().within(world.principal.queues)
    page = page_of_jobs(world.snapshot.jobs.values(), world.store, query, cursor=cursor, limit=limit)
    return {"items": [job_view(world.shown(job), world.now_s) for job in page["items"]], "next": page["next"]}


@router.get("/jobs/{job_id}")
def get_job(job_id: str, world: WorldDep) -> JobView:
    """A job that lives, or has ended."""
    return job_view(world.shown(world.job(job_id)), world.now_s)


@router.patch("/jobs/{job_id}", status_code=202)
def change_job(job_id: str, change: JobChange, world: WorldDep) -> JobView:
    """Change the job's GPU range; the next tick acts on it."""
    spec = world.live_job(job_id).spec
    min_gpus = change.gpus.min or spec.min_gpus
    max_gpus = change.gpus.max or spec.max_gpus
    if max_gpus < min_gpus:
        field, value = ("gpus.max", max_gpus) if change.gpus.max else ("gpus.min", min_gpus)
        refuse(field, value, f"min <= max; the range would be {min_gpus} to {max_gpus}")
    return _asked(world, job_id, ScaleJob(job_id, min_gpus, max_gpus))


@router.delete("/jobs/{job_id}", status_code=202)
def cancel_job(job_id: str, world: WorldDep) -> JobView:
    """Cancel the job: its workers are stopped, its record stays. Cancelling again changes nothing."""
    job = world.job(job_id)
    if job.state is JobState.CANCELLED:
        return job_view(job, world.now_s)
    world.live_job(job_id)
    return _asked(world, job_id, CancelJob(job_id))


@router.post("/jobs/{job_id}:suspend", status_code=202)
def suspend_job(job_id: str, world: WorldDep) -> JobView:
    """Take the job's GPUs after a checkpoint; it waits until it is resumed."""
    _refuse_cancelled(world.live_job(job_id))
    return _asked(world, job_id, SuspendJob(job_id))


@router.post("/jobs/{job_id}:resume", status_code=202)
def resume_job(job_id: str, world: WorldDep) -> JobView:
    """Let a suspended job queue again; it goes on from its checkpoint."""
    job = world.live_job(job_id)
    _refuse_cancelled(job)
    if job.intent is not Intent.SUSPEND:
        conflict(f"job {job.id} is {job.state}, it was not suspended")
    return _asked(world, job_id, ResumeJob(job_id))


def _asked(world: World, job_id: str, body: CommandBody) -> JobView:
    return _view(world.send(body), job_id)


def _view(world: World, job_id: str) -> JobView:
    return job_view(world.shown(world.snapshot.jobs[job_id]), world.now_s)


def _refuse_cancelled(job: Job) -> None:
    if job.intent is Intent.CANCEL:
        conflict(f"job {job.id} is being cancelled")
