"""Details of one job: plan, events, history, checkpoints, explanation; and the dry run of a job document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from api.event_views import EventView
from api.events import STREAM_RESPONSES, page_of_events
from api.explanations import (
    DryRun,
    DryRunView,
    ExplanationView,
    dry_run_tick,
    dry_run_view,
    explanation_view,
    list_unchecked,
)
from api.http.dependencies import AfterParameter, ContextDep, JobIdPath, LimitParameter, ServiceDep, create_router
from api.http.errors import ProblemError, problem_responses
from api.http.paging import CursorParameter, JobId, PageOf
from api.identity.audit import declare_audited
from api.identity.authorization import SUBMITTER, VIEWER, RouteRule, requires
from api.identity.principals import Role
from api.jobs import generate_job_id
from api.plans import JobPlanView, check_job, job_plan_view
from api.queue_secrets.routes import require_secrets
from api.state import new_command
from api.submission_rules import check_submission
from scheduler.documents.job import JobDocument, to_job_spec
from scheduler.documents.job_secrets import find_credential_warnings
from scheduler.domain.codec import encode
from scheduler.domain.commands import CheckpointJob, SubmitJob
from scheduler.domain.decisions import Decision, decision_subject
from scheduler.domain.events import Event, EventCode, JobStep
from scheduler.domain.job import Job
from scheduler.domain.job_records import Sample
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.event_messages import job_step
from scheduler.scheduling.explanation import explain, explain_ended

HISTORY_ITEMS_MAX = 500


class StateView(TypedDict):
    """A state that the job entered."""

    at_s: Annotated[float, Field(description="Time of the change, in seconds since 1970 (UTC).")]
    state: Annotated[JobState, Field(description="Where the job was in its life cycle from then on.")]
    message: Annotated[str, Field(description="Why the job entered it. Empty: no reason recorded.")]


class AllocationView(TypedDict):
    """The GPUs and the plan that the job was given at `at_s`."""

    at_s: Annotated[float, Field(description="Time of the change, in seconds since 1970 (UTC).")]
    generation: Annotated[int, Field(description="Incremented with each change of the job's GPUs or plan.")]
    gpus: Annotated[int, Field(description="Number of GPUs that the job was given. 0: it was to release all.")]
    lent_gpus: Annotated[int, Field(description="Number of these GPUs on nodes on loan from inference pools.")]
    plan: Annotated[str | None, Field(description="One-line summary of the parallel plan. Null: none.")]


class SampleView(TypedDict):
    """A progress report of the workers."""

    at_s: Annotated[float, Field(description="Time of the report, in seconds since 1970 (UTC).")]
    steps: Annotated[float, Field(description="Optimizer steps done. The number falls when work is lost.")]
    loss: Annotated[float | None, Field(description="Training loss. Null: not reported.")]
    samples_per_s: Annotated[float | None, Field(description="Throughput in samples per second. Null: not reported.")]
    peak_bytes: Annotated[
        int | None, Field(description="Largest GPU memory use of any rank so far, in bytes. Null: not reported.")
    ]


class JobHistoryView(TypedDict):
    """Data for charts of one job. Each list is oldest first."""

    job_id: JobId
    states: Annotated[list[StateView], Field(description="The newest 500 changes of its state.")]
    allocations: Annotated[list[AllocationView], Field(description="The newest 500 changes of its GPUs or plan.")]
    samples: Annotated[
        list[SampleView],
        Field(
            description=(
                "At most 500 progress reports, evenly spaced and at least 5 s apart, with the first and the newest."
            )
        ),
    ]


def job_history_view(
    job: Job, events: Iterable[Event], samples: Iterable[Sample], snapshot: Snapshot
) -> JobHistoryView:
    """Return the history. `events` are the job's, oldest first.

    Commands in the inbox may have changed the job since its last event, and events of older versions do not describe
    its state. In both cases the current state and allocation are appended.
    """
    steps = [(event, event.job) for event in events if event.job is not None]
    now = job_step(job, snapshot.nodes, snapshot.pools)
    if not steps or (steps[-1][1] != now and steps[-1][0].at_s < job.state_since_s):
        steps.append((Event(job.state_since_s, EventCode.JOB_STATE, job.id, f": {job.message}"), now))
    return {
        "job_id": job.id,
        "states": [_state_view(event, step) for event, step in steps][-HISTORY_ITEMS_MAX:],
        "allocations": _allocation_views(steps)[-HISTORY_ITEMS_MAX:],
        "samples": [_sample_view(sample) for sample in samples],
    }


def _state_view(event: Event, step: JobStep) -> StateView:
    """An event of a state change has a message of the form "before -> after: why"."""
    why = event.message.partition(": ")[2] if event.code is EventCode.JOB_STATE else event.message
    return {"at_s": event.at_s, "state": step.state, "message": why}


def _allocation_views(steps: Sequence[tuple[Event, JobStep]]) -> list[AllocationView]:
    views: list[AllocationView] = [
        {
            "at_s": event.at_s,
            "generation": step.generation,
            "gpus": step.gpus,
            "lent_gpus": step.lent_gpus,
            "plan": step.plan or None,
        }
        for event, step in steps
    ]
    changed = [after for before, after in pairwise(views) if after | {"at_s": 0} != before | {"at_s": 0}]
    return [*views[:1], *changed]


def _sample_view(sample: Sample) -> SampleView:
    return {
        "at_s": sample.at_s,
        "steps": sample.steps,
        "loss": sample.loss,
        "samples_per_s": sample.samples_per_s,
        "peak_bytes": sample.peak_bytes,
    }


class CheckpointView(TypedDict):
    """A complete checkpoint."""

    step: Annotated[int, Field(description="Number of optimizer steps that it contains.")]
    completed_at_s: Annotated[float, Field(description="Time at which it was complete, in seconds since 1970 (UTC).")]


class RequestedCheckpointView(TypedDict):
    """A requested checkpoint that is not complete yet."""

    asked_at_s: Annotated[float, Field(description="Time of the request, in seconds since 1970 (UTC).")]
    step_min: Annotated[
        int | None,
        Field(description="Fewest optimizer steps that it will contain. Null: the ranks have not answered yet."),
    ]


class CheckpointsView(TypedDict):
    """The latest and the requested checkpoint of a job."""

    job_id: JobId
    latest: Annotated[
        CheckpointView | None,
        Field(description="Checkpoint from which the job would restart. Null: it would start from step 0."),
    ]
    awaited: Annotated[
        RequestedCheckpointView | None,
        Field(description="Checkpoint that was requested and is not complete yet. Null: none."),
    ]
    interval_s: Annotated[float, Field(description="Seconds between two automatic checkpoints.")]
    keep: Annotated[int, Field(description="Number of newest checkpoints that are not deleted.")]
    dir: Annotated[
        str, Field(description="Directory or object store of the checkpoints. Empty: the executor chose a directory.")
    ]


def checkpoints_view(job: Job) -> CheckpointsView:
    progress, spec, request = (
        job.progress,
        job.spec.checkpoint,
        None if job.is_ended else job.pending_checkpoint_request,
    )
    step = int(progress.checkpoint_steps)
    step_min = None if request is None or request.steps is None else int(request.steps)
    return {
        "job_id": job.id,
        "latest": {"step": step, "completed_at_s": progress.checkpoint_at_s} if step else None,
        "awaited": {"asked_at_s": request.asked_at_s, "step_min": step_min} if request else None,
        "interval_s": spec.interval_s,
        "keep": spec.keep,
        "dir": spec.dir,
    }


checkpoint_router = create_router("jobs")


@checkpoint_router.get("/jobs/{job_id}/checkpoints")
@requires(VIEWER)
def get_checkpoints(job_id: JobIdPath, context: ContextDep) -> CheckpointsView:
    """Return the job's latest and requested checkpoints."""
    return checkpoints_view(context.job(job_id))


@checkpoint_router.post("/jobs/{job_id}:checkpoint", status_code=202, responses=problem_responses(409))
@requires(SUBMITTER)
def save_checkpoint(job_id: JobIdPath, context: ContextDep) -> CheckpointsView:
    """Ask the running job to save a checkpoint at its next step boundary. Asking again before it is complete changes
    nothing; `awaited` is null once it is."""
    job = context.live_job(job_id)
    if job.pending_checkpoint_request is not None:
        declare_audited()
        return checkpoints_view(job)
    return checkpoints_view(context.send(CheckpointJob(job_id)).job(job_id))


detail_router = create_router("jobs")

HISTORY_EVENTS_MAX = 1000
"""More than half of a job's events change its state."""


@detail_router.get("/jobs/{job_id}/plan")
@requires(VIEWER)
def get_job_plan(job_id: JobIdPath, context: ContextDep) -> JobPlanView:
    """Return the plan that the job runs under, or ran under last, with how each device spends the step."""
    job = context.job(job_id)
    if job.allocation.plan is None:
        raise ProblemError(404, "not-found", f"job {job_id} is {job.state} and has no plan")
    return job_plan_view(job, context.snapshot, job.allocation.plan)


@detail_router.get("/jobs/{job_id}/events", responses=STREAM_RESPONSES | problem_responses(410))
@requires(VIEWER)
def list_job_events(
    job_id: JobIdPath,
    context: ContextDep,
    after: AfterParameter = 0,
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[EventView]:
    """List what happened to the job, oldest first."""
    context.job(job_id)
    return page_of_events(context, subject=job_id, after=after, limit=limit, cursor=cursor)


@detail_router.get("/jobs/{job_id}/history")
@requires(VIEWER)
def get_job_history(job_id: JobIdPath, context: ContextDep) -> JobHistoryView:
    """Return data for charts: the job's states, allocations, loss and throughput over time. Also for ended jobs."""
    job, store = context.job(job_id), context.store
    events = [stored.event for stored in store.list_last_events(job_id, limit=HISTORY_EVENTS_MAX)]
    return context.redact(job_history_view(job, events, store.list_samples(job_id), context.snapshot))


@detail_router.get("/jobs/{job_id}/explanation")
@requires(VIEWER)
def explain_job(job_id: JobIdPath, context: ContextDep, service: ServiceDep) -> ExplanationView:
    """Explain why the job is in its state. `next` is what the next tick would do with it."""
    job = context.job(job_id)
    if job.is_ended:
        return explanation_view(explain_ended(job), None)
    dry_run = dry_run_tick(context.snapshot, service.policies)
    explanation = explain(context.snapshot, dry_run.report.waiting, job_id)
    return context.redact(explanation_view(explanation, _find_decision(job_id, dry_run)))


@detail_router.post("/jobs:dry-run", responses=problem_responses(409))
@requires(RouteRule(role=Role.SUBMITTER, changes_state=False))
def dry_run_job(document: JobDocument, context: ContextDep, service: ServiceDep) -> DryRunView:
    """Return what the next tick would do if this job were submitted now. Nothing is stored.

    A job whose scaling curve is not solved yet is reported in state "planning".
    """
    spec = to_job_spec(document)
    check_job(spec)
    context.require_role(Role.SUBMITTER, spec.queue)
    check_submission(spec, context, undeclared_queues=service.settings.undeclared_queues)
    require_secrets(spec, service, queue=spec.queue)
    job_id = generate_job_id(spec.name)
    command = new_command(SubmitJob(job_id, spec), context.now_s, context.principal)
    with_job = dry_run_tick(context.snapshot, service.policies, command)
    without_job = dry_run_tick(context.snapshot, service.policies)
    unrelated = {_decision_effect(decision) for decision in without_job.report.decisions}
    caused = [decision for decision in with_job.report.decisions if _decision_effect(decision) not in unrelated]
    view = context.redact(dry_run_view(job_id, context.snapshot, with_job, caused))
    view["warnings"] = [*find_credential_warnings(spec), *list_unchecked(spec, context.snapshot)]
    return view


def _decision_effect(decision: Decision) -> tuple[str, str, str]:
    """Return what a decision does, without its reason."""
    effect = {name: value for name, value in encode(decision).items() if name != "reason"}
    return type(decision).__name__, decision_subject(decision), repr(effect)


def _find_decision(job_id: str, dry_run: DryRun) -> Decision | None:
    return next((decision for decision in dry_run.report.decisions if decision_subject(decision) == job_id), None)
