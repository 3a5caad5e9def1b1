"""What can be read of one job (plan, events, history, explanation), and what would become of one (dry run)."""

from __future__ import annotations

from api.answers.history import JobHistoryView, job_history_view
from api.answers.page import PageOf
from api.answers.plan import JobPlanView, job_plan_view
from api.answers.prospect import DryRunView, ExplanationView, dry_run_view, explanation_view
from api.answers.record import EventView
from api.checks import check_job, check_queue
from api.dependencies import After, Limit, ServiceDep, WorldDep
from api.errors import ProblemError
from api.identity.principal import Role
from api.paging import Cursor
from api.problems import problems
from api.rehearsal import Rehearsal, rehearse
from api.routers.events import page_of_events
from api.routers.jobs import new_job_id
from api.routers.streams import STREAMED
from api.routing import noun_router
from api.world import new_command
from scheduler.core.explain import explain, explain_ended
from scheduler.documents.job import JobDocument, job_spec
from scheduler.domain.codec import encode
from scheduler.domain.command import SubmitJob
from scheduler.domain.decision import Decision, subject

router = noun_router("jobs")

HISTORY_EVENTS_MAX = 1000
"""More than half of a job's events change its state."""


@router.get("/jobs/{job_id}/plan")
def get_job_plan(job_id: str, world: WorldDep) -> JobPlanView:
    """The plan that the job runs under, or ran under last (Plan JSON), with how each device spends the step."""
    job = world.job(job_id)
    if job.allocation.plan is None:
        raise ProblemError(404, "not-found", f"job {job_id} is {job.state} and has no plan")
    return job_plan_view(job, world.snapshot, job.allocation.plan)


@router.get("/jobs/{job_id}/events", responses=STREAMED | problems(410))
def list_job_events(
    job_id: str, world: WorldDep, after: After = 0, limit: Limit = 100, cursor: Cursor = ""
) -> PageOf[EventView]:
    """What happened to the job, oldest first."""
    world.job(job_id)
    return page_of_events(world, subject=job_id, after=after, limit=limit, cursor=cursor)


@router.get("/jobs/{job_id}/history")
def get_job_history(job_id: str, world: WorldDep) -> JobHistoryView:
    """What to draw of a job: its states, what it held, loss and throughput over time; ended jobs too."""
    job, store = world.job(job_id), world.store
    events = [stored.event for stored in store.last_events(job_id, limit=HISTORY_EVENTS_MAX)]
    return world.redacted(job_history_view(job, events, store.samples(job_id), world.snapshot))


@router.get("/jobs/{job_id}/explanation")
def explain_job(job_id: str, world: WorldDep, service: ServiceDep) -> ExplanationView:
    """Why the job is where it is, with numbers; `next` is what the coming tick would do with it."""
    job = world.job(job_id)
    if job.is_ended:
        return explanation_view(explain_ended(job), None)
    rehearsal = rehearse(world.snapshot, service.policies)
    told = explain(world.snapshot, rehearsal.report.waiting, job_id)
    return world.redacted(explanation_view(told, _decision_about(job_id, rehearsal)))


@router.post("/jobs:dry-run", responses=problems(409))
def dry_run_job(document: JobDocument, world: WorldDep, service: ServiceDep) -> DryRunView:
    """What the next tick would do if this job were submitted now. Nothing is kept.

    A job whose shapes are not solved yet answers in state "planning".
    """
    spec = job_spec(document)
    check_job(spec)
    world.require(Role.SUBMITTER, spec.queue)
    check_queue(spec.queue, world, owner=world.principal.name, undeclared=service.settings.undeclared_queues)
    job_id = new_job_id(spec.name)
    command = new_command(SubmitJob(job_id, spec), world.now_s, actor=world.principal.name)
    coming, without = rehearse(world.snapshot, service.policies, command), rehearse(world.snapshot, service.policies)
    anyway = {_essence(decision) for decision in without.report.decisions}
    because = [decision for decision in coming.report.decisions if _essence(decision) not in anyway]
    return world.redacted(dry_run_view(job_id, world.snapshot, coming, because))


def _essence(decision: Decision) -> tuple[str, str, str]:
    """What a decision does, whatever its reason says."""
    does = {name: value for name, value in encode(decision).items() if name != "reason"}
    return type(decision).__name__, subject(decision), repr(does)


def _decision_about(job_id: str, rehearsal: Rehearsal) -> Decision | None:
    return next((d for d in rehearsal.report.decisions if subject(d) == job_id), None)
