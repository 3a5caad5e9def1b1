"""What a job has been through, as an answer: its states, what it held, and samples of its work.

Checkpoints of a job, as answers.

Checkpoints: the latest of a job, and one more now.

What can be read of one job (plan, events, history, explanation), and what would become of one (dry run).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from typing_extensions import TypedDict

from api.event_views import EventView
from api.events import STREAM_RESPONSES, page_of_events
from api.explanations import DryRun, DryRunView, ExplanationView, dry_run_tick, dry_run_view, explanation_view
from api.http.dependencies import AfterParameter, ContextDep, LimitParameter, ServiceDep, create_router
from api.http.errors import ProblemError, problem_responses
from api.http.paging import AtSeconds, CursorParameter, PageOf
from api.identity.principals import Role
from api.jobs import generate_job_id
from api.plans import JobPlanView, check_job, check_queue, job_plan_view
from api.state import new_command
from scheduler.documents.job import JobDocument, to_job_spec
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
    """`message`: why it came into this state."""

    at_s: AtSeconds
    state: JobState
    message: str


class AllocationView(TypedDict):
    """What the job was given at `at_s`. `gpus` is 0 where it is to hold none, `lent_gpus` are those among them that
    inference pools lent; every change of them is a new `generation`. `plan` in one line, null where it has none."""

    at_s: AtSeconds
    generation: int
    gpus: int
    lent_gpus: int
    plan: str | None


class SampleView(TypedDict):
    """What its workers reported then; null is what they did not say. `steps` fall where work was lost. `peak_bytes`:
    the most memory that a rank has had."""

    at_s: AtSeconds
    steps: float
    loss: float | None
    samples_per_s: float | None
    peak_bytes: int | None


class JobHistoryView(TypedDict):
    """All oldest first. `states` and `allocations`: the newest 500. `samples`: at most 500, at least 5 s apart, evenly
    further apart the longer it runs, the first and the newest always among them."""

    job_id: str
    states: list[StateView]
    allocations: list[AllocationView]
    samples: list[SampleView]


def job_history_view(
    job: Job, events: Iterable[Event], samples: Iterable[Sample], snapshot: Snapshot
) -> JobHistoryView:
    """`events` of the job, oldest first. Where it has gone on since the last of them (commands wait), or they do not
    tell how it stood (an older version wrote them), its present state and allocation stand at the end."""
    told = [(event, event.job) for event in events if event.job is not None]
    now = job_step(job, snapshot.nodes, snapshot.pools)
    if not told or (told[-1][1] != now and told[-1][0].at_s < job.state_since_s):
        told.append((Event(job.state_since_s, EventCode.JOB_STATE, job.id, f": {job.message}"), now))
    return {
        "job_id": job.id,
        "states": [_state_view(event, step) for event, step in told][-HISTORY_ITEMS_MAX:],
        "allocations": _allocation_views(told)[-HISTORY_ITEMS_MAX:],
        "samples": [_sample_view(sample) for sample in samples],
    }


def _state_view(event: Event, step: JobStep) -> StateView:
    """A change of state is told as "before -> after: why"."""
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
    """Complete since `completed_at_s`, with all that `step` steps have made."""

    step: int
    completed_at_s: float


class RequestedCheckpointView(TypedDict):
    """Asked for at `asked_at_s`; it will hold `step_min` steps or more, null until the ranks were heard."""

    asked_at_s: float
    step_min: int | None


class CheckpointsView(TypedDict):
    """`latest` is what a crash would fall back to. `dir` is empty where the executor has chosen the folder."""

    job_id: str
    latest: CheckpointView | None
    awaited: RequestedCheckpointView | None
    interval_s: float
    keep: int
    dir: str


def checkpoints_view(job: Job) -> CheckpointsView:
    progress, spec, wish = job.progress, job.spec.checkpoint, None if job.is_ended else job.pending_checkpoint_request
    step = int(progress.checkpoint_steps)
    step_min = None if wish is None or wish.steps is None else int(wish.steps)
    return {
        "job_id": job.id,
        "latest": {"step": step, "completed_at_s": progress.checkpoint_at_s} if step else None,
        "awaited": {"asked_at_s": wish.asked_at_s, "step_min": step_min} if wish else None,
        "interval_s": spec.interval_s,
        "keep": spec.keep,
        "dir": spec.dir,
    }


checkpoint_router = create_router("jobs")


@checkpoint_router.get("/jobs/{job_id}/checkpoints")
def get_checkpoints(job_id: str, context: ContextDep) -> CheckpointsView:
    """What is known of the job's checkpoints."""
    return checkpoints_view(context.job(job_id))


@checkpoint_router.post("/jobs/{job_id}:checkpoint", status_code=202, responses=problem_responses(409))
def save_checkpoint(job_id: str, context: ContextDep) -> CheckpointsView:
    """Have the running job save at its next step boundary, and go on. To ask again before that is done changes nothing;
    `awaited` is null once it is."""
    job = context.live_job(job_id)
    if job.pending_checkpoint_request is not None:
        return checkpoints_view(job)
    return checkpoints_view(context.send(CheckpointJob(job_id)).job(job_id))


detail_router = create_router("jobs")

HISTORY_EVENTS_MAX = 1000
"""More than half of a job's events change its state."""


@detail_router.get("/jobs/{job_id}/plan")
def get_job_plan(job_id: str, context: ContextDep) -> JobPlanView:
    """The plan that the job runs under, or ran under last (Plan JSON), with how each device spends the step."""
    job = context.job(job_id)
    if job.allocation.plan is None:
        raise ProblemError(404, "not-found", f"job {job_id} is {job.state} and has no plan")
    return job_plan_view(job, context.snapshot, job.allocation.plan)


@detail_router.get("/jobs/{job_id}/events", responses=STREAM_RESPONSES | problem_responses(410))
def list_job_events(
    job_id: str,
    context: ContextDep,
    after: AfterParameter = 0,
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[EventView]:
    """What happened to the job, oldest first."""
    context.job(job_id)
    return page_of_events(context, subject=job_id, after=after, limit=limit, cursor=cursor)


@detail_router.get("/jobs/{job_id}/history")
def get_job_history(job_id: str, context: ContextDep) -> JobHistoryView:
    """What to draw of a job: its states, what it held, loss and throughput over time; ended jobs too."""
    job, store = context.job(job_id), context.store
    events = [stored.event for stored in store.list_last_events(job_id, limit=HISTORY_EVENTS_MAX)]
    return context.redact(job_history_view(job, events, store.list_samples(job_id), context.snapshot))


@detail_router.get("/jobs/{job_id}/explanation")
def explain_job(job_id: str, context: ContextDep, service: ServiceDep) -> ExplanationView:
    """Why the job is where it is, with numbers; `next` is what the coming tick would do with it."""
    job = context.job(job_id)
    if job.is_ended:
        return explanation_view(explain_ended(job), None)
    rehearsal = dry_run_tick(context.snapshot, service.policies)
    told = explain(context.snapshot, rehearsal.report.waiting, job_id)
    return context.redact(explanation_view(told, _find_decision(job_id, rehearsal)))


@detail_router.post("/jobs:dry-run", responses=problem_responses(409))
def dry_run_job(document: JobDocument, context: ContextDep, service: ServiceDep) -> DryRunView:
    """What the next tick would do if this job were submitted now. Nothing is kept.

    A job whose shapes are not solved yet answers in state "planning".
    """
    spec = to_job_spec(document)
    check_job(spec)
    context.require_role(Role.SUBMITTER, spec.queue)
    check_queue(spec.queue, context, owner=context.principal.name, undeclared_queues=service.settings.undeclared_queues)
    job_id = generate_job_id(spec.name)
    command = new_command(SubmitJob(job_id, spec), context.now_s, actor=context.principal.name)
    coming, without = (
        dry_run_tick(context.snapshot, service.policies, command),
        dry_run_tick(context.snapshot, service.policies),
    )
    anyway = {_decision_effect(decision) for decision in without.report.decisions}
    because = [decision for decision in coming.report.decisions if _decision_effect(decision) not in anyway]
    return context.redact(dry_run_view(job_id, context.snapshot, coming, because))


def _decision_effect(decision: Decision) -> tuple[str, str, str]:
    """What a decision does, whatever its reason says."""
    does = {name: value for name, value in encode(decision).items() if name != "reason"}
    return type(decision).__name__, decision_subject(decision), repr(does)


def _find_decision(job_id: str, dry_run: DryRun) -> Decision | None:
    return next((d for d in dry_run.report.decisions if decision_subject(d) == job_id), None)
