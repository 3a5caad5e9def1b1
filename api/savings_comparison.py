"""Comparison of the service's policy set with "no lending" and "no elasticity", by simulation of recorded jobs."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import PrincipalDep, Service, ServiceDep, StoreDep, create_router
from api.http.errors import ProblemError, problem_responses, raise_conflict
from api.identity.audit import declare_audited, new_audit_entry
from api.identity.authorization import VIEWER_OF_ALL, RouteRule, requires
from api.identity.principals import Principal, Role
from api.simulations import SimulationProgressView, count_jobs, new_simulation_id, progress_view
from scheduler.domain.simulation_task import LIVE_TASK_STATES, SimulationTask, TaskState
from scheduler.simulator.recorded_period import RecordedPeriod, build_recorded_period
from scheduler.store.api_protocol import ServiceStore
from scheduler.store.job_query import JobQuery

DAY_S = 86_400.0
DAYS = 7
JOBS_MAX = 20_000
Variant = Literal["today", "no_lending", "no_elasticity"]
VARIANTS: dict[Variant, str] = {
    "today": "ebbtide",
    "no_lending": "ebbtide-scaling",
    "no_elasticity": "ebbtide-loaning",
}
"""Policy set by variant. Those without lending and without elasticity are derived from `ebbtide`."""
_TASKS_MAX = 20
_TITLE = f"Savings of the last {DAYS} days: with, without lending, and without elasticity"
COMPARISON_OWNER_ID = "service:savings"
"""Owner of the simulations that compare, so that they are found for every caller."""


class ComparedOutcomeView(TypedDict):
    """Results of the simulation under one policy set."""

    variant: Annotated[
        Variant, Field(description="`today`: the policy set in use; `no_lending` and `no_elasticity`: without these.")
    ]
    policy: Annotated[str, Field(description="Name of the policy set that was simulated.")]
    jobs: Annotated[int, Field(description="Number of jobs in the simulation.")]
    completed: Annotated[int, Field(description="Number of these that completed.")]
    jct_mean_s: Annotated[float, Field(description="Mean seconds from submission to completion.")]
    jct_p95_s: Annotated[float, Field(description="Seconds from submission within which 95% of jobs completed.")]
    waiting_mean_s: Annotated[float, Field(description="Mean seconds that a job waited for GPUs.")]
    makespan_s: Annotated[float, Field(description="Seconds from the first submission to the last completion.")]
    loaned_gpu_hours: Annotated[float, Field(description="GPU-hours of nodes on loan.")]
    idle_waiting_gpu_hours: Annotated[float, Field(description="GPU-hours that were idle while a job waited.")]
    lost_gpu_hours: Annotated[float, Field(description="GPU-hours of work that was lost.")]
    short_ratio: Annotated[
        float, Field(description="Share of demand intervals in which loans left inference short, 0 to 1.")
    ]


class ComparisonView(TypedDict):
    """A simulation of recorded jobs under three policy sets. It is an estimate, not a measurement."""

    id: Annotated[str, Field(description="Simulation that computes it.")]
    state: Annotated[TaskState, Field(description="One of queued, running, succeeded, failed and cancelled.")]
    reason: Annotated[str, Field(description="Why it failed or was queued again. Empty: neither.")]
    from_s: Annotated[float, Field(description="Start of the recorded time, in seconds since 1970 (UTC).")]
    created_at_s: Annotated[
        float, Field(description="Time of the request and end of the recorded time, in seconds since 1970 (UTC).")
    ]
    ended_at_s: Annotated[float | None, Field(description="End, in seconds since 1970 (UTC). Null: unfinished.")]
    progress: Annotated[SimulationProgressView, Field(description="How many jobs have ended in it so far.")]
    differences: Annotated[
        list[str], Field(description="Differences between the simulated and the recorded cluster, as sentences.")
    ]
    outcomes: Annotated[list[ComparedOutcomeView], Field(description="Results by variant. Empty: not known yet.")]


class ComparisonsView(TypedDict):
    """The comparison that is being computed, and the newest one with results."""

    pending: Annotated[ComparisonView | None, Field(description="Newest comparison without results. Null: none.")]
    newest: Annotated[ComparisonView | None, Field(description="Newest comparison with results. Null: none.")]


router = create_router("usage", prefix="/v1/savings/comparison")


@router.get("")
@requires(VIEWER_OF_ALL)
def get_comparison(store: StoreDep) -> ComparisonsView:
    """Return the newest simulation of recorded jobs with, without lending, and without elasticity."""
    tasks = _list_newest(store)
    finished = next((task for task in tasks if task.state is TaskState.SUCCEEDED), None)
    newest = tasks[0] if tasks else None
    return {
        "pending": None if newest is None or newest is finished else _comparison_view(newest, store),
        "newest": None if finished is None else _comparison_view(finished, store),
    }


@router.post("", status_code=202, responses=problem_responses(409))
@requires(RouteRule(role=Role.SUBMITTER, on_all_queues=True))
def create_comparison(service: ServiceDep, store: StoreDep, principal: PrincipalDep) -> ComparisonView:
    """Simulate the jobs of the last seven days with the policy set in use, without lending, and without elasticity.

    While a comparison is being computed, it is returned instead.
    """
    declare_audited()
    live = next((task for task in _list_newest(store) if task.state in LIVE_TASK_STATES), None)
    if live is not None:
        return _comparison_view(live, store)
    if service.policies.name != VARIANTS["today"]:
        raise_conflict(
            f"the comparison needs the policy set {VARIANTS['today']}, and this service uses {service.policies.name}. "
            "Compare other policy sets with `ebbtide simulate`"
        )
    task = _start(service, store, principal)
    return _comparison_view(task, store)


def _start(service: Service, store: ServiceStore, principal: Principal) -> SimulationTask:
    now_s = service.clock.now_s()
    period = _load_period(store, now_s)
    policies = tuple(VARIANTS.values())
    task = SimulationTask(
        id=new_simulation_id(),
        owner=principal.name,
        owner_id=COMPARISON_OWNER_ID,
        created_at_s=now_s,
        policies=policies,
        seed=0,
        jobs_total=_count_jobs(period, policies, service) * len(policies),
        description="\n".join((_TITLE, *period.differences)),
    )
    after = {"policies": list(policies), "jobs": period.jobs}
    store.simulations.create(
        task, period.files, audit=new_audit_entry(principal, now_s, "CompareSavings", task.id, after=after)
    )
    return task


def _count_jobs(period: RecordedPeriod, policies: tuple[str, ...], service: Service) -> int:
    """Return the number of jobs. Raises a 409 if the simulator refuses them: the request itself has no fields."""
    try:
        return count_jobs(period.files, policies, service)
    except ProblemError as error:
        if error.status != HTTPStatus.UNPROCESSABLE_ENTITY:
            raise
        raise_conflict(f"what was recorded cannot be simulated: {error.detail}")


def _load_period(store: ServiceStore, now_s: float) -> RecordedPeriod:
    """Return what was recorded in the last days. Raises a 409 if that is not enough to simulate."""
    snapshot, from_s = store.load().snapshot, now_s - DAYS * DAY_S
    ended = store.find_ended_jobs(JobQuery(since_s=from_s), after=None, limit=JOBS_MAX)
    jobs = {job.id: job for job in (*ended, *snapshot.jobs.values())}
    readings = {name: store.list_readings(name, since_s=from_s) for name in snapshot.pools}
    try:
        return build_recorded_period(snapshot, jobs.values(), readings, from_s=from_s)
    except ValueError as error:
        raise_conflict(str(error))


def _list_newest(store: ServiceStore) -> tuple[SimulationTask, ...]:
    return store.simulations.list_tasks(limit=_TASKS_MAX, owner_id=COMPARISON_OWNER_ID)


def _comparison_view(task: SimulationTask, store: ServiceStore) -> ComparisonView:
    report = store.simulations.get_report(task.id) if task.state is TaskState.SUCCEEDED else None
    return {
        "id": task.id,
        "state": task.state,
        "reason": task.reason,
        "from_s": task.created_at_s - DAYS * DAY_S,
        "created_at_s": task.created_at_s,
        "ended_at_s": task.ended_at_s,
        "progress": progress_view(task),
        "differences": task.description.splitlines()[1:],
        "outcomes": [] if report is None else [_outcome_view(each) for each in report["policies"]],
    }


def _outcome_view(report: dict[str, Any]) -> ComparedOutcomeView:
    """Return one policy set's part of what `ebbtide simulate -o json` prints."""
    policy = report["policy"]
    return {
        "variant": next(variant for variant, name in VARIANTS.items() if name == policy),
        "policy": policy,
        "jobs": report["jobs"],
        "completed": report["completed"],
        "jct_mean_s": report["jct_s"]["mean"],
        "jct_p95_s": report["jct_s"]["p95"],
        "waiting_mean_s": report["queueing_s"]["mean"],
        "makespan_s": report["makespan_s"],
        "loaned_gpu_hours": report["loaned_gpu_hours"],
        "idle_waiting_gpu_hours": report["idle_while_waiting_gpu_hours"],
        "lost_gpu_hours": report["lost_gpu_hours"],
        "short_ratio": report["inference_short_intervals_ratio"]["first_pass"],
    }
