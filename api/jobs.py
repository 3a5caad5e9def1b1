"""Jobs: submit, list, get, change, suspend, resume, cancel."""

from __future__ import annotations

import base64
import math
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, Self, cast

from fastapi import Depends, Query, Response
from pydantic import model_validator
from typing_extensions import TypedDict

from api.http.conditional_requests import IdempotencyKeyHeader, IfMatchHeader, require_match, set_etag, submit_once
from api.http.dependencies import ContextDep, LimitParameter, ServiceDep, create_router
from api.http.errors import problem_responses, raise_conflict, raise_invalid_field
from api.http.paging import (
    TEXT_PATTERN,
    AtSeconds,
    CursorParameter,
    GpusByNode,
    PageOf,
    StatesParameter,
    encode_gpus,
    page_of_jobs,
    parse_states,
)
from api.identity.authorization import SUBMITTER, VIEWER, requires
from api.identity.principals import Role
from api.plans import check_job, check_queue
from api.state import RequestContext
from scheduler.documents.document import Document, Label, invalid_field
from scheduler.documents.job import GpuCount, JobDocument, Priority, to_job_document, to_job_spec
from scheduler.domain import gpu_sets
from scheduler.domain.codec import encode
from scheduler.domain.commands import CancelJob, ChangeJob, ResumeJob, ScaleJob, SubmitJob, SuspendJob
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import ENDED_STATES, JobState
from scheduler.scheduling.preconditions import job_etag
from scheduler.store.api_protocol import JobQuery


class GpuRangeView(TypedDict):
    min: int
    max: int


class JobGpusView(GpuRangeView):
    """`target`: GPUs it has or is about to get. `releasing`: GPUs it still has to leave."""

    target: int
    releasing: int


class ProgressView(TypedDict):
    """`remaining_s`: remaining time at the current speed, null if the speed or the length is unknown. `samples_per_s`
    and `peak_bytes` (the most GPU memory of a rank) are measured, null before. Only a running job has a speed."""

    steps: float
    steps_total: int | None
    fraction: float | None
    checkpoint_steps: float
    loss: float | None
    frozen_layers: int
    step_time_s: float | None
    samples_per_s: float | None
    peak_bytes: int | None
    remaining_s: float | None
    as_of_s: AtSeconds


class AccountView(TypedDict):
    """Totals of the job up to `settled_at_s`."""

    waited_s: float
    gpu_s: float
    lost_gpu_s: float
    failures: int
    preemptions: int
    resizes: int
    first_started_at_s: AtSeconds | None
    settled_at_s: AtSeconds


class OutOfMemoryView(TypedDict):
    plan: str
    gpus: int
    gpu_memory_bytes: int
    predicted_bytes: int
    measured_bytes: int | None


class MemoryView(TypedDict):
    """`factor`: measured over predicted peak memory. `deaths`: runs that ran out of memory, oldest first."""

    factor: float
    deaths: list[OutOfMemoryView]
    retry_at_s: AtSeconds | None


class VolumeClaimView(TypedDict):
    claimName: str


class VolumeView(TypedDict):
    persistentVolumeClaim: VolumeClaimView
    subPath: NotRequired[str]


class CheckpointSpecView(TypedDict):
    dir: str
    interval: float
    keep: int
    volume: NotRequired[VolumeView]


class JobSpecView(TypedDict):
    """The job document with defaults filled in. Durations are in seconds."""

    name: str
    gpus: GpuRangeView
    queue: str
    priority: int
    gpu: NotRequired[str]
    model: NotRequired[str]
    profile: NotRequired[dict[str, Any]]
    globalBatch: NotRequired[int]
    sequenceLength: NotRequired[int]
    steps: NotRequired[int]
    durationEstimate: NotRequired[float]
    deadline: NotRequired[float]
    maxRunTime: NotRequired[float]
    retries: int
    command: list[str]
    image: NotRequired[str]
    env: dict[str, str]
    checkpoint: CheckpointSpecView
    fungible: bool
    namespace: NotRequired[str]
    template: NotRequired[dict[str, Any]]


class JobView(TypedDict):
    """`intent`: what the owner asked for last. `message`: why the job is in its state. `releasing_nodes`: GPUs to leave
    by `leave_by_s`. `generation` counts the changes of its GPUs."""

    id: str
    name: str
    queue: str
    owner: str
    priority: int
    state: JobState
    state_since_s: AtSeconds
    intent: Intent
    message: str
    submitted_at_s: AtSeconds
    gpus: JobGpusView
    nodes: GpusByNode
    releasing_nodes: GpusByNode
    generation: int
    leave_by_s: AtSeconds | None
    plan: str | None
    progress: ProgressView
    account: AccountView
    memory: MemoryView
    spec: JobSpecView


def job_view(job: Job, now_s: float) -> JobView:
    allocation, spec = job.allocation, job.spec
    return {
        "id": job.id,
        "name": spec.name,
        "queue": spec.queue,
        "owner": job.owner,
        "priority": spec.priority,
        "state": job.state,
        "state_since_s": job.state_since_s,
        "intent": job.intent,
        "message": job.message,
        "submitted_at_s": job.submitted_at_s,
        "gpus": {
            "min": spec.min_gpus,
            "max": spec.max_gpus,
            "target": allocation.target_gpus,
            "releasing": gpu_sets.count(allocation.releasing),
        },
        "nodes": encode_gpus(allocation.target),
        "releasing_nodes": encode_gpus(allocation.releasing),
        "generation": allocation.generation,
        "leave_by_s": allocation.leave_by_s,
        "plan": allocation.plan.summarize() if allocation.plan else None,
        "progress": progress_view(job, now_s),
        "account": encode(job.account),
        "memory": memory_view(job),
        "spec": cast("JobSpecView", to_job_document(spec)),
    }


def progress_view(job: Job, now_s: float) -> ProgressView:
    steps, remaining = job.steps_at(now_s), job.remaining_steps(now_s)
    step_time_s = job.step_time_s()
    runs = step_time_s < float("inf")
    return {
        "steps": steps,
        "steps_total": job.spec.steps or None,
        "fraction": steps / job.spec.steps if job.spec.steps else None,
        "checkpoint_steps": job.progress.checkpoint_steps,
        "loss": job.progress.loss,
        "frozen_layers": job.freezing.layers,
        "step_time_s": step_time_s if runs else None,
        "samples_per_s": job.progress.samples_per_s if runs else None,
        "peak_bytes": job.progress.peak_bytes,
        "remaining_s": remaining * step_time_s if runs and remaining is not None else None,
        "as_of_s": job.progress.at_s,
    }


def memory_view(job: Job) -> MemoryView:
    memory = job.memory
    deaths = [encode(death) for death in memory.deaths]
    return {"factor": memory.factor, "deaths": deaths, "retry_at_s": memory.retry_at_s}


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Query parameters of job lists. A job must match all of them."""

    state: StatesParameter = ""
    queue: Annotated[
        str, Query(max_length=2000, pattern=TEXT_PATTERN, description="In one of these queues, separated by commas.")
    ] = ""
    owner: Annotated[str, Query(max_length=200, pattern=TEXT_PATTERN, description="Submitted by this principal.")] = ""
    name: Annotated[str, Query(max_length=200, pattern=TEXT_PATTERN, description="Name prefix.")] = ""
    submitted_since_s: Annotated[
        float | None,
        Query(ge=0, allow_inf_nan=False, description="Submitted at or after this time, in seconds since 1970 (UTC)."),
    ] = None
    submitted_until_s: Annotated[
        float | None, Query(ge=0, allow_inf_nan=False, description="Submitted before this time.")
    ] = None

    def to_query(self) -> JobQuery:
        """Raises InvalidDocumentError for an unknown state."""
        return JobQuery(
            states=parse_states(self.state, JobState, live=set(JobState) - ENDED_STATES),
            queues=frozenset(name.strip() for name in self.queue.split(",")) if self.queue else None,
            owner=self.owner,
            name_prefix=self.name,
            since_s=-math.inf if self.submitted_since_s is None else self.submitted_since_s,
            until_s=math.inf if self.submitted_until_s is None else self.submitted_until_s,
        )


router = create_router("jobs")


class GpuRangeChange(Document):
    """A new GPU range. Fields that are left out stay as they are."""

    min: GpuCount | None = None
    max: GpuCount | None = None


class JobChange(Document):
    """What can be changed after submission. Fields that are left out stay as they are."""

    gpus: GpuRangeChange | None = None
    queue: Label | None = None
    priority: Priority | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.gpus is None and self.queue is None and self.priority is None:
            raise invalid_field("gpus", None, "at least one of gpus, queue and priority")
        return self


def generate_job_id(name: str) -> str:
    """Return `<name>-<10 characters>`, which is readable and has 50 random bits. Commands check it against live jobs; a
    check against ended jobs would add a fifth to the time of a submission."""
    return f"{name}-{base64.b32encode(secrets.token_bytes(7)).decode().lower()[:10]}"


@router.post("/jobs", status_code=201, responses=problem_responses(409))
@requires(SUBMITTER)
def submit_job(
    document: JobDocument, context: ContextDep, service: ServiceDep, response: Response, key: IdempotencyKeyHeader = ""
) -> JobView:
    """Submit a job. The response confirms acceptance; the next tick plans and queues it. With an `Idempotency-Key`, a
    retry returns the job of the first request in its current state."""
    spec = to_job_spec(document)
    check_job(spec)
    context.require_role(Role.SUBMITTER, spec.queue)

    def new_id() -> str:
        check_queue(
            spec.queue, context, owner=context.principal.name, undeclared_queues=service.settings.undeclared_queues
        )
        return generate_job_id(spec.name)

    if key:
        after, job_id = submit_once(context, spec, key, new_id)
    else:
        job_id = new_id()
        after = context.send(SubmitJob(job_id, spec))
    response.headers["Location"] = f"/v1/jobs/{job_id}"
    return _job_response(after, after.job(job_id), response)


@router.get("/jobs")
@requires(VIEWER)
def list_jobs(
    context: ContextDep,
    job_filter: Annotated[JobFilter, Depends()],
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[JobView]:
    """List jobs, newest first, including ended ones. `next` is the cursor of the following page."""
    query = job_filter.to_query().restrict_to_queues(context.principal.readable_queues)
    page = page_of_jobs(context.snapshot.jobs.values(), context.store, query, cursor=cursor, limit=limit)
    visibility = context.visibility  # shared by all rows because it caches lookups
    return {
        "items": [job_view(visibility.redact_job(job), context.now_s) for job in page["items"]],
        "next": page["next"],
    }


@router.get("/jobs/{job_id}")
@requires(VIEWER)
def get_job(job_id: str, context: ContextDep, response: Response) -> JobView:
    """Return a live or ended job."""
    return _job_response(context, context.job(job_id), response)


@router.patch("/jobs/{job_id}", status_code=202, responses=problem_responses(409))
@requires(SUBMITTER)
def change_job(
    job_id: str,
    change: JobChange,
    context: ContextDep,
    service: ServiceDep,
    response: Response,
    *,
    if_match: IfMatchHeader = "",
) -> JobView:
    """Change the job's GPU range, queue or priority. The next tick acts on it."""
    job = context.live_job(job_id)
    basis = require_match(if_match, job_etag(job), f"job {job_id}")
    if change.queue is not None and change.queue != job.spec.queue:
        context.require_role(Role.SUBMITTER, change.queue)  # first, so that errors reveal nothing about the queue
        check_queue(change.queue, context, owner=job.owner, undeclared_queues=service.settings.undeclared_queues)
    after = context.send(_change_command(job, change), basis=basis)
    return _job_response(after, after.job(job_id), response)


@router.delete("/jobs/{job_id}", status_code=202, responses=problem_responses(409))
@requires(SUBMITTER)
def cancel_job(job_id: str, context: ContextDep, response: Response, if_match: IfMatchHeader = "") -> JobView:
    """Cancel the job: its workers are stopped, its record stays. Cancelling again changes nothing."""
    job = context.job(job_id)
    if job.state is JobState.CANCELLED:
        return _job_response(context, job, response)
    context.live_job(job_id)
    return _send_intent(context, job, CancelJob(job_id), if_match, response)


@router.post("/jobs/{job_id}:suspend", status_code=202, responses=problem_responses(409))
@requires(SUBMITTER)
def suspend_job(job_id: str, context: ContextDep, response: Response, if_match: IfMatchHeader = "") -> JobView:
    """Suspend the job: it saves a checkpoint and releases its GPUs until it is resumed."""
    job = context.live_job(job_id)
    _refuse_cancelled(job)
    return _send_intent(context, job, SuspendJob(job_id), if_match, response)


@router.post("/jobs/{job_id}:resume", status_code=202, responses=problem_responses(409))
@requires(SUBMITTER)
def resume_job(job_id: str, context: ContextDep, response: Response, if_match: IfMatchHeader = "") -> JobView:
    """Queue a suspended job again. It continues from its checkpoint."""
    job = context.live_job(job_id)
    _refuse_cancelled(job)
    if job.intent is not Intent.SUSPEND:
        raise_conflict(f"job {job.id} is {job.state} and not suspended")
    return _send_intent(context, job, ResumeJob(job_id), if_match, response)


def _change_command(job: Job, change: JobChange) -> ScaleJob | ChangeJob:
    """Return one command, so that the change is applied completely or not at all."""
    gpus = change.gpus or GpuRangeChange()
    min_gpus, max_gpus = gpus.min or job.spec.min_gpus, gpus.max or job.spec.max_gpus
    if max_gpus < min_gpus:
        field, value = ("gpus.max", max_gpus) if gpus.max else ("gpus.min", min_gpus)
        raise_invalid_field(field, value, f"a range with min <= max; this would be {min_gpus} to {max_gpus}")
    if change.queue is None and change.priority is None:
        return ScaleJob(job.id, min_gpus, max_gpus)
    if change.gpus is None:
        return ChangeJob(job.id, change.queue, change.priority)
    return ChangeJob(job.id, change.queue, change.priority, min_gpus, max_gpus)


def _send_intent(
    context: RequestContext, job: Job, body: CancelJob | SuspendJob | ResumeJob, if_match: str, response: Response
) -> JobView:
    after = context.send(body, basis=require_match(if_match, job_etag(job), f"job {job.id}"))
    return _job_response(after, after.snapshot.jobs[job.id], response)


def _job_response(context: RequestContext, job: Job, response: Response) -> JobView:
    set_etag(response, job_etag(job))
    return job_view(context.redact_job(job), context.now_s)


def _refuse_cancelled(job: Job) -> None:
    if job.intent is Intent.CANCEL:
        raise_conflict(f"job {job.id} is being cancelled")
