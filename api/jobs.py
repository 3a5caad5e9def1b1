"""Jobs: submit, get, change, suspend, resume, cancel."""

from __future__ import annotations

import base64
import secrets
from typing import Annotated, NotRequired, Self, cast

from fastapi import Response
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from api.archives import require_archive
from api.event_views import ReasonView
from api.http.conditional_requests import IdempotencyKeyHeader, IfMatchHeader, require_match, set_etag, submit_once
from api.http.dependencies import ContextDep, JobIdPath, ServiceDep, create_router
from api.http.errors import problem_responses, raise_conflict, raise_invalid_field
from api.http.paging import GpusByNode, encode_gpus
from api.identity.audit import declare_audited
from api.identity.authorization import SUBMITTER, VIEWER, requires
from api.identity.principals import Role
from api.job_spec_view import GpuRangeView, JobSpecView
from api.plans import check_job
from api.queue_secrets.routes import require_secrets
from api.state import RequestContext
from api.submission_rules import check_change, check_queue, check_submission
from scheduler.documents.document import Document, Label, invalid_field
from scheduler.documents.job import (
    GpuCount,
    JobDocument,
    Priority,
    require_command,
    to_job_document,
    to_job_spec,
)
from scheduler.documents.job_labels import LabelChanges
from scheduler.documents.job_secrets import find_credential_warnings
from scheduler.domain import gpu_sets
from scheduler.domain.codec import encode
from scheduler.domain.commands import CancelJob, ChangeJob, ResumeJob, ScaleJob, SubmitJob, SuspendJob
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_account import OnResize, RunFailure
from scheduler.domain.job_labels import LABELS_MAX, merge_labels
from scheduler.domain.job_state import JobState
from scheduler.scheduling.preconditions import job_etag


class JobGpusView(GpuRangeView):
    """The GPU range of a job, and its GPUs now."""

    target: Annotated[int, Field(description="GPUs that the job has or is about to get.")]
    releasing: Annotated[int, Field(description="GPUs that the job has not left yet.")]


class EstimatedProgressView(TypedDict):
    """Progress of a job that has never reported any, as its plan predicts it. No value is measured."""

    steps: Annotated[float, Field(description="Optimizer steps that the job would have done by now.")]
    fraction: Annotated[float | None, Field(description="`steps` divided by `steps_total`. Null: unknown length.")]
    step_time_s: Annotated[float | None, Field(description="Predicted seconds per step. Null: not running.")]
    remaining_s: Annotated[float | None, Field(description="Predicted seconds to the end. Null: unknown.")]


class ProgressView(TypedDict):
    """Progress and speed of a job, as of `as_of_s`. Only a running job has a speed.

    A job that has started and never reported has none of these figures, but an `estimate`.
    """

    steps: Annotated[
        float | None,
        Field(
            description="Optimizer steps done, extrapolated from the last report while it runs. Null: never reported."
        ),
    ]
    steps_total: Annotated[int | None, Field(description="Declared length in steps. Null: unknown.")]
    fraction: Annotated[
        float | None, Field(description="`steps` divided by `steps_total`. Null: unknown length, or never reported.")
    ]
    estimate: Annotated[
        EstimatedProgressView | None,
        Field(description="Predictions for a job that has started and never reported. Null for any other."),
    ]
    checkpoint_steps: Annotated[float, Field(description="Steps saved in the latest complete checkpoint.")]
    loss: Annotated[float | None, Field(description="Training loss last reported. Null: not reported.")]
    frozen_layers: Annotated[int, Field(description="Number of leading layers that are no longer trained.")]
    step_time_s: Annotated[float | None, Field(description="Seconds per step. Null: not running, or never reported.")]
    samples_per_s: Annotated[
        float | None, Field(description="Measured throughput in samples per second. Null: not measured.")
    ]
    peak_bytes: Annotated[
        int | None, Field(description="Largest GPU memory use of any rank, in bytes. Null: not measured.")
    ]
    remaining_s: Annotated[
        float | None, Field(description="Seconds to the end at the current speed. Null: unknown, or never reported.")
    ]
    as_of_s: Annotated[float, Field(description="Time of the last update, in seconds since 1970 (UTC).")]


class AccountView(TypedDict):
    """Totals of the job up to `settled_at_s`."""

    waited_s: Annotated[float, Field(description="Seconds spent waiting for GPUs, while pending or preempted.")]
    gpu_s: Annotated[float, Field(description="GPU-seconds held, including GPUs that the job was leaving.")]
    lost_gpu_s: Annotated[float, Field(description="GPU-seconds whose work was lost, because no checkpoint had it.")]
    failures: Annotated[int, Field(description="Failed runs that count toward the job's `retries`.")]
    preemptions: Annotated[int, Field(description="Times that the job had to release all its GPUs.")]
    resizes: Annotated[int, Field(description="Times that its GPUs or plan changed while running.")]
    first_started_at_s: Annotated[
        float | None, Field(description="First start, in seconds since 1970 (UTC). Null: not yet.")
    ]
    settled_at_s: Annotated[float, Field(description="Time up to which the totals count, in seconds since 1970 (UTC).")]
    last_started_at_s: Annotated[
        float | None, Field(description="Last start from the queue, in seconds since 1970 (UTC). Null: not yet.")
    ]


class FailureView(TypedDict):
    """The last run that failed by itself."""

    code: Annotated[
        str,
        Field(
            description="Cause in one word. `command-not-found`, `file-not-found`, `import-error`, `syntax-error`, "
            "`archive-refused` and `repeated-failure` are not retried. `out-of-memory` is. Empty: unknown."
        ),
    ]
    reason: Annotated[str, Field(description="What failed, with the last lines of the failing rank's log.")]
    at_s: Annotated[float, Field(description="Time of the failure, in seconds since 1970 (UTC).")]
    ran_s: Annotated[float | None, Field(description="Seconds that the ranks ran. Null: unknown.")]


class OutOfMemoryView(TypedDict):
    """A run that ran out of GPU memory."""

    plan: Annotated[str, Field(description="One-line summary of the plan that failed.")]
    gpus: Annotated[int, Field(description="Number of GPUs of the run.")]
    gpu_memory_bytes: Annotated[int, Field(description="Smallest memory of a GPU of the run, in bytes.")]
    predicted_bytes: Annotated[int, Field(description="Predicted peak per GPU, in bytes. 0: unknown.")]
    measured_bytes: Annotated[
        int | None, Field(description="Highest use of a rank before the failure, in bytes. Null: not measured.")
    ]


class MemoryView(TypedDict):
    """Measured GPU memory of the job, and its out-of-memory failures."""

    factor: Annotated[float, Field(description="Expected peak memory divided by the predicted one.")]
    deaths: Annotated[
        list[OutOfMemoryView],
        Field(description="Runs that ran out of memory, oldest first. After three, the job fails."),
    ]
    retry_at_s: Annotated[
        float | None, Field(description="Earliest next start, in seconds since 1970 (UTC). Null: no backoff.")
    ]


class JobView(TypedDict):
    """A live or ended job."""

    id: Annotated[str, Field(description="Unique id: the name and ten random characters.")]
    name: Annotated[str, Field(description="Display name from the job document.")]
    queue: Annotated[str, Field(description="Queue whose GPU quota is charged.")]
    owner: Annotated[str, Field(description="Display name of the caller that submitted it. Empty: unknown.")]
    owner_id: Annotated[str, Field(description="Stable id of that caller, as in `/v1/whoami`. Empty: unknown.")]
    priority: Annotated[int, Field(description="-1000 to 1000. Higher values are scheduled first.")]
    labels: Annotated[
        dict[str, str], Field(description="Keys and values that its owner set, for `selector` in lists. Empty: none.")
    ]
    state: Annotated[JobState, Field(description="Where the job is in its life cycle.")]
    state_since_s: Annotated[
        float, Field(description="Time of the last change of `state`, in seconds since 1970 (UTC).")
    ]
    intent: Annotated[Intent, Field(description="Last request of its owner: run, suspend or cancel.")]
    message: Annotated[str, Field(description="Why the job is in its `state`. Empty: no reason recorded.")]
    submitted_at_s: Annotated[float, Field(description="Time of submission, in seconds since 1970 (UTC).")]
    gpus: Annotated[JobGpusView, Field(description="Its GPU range, and how many GPUs it has.")]
    nodes: Annotated[GpusByNode, Field(description="GPU indices by node that the job has or is about to get.")]
    releasing_nodes: Annotated[
        GpusByNode, Field(description="GPU indices by node that the job must leave by `leave_by_s`.")
    ]
    generation: Annotated[int, Field(description="Incremented with each change of its GPUs or plan.")]
    leave_by_s: Annotated[
        float | None, Field(description="Deadline to leave, in seconds since 1970 (UTC). Null: nothing to leave.")
    ]
    plan: Annotated[str | None, Field(description="One-line summary of the parallel plan. Null: none yet.")]
    progress: Annotated[ProgressView, Field(description="Steps done, speed and remaining time.")]
    account: Annotated[AccountView, Field(description="Waiting time, GPU-seconds and counts so far.")]
    memory: Annotated[MemoryView, Field(description="Out-of-memory failures, and what follows from them.")]
    failure: Annotated[FailureView | None, Field(description="The last run that failed. Null: none.")]
    resize_mode: Annotated[
        OnResize,
        Field(
            description="What a resize does to the job: `spec.onResize`, else `checkpoint` once the job has reported "
            "progress, else `never`."
        ),
    ]
    spec: Annotated[JobSpecView, Field(description="The submitted document with defaults filled in.")]
    warnings: NotRequired[Annotated[list[str], Field(description="Advice after the submission. Absent: none.")]]
    pending_reason: NotRequired[
        Annotated[
            ReasonView,
            Field(
                description="Why a pending job waits, in a list with `reasons`. The state may be slightly older than "
                "the newest. Absent: it does not wait, or no tick has considered it yet."
            ),
        ]
    ]
    pending_reason_at_s: NotRequired[
        Annotated[
            float,
            Field(description="Time of the state to which `pending_reason` belongs, in seconds since 1970 (UTC)."),
        ]
    ]


def job_view(job: Job, now_s: float) -> JobView:
    allocation, spec = job.allocation, job.spec
    return {
        "id": job.id,
        "name": spec.name,
        "queue": spec.queue,
        "owner": job.owner,
        "owner_id": job.owner_key,
        "priority": spec.priority,
        "labels": dict(spec.labels),
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
        "failure": failure_view(job.failure),
        "resize_mode": job.resize_mode,
        "spec": cast("JobSpecView", to_job_document(spec)),
    }


def failure_view(failure: RunFailure | None) -> FailureView | None:
    if failure is None:
        return None
    return {"code": failure.code, "reason": failure.reason, "at_s": failure.at_s, "ran_s": failure.ran_s}


def progress_view(job: Job, now_s: float) -> ProgressView:
    """Return the progress. Figures that the job never reported are in `estimate` only."""
    steps, remaining = job.steps_at(now_s), job.remaining_steps(now_s)
    step_time_s = job.step_time_s()
    runs = step_time_s < float("inf")
    figures: EstimatedProgressView = {
        "steps": steps,
        "fraction": steps / job.spec.steps if job.spec.steps else None,
        "step_time_s": step_time_s if runs else None,
        "remaining_s": remaining * step_time_s if runs and remaining is not None else None,
    }
    is_known = job.has_known_steps
    return {
        "steps": figures["steps"] if is_known else None,
        "steps_total": job.spec.steps or None,
        "fraction": figures["fraction"] if is_known else None,
        "estimate": None if is_known else figures,
        "checkpoint_steps": job.progress.checkpoint_steps,
        "loss": job.progress.loss,
        "frozen_layers": job.freezing.layers,
        "step_time_s": figures["step_time_s"] if is_known else None,
        "samples_per_s": job.progress.samples_per_s if runs else None,
        "peak_bytes": job.progress.peak_bytes,
        "remaining_s": figures["remaining_s"] if is_known else None,
        "as_of_s": job.progress.at_s,
    }


def memory_view(job: Job) -> MemoryView:
    memory = job.memory
    deaths = [encode(death) for death in memory.deaths]
    return {"factor": memory.factor, "deaths": deaths, "retry_at_s": memory.retry_at_s}


router = create_router("jobs")


class GpuRangeChange(Document):
    """A new GPU range. Fields that are left out stay as they are."""

    min: GpuCount | None = Field(
        default=None, description="Fewest GPUs that the job can run on, at least 1. Null: unchanged."
    )
    max: GpuCount | None = Field(
        default=None, description="Most GPUs that the job can use, at least `min`. Null: unchanged."
    )


class JobChange(Document):
    """Changes of a submitted job. Omitted fields keep their value."""

    gpus: GpuRangeChange | None = Field(default=None, description="New range of GPUs. Null: unchanged.")
    queue: Label | None = Field(default=None, description="Queue to move the job to. Null: unchanged.")
    labels: LabelChanges | None = Field(
        default=None, description="Labels to set; null removes a label. Others stay as they are. Null: unchanged."
    )
    priority: Priority | None = Field(
        default=None, description="-1000 to 1000; higher values are scheduled first. Null: unchanged."
    )

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.gpus is None and self.queue is None and self.priority is None and self.labels is None:
            raise invalid_field("gpus", None, "at least one of gpus, queue, priority and labels")
        return self


def generate_job_id(name: str) -> str:
    """Return `<name>-<10 characters>`, which is readable and has 50 random bits.

    Commands check it against live jobs; a check against ended jobs would add a fifth to the time of a submission.
    """
    return f"{name}-{base64.b32encode(secrets.token_bytes(7)).decode().lower()[:10]}"


@router.post("/jobs", status_code=201, responses=problem_responses(409))
@requires(SUBMITTER)
def submit_job(
    document: JobDocument, context: ContextDep, service: ServiceDep, response: Response, key: IdempotencyKeyHeader = ""
) -> JobView:
    """Submit a job. The response confirms acceptance; the next tick plans and queues it. With an `Idempotency-Key`, a
    retry returns the job of the first request in its current state."""
    spec = to_job_spec(document)
    require_command(spec)
    check_job(spec)
    require_archive(service, spec.program.archive)
    context.require_role(Role.SUBMITTER, spec.queue)

    def new_id() -> str:
        check_submission(spec, context, undeclared_queues=service.settings.undeclared_queues)
        require_secrets(spec, service, queue=spec.queue)
        return generate_job_id(spec.name)

    if key:
        after, job_id = submit_once(context, spec, key, new_id)
    else:
        job_id = new_id()
        after = context.send(SubmitJob(job_id, spec))
    response.headers["Location"] = f"/v1/jobs/{job_id}"
    view, warnings = _job_response(after, after.job(job_id), response), find_credential_warnings(spec)
    return {**view, "warnings": warnings} if warnings else view


@router.get("/jobs/{job_id}")
@requires(VIEWER)
def get_job(job_id: JobIdPath, context: ContextDep, response: Response) -> JobView:
    """Return a live or ended job."""
    return _job_response(context, context.job(job_id), response)


@router.patch("/jobs/{job_id}", status_code=202, responses=problem_responses(409))
@requires(SUBMITTER)
def change_job(
    job_id: JobIdPath,
    change: JobChange,
    context: ContextDep,
    service: ServiceDep,
    response: Response,
    *,
    if_match: IfMatchHeader = "",
) -> JobView:
    """Change the job's GPU range, queue, priority or labels. The next tick acts on it."""
    job = context.live_job(job_id)
    basis = require_match(if_match, job_etag(job), f"job {job_id}")
    if change.queue is not None and change.queue != job.spec.queue:
        context.require_role(Role.SUBMITTER, change.queue)  # first, so that errors reveal nothing about the queue
        undeclared = service.settings.undeclared_queues
        check_queue(change.queue, context, owner=job.owner, owner_key=job.owner_key, undeclared_queues=undeclared)
        require_secrets(job.spec, service, queue=change.queue)
    check_change(job, queue=change.queue, priority=change.priority, context=context)
    after = context.send(_change_command(job, change), basis=basis)
    return _job_response(after, after.job(job_id), response)


@router.delete("/jobs/{job_id}", status_code=202, responses=problem_responses(409))
@requires(SUBMITTER)
def cancel_job(job_id: JobIdPath, context: ContextDep, response: Response, if_match: IfMatchHeader = "") -> JobView:
    """Cancel the job: its workers are stopped, its record stays. Cancelling again changes nothing."""
    job = context.job(job_id)
    if job.state is JobState.CANCELLED:
        declare_audited()
        return _job_response(context, job, response)
    context.live_job(job_id)
    return _send_intent(context, job, CancelJob(job_id), if_match, response)


@router.post("/jobs/{job_id}:suspend", status_code=202, responses=problem_responses(409))
@requires(SUBMITTER)
def suspend_job(job_id: JobIdPath, context: ContextDep, response: Response, if_match: IfMatchHeader = "") -> JobView:
    """Suspend the job: it saves a checkpoint and releases its GPUs until it is resumed."""
    job = context.live_job(job_id)
    _refuse_cancelled(job)
    return _send_intent(context, job, SuspendJob(job_id), if_match, response)


@router.post("/jobs/{job_id}:resume", status_code=202, responses=problem_responses(409))
@requires(SUBMITTER)
def resume_job(job_id: JobIdPath, context: ContextDep, response: Response, if_match: IfMatchHeader = "") -> JobView:
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
    _check_label_count(job, change)
    if change.queue is None and change.priority is None and change.labels is None:
        return ScaleJob(job.id, min_gpus, max_gpus)
    if change.gpus is None:
        return ChangeJob(job.id, change.queue, change.priority, labels=change.labels)
    return ChangeJob(job.id, change.queue, change.priority, min_gpus, max_gpus, change.labels)


def _check_label_count(job: Job, change: JobChange) -> None:
    number = len(merge_labels(job.spec.labels, change.labels or {}))
    if number > LABELS_MAX:
        raise_invalid_field("labels", number, f"at most {LABELS_MAX} labels of a job; remove others with null")


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
