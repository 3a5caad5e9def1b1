"""Replays: simulations of the jobs and the demand that this service recorded, with another policy set, other numbers of
nodes, or other lending limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fastapi import Response

from api.http.conditional_requests import IdempotencyKeyHeader, build_creation_key, create_once
from api.http.dependencies import ContextDep, PrincipalDep, ServiceDep, StoreDep, create_router
from api.http.errors import problem_responses, raise_conflict, raise_invalid_field
from api.identity.audit import declare_audited
from api.identity.authorization import ADMIN, requires
from api.simulations import SimulationView, Submission, simulation_view, submit
from api.state import RequestContext
from scheduler.documents.replay import ReplayDocument
from scheduler.domain.fleet import PoolKind
from scheduler.domain.job import Job
from scheduler.domain.simulation_task import SimulationTask
from scheduler.simulator.recorded_period import RecordedPeriod, build_recorded_period
from scheduler.simulator.replay_changes import ReplayChanges, ReplayError, apply_changes
from scheduler.store.api_protocol import get_job_sort_key
from scheduler.store.job_query import JobQuery

DAY_S = 86_400.0
JOBS_MAX = 20_000
"""Ended jobs of a replay. Each is read from the database."""
_PAGE_JOBS = 1000

router = create_router("simulations")


@router.post("/simulations:replay", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def replay_recorded_time(
    document: ReplayDocument,
    context: ContextDep,
    service: ServiceDep,
    store: StoreDep,
    principal: PrincipalDep,
    *,
    response: Response,
    key: IdempotencyKeyHeader = "",
) -> SimulationView:
    """Simulate the jobs and the inference demand that were recorded in the last days, on today's fleet with changes.
    `description` says how the simulated cluster differs from the recorded one. The result is a simulation like any
    other. It needs the role admin, because it reads the jobs of all queues."""
    creation_key = build_creation_key(key, principal, "replay", document)

    def create() -> SimulationTask:
        changes = ReplayChanges(document.nodes, document.lending.model_dump(exclude_none=True))
        period = _build_period(document, context)
        try:
            files = apply_changes(period.files, changes)
        except ReplayError as error:
            raise_invalid_field(error.field, error.value, error.allowed)
        title = f"Replay of the last {document.days:g} days: {changes.describe()}"
        description = "\n".join((title, *period.differences))
        submission = Submission(files, tuple(document.policies), document.seed, description)
        return submit(submission, service, store, principal, creation_key)

    declare_audited()
    task = create_once(store, creation_key, create, store.simulations.get_task)
    response.headers["Location"] = f"/v1/simulations/{task.id}"
    return simulation_view(task)


def _build_period(document: ReplayDocument, context: RequestContext) -> RecordedPeriod:
    """Return the recorded period. Raises a 409 if there is nothing to simulate."""
    snapshot, from_s = context.committed, context.now_s - DAY_S * document.days
    readings = {
        name: context.store.list_readings(name, since_s=from_s)
        for name, pool in snapshot.pools.items()
        if pool.kind is PoolKind.INFERENCE
    }
    jobs = [*snapshot.jobs.values(), *_iter_ended_jobs(context, from_s)]
    try:
        return build_recorded_period(
            replace(snapshot, now_s=context.now_s), jobs, readings, from_s=from_s, to_s=context.now_s
        )
    except ValueError as error:
        raise_conflict(str(error))


def _iter_ended_jobs(context: RequestContext, from_s: float) -> Iterator[Job]:
    """Yield the ended jobs that were submitted since `from_s`. Raises a 422 if there are too many."""
    query, after, count = JobQuery(since_s=from_s), None, 0
    while True:
        page = context.store.find_ended_jobs(query, after=after, limit=_PAGE_JOBS)
        count += len(page)
        if count > JOBS_MAX:
            raise_invalid_field("days", None, f"a shorter time, with at most {JOBS_MAX} ended jobs")
        yield from (job for job in page if job.id not in context.committed.jobs)
        if len(page) < _PAGE_JOBS:
            return
        after = get_job_sort_key(page[-1])
