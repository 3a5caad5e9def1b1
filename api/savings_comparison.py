"""Comparison of the service's policy set with "no lending" and "no elasticity", by simulation of recorded jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from http import HTTPStatus
from typing import Annotated, Any, cast

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from api.http.csv_tables import CSV_RESPONSES, format_csv, format_iso_time, respond_with_csv, wants_csv
from api.http.dependencies import PrincipalDep, Service, ServiceDep, StoreDep, create_router
from api.http.errors import ProblemError, problem_responses, raise_conflict
from api.identity.audit import declare_audited, new_audit_entry
from api.identity.authorization import VIEWER_OF_ALL, RouteRule, requires
from api.identity.principals import Principal, Role
from api.simulations import SimulationProgressView, count_jobs, new_simulation_id, progress_view
from api.usage import AcceptHeader, FormParameter, SinceParameter, UntilParameter, read_period
from scheduler.domain.savings_comparison import (
    COMPARED_POLICIES,
    COMPARISON_OWNER_ID,
    COMPARISON_TITLE,
    DAY_S,
    POLICY_BY_VARIANT,
    RECORDED_S,
    ComparedOutcome,
    DailyComparison,
    Variant,
    read_outcomes,
)
from scheduler.domain.simulation_task import LIVE_TASK_STATES, SimulationTask, TaskState
from scheduler.simulator.daily_comparison import load_recorded_period
from scheduler.simulator.recorded_period import NothingRecordedError, RecordedPeriod
from scheduler.store.api_protocol import ServiceStore

_TASKS_MAX = 20


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
    needed = POLICY_BY_VARIANT[Variant.TODAY]
    if service.policies.name != needed:
        raise_conflict(
            f"the comparison needs the policy set {needed}, and this service uses {service.policies.name}. "
            "Compare other policy sets with `ebbtide simulate`"
        )
    task = _start(service, store, principal)
    return _comparison_view(task, store)


def _start(service: Service, store: ServiceStore, principal: Principal) -> SimulationTask:
    now_s = service.clock.now_s()
    period = _load_period(store, now_s)
    policies = COMPARED_POLICIES
    task = SimulationTask(
        id=new_simulation_id(),
        owner=principal.name,
        owner_id=COMPARISON_OWNER_ID,
        created_at_s=now_s,
        policies=policies,
        seed=0,
        jobs_total=_count_jobs(period, policies, service) * len(policies),
        description="\n".join((COMPARISON_TITLE, *period.differences)),
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
    try:
        return load_recorded_period(store, now_s)
    except NothingRecordedError as error:
        raise_conflict(str(error))


def _list_newest(store: ServiceStore) -> tuple[SimulationTask, ...]:
    return store.simulations.list_tasks(limit=_TASKS_MAX, owner_id=COMPARISON_OWNER_ID)


def _comparison_view(task: SimulationTask, store: ServiceStore) -> ComparisonView:
    report = store.simulations.get_report(task.id) if task.state is TaskState.SUCCEEDED else None
    return {
        "id": task.id,
        "state": task.state,
        "reason": task.reason,
        "from_s": task.created_at_s - RECORDED_S,
        "created_at_s": task.created_at_s,
        "ended_at_s": task.ended_at_s,
        "progress": progress_view(task),
        "differences": task.description.splitlines()[1:],
        "outcomes": [] if report is None else [_outcome_view(each) for each in read_outcomes(report)],
    }


def _outcome_view(outcome: ComparedOutcome) -> ComparedOutcomeView:
    return cast("ComparedOutcomeView", asdict(outcome))


class DayState(StrEnum):
    """State of a day: that of its comparison, or MISSING."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SKIPPED = "skipped"
    MISSING = "missing"


class ComparedDayView(TypedDict):
    """The comparison that the leader made on one day, of the jobs that were submitted in the seven days before."""

    day: Annotated[int, Field(description="Start of a calendar date, in seconds since 1970 (UTC).")]
    state: Annotated[
        DayState,
        Field(
            description="`running`, `succeeded`, `failed`, `skipped` (there was nothing to compare), or `missing` (no "
            "controller led for long enough on that day)."
        ),
    ]
    reason: Annotated[str, Field(description="Why it failed, was skipped or is missing. Empty: none of these.")]
    from_s: Annotated[
        float | None, Field(description="Start of the recorded time, in seconds since 1970 (UTC). Null: missing.")
    ]
    to_s: Annotated[
        float | None, Field(description="End of the recorded time, in seconds since 1970 (UTC). Null: missing.")
    ]
    ended_at_s: Annotated[
        float | None, Field(description="When its state was final, in seconds since 1970 (UTC). Null: not yet.")
    ]
    differences: Annotated[
        list[str], Field(description="Differences between the simulated and the recorded cluster, as sentences.")
    ]
    outcomes: Annotated[
        list[ComparedOutcomeView], Field(description="Results by variant. Empty unless it has succeeded.")
    ]


class ComparedDaysView(TypedDict):
    """Daily comparisons, oldest first. They are estimates, not measurements."""

    is_enabled: Annotated[bool, Field(description="Whether new ones are made, by EBBTIDE_DAILY_COMPARISON.")]
    items: Annotated[
        list[ComparedDayView], Field(description="One entry per day from the first comparison to the last one.")
    ]


@router.get("/days", response_model=ComparedDaysView, responses=CSV_RESPONSES)
@requires(VIEWER_OF_ALL)
def list_compared_days(
    service: ServiceDep,
    store: StoreDep,
    *,
    since: SinceParameter = "",
    until: UntilParameter = "",
    form: FormParameter = "",
    accept: AcceptHeader = "",
) -> ComparedDaysView | Response:
    """List the comparisons that the leader made, one per day. Days without one are listed with the state `missing`."""
    period = read_period(service, since, until)
    found = store.comparisons.list_days(from_s=period.from_s, to_s=period.to_s)
    view: ComparedDaysView = {"is_enabled": service.settings.daily_comparison, "items": _list_days(found)}
    return respond_with_csv(_days_csv(view), "savings-comparisons.csv") if wants_csv(form, accept) else view


_MISSING = "no controller led for long enough on this day, or the daily comparison was off"


def _list_days(found: Sequence[DailyComparison]) -> list[ComparedDayView]:
    by_day = {each.day_s: each for each in found}
    days = range(min(by_day), max(by_day) + 1, DAY_S) if by_day else ()
    return [_day_view(day_s, by_day.get(day_s)) for day_s in days]


def _day_view(day_s: int, comparison: DailyComparison | None) -> ComparedDayView:
    return {
        "day": day_s,
        "state": DayState.MISSING if comparison is None else DayState(comparison.state.value),
        "reason": _MISSING if comparison is None else comparison.reason,
        "from_s": None if comparison is None else comparison.from_s,
        "to_s": None if comparison is None else comparison.to_s,
        "ended_at_s": None if comparison is None else comparison.ended_at_s,
        "differences": [] if comparison is None else list(comparison.differences),
        "outcomes": [] if comparison is None else [_outcome_view(each) for each in comparison.outcomes],
    }


_CSV_FIGURES = tuple(name for name in ComparedOutcomeView.__annotations__ if name not in ("variant", "policy"))


def _days_csv(view: ComparedDaysView) -> str:
    """Return one row per day and variant; a day without results has one row without a variant."""
    rows = []
    for day in view["items"]:
        date = format_iso_time(day["day"])
        rows += [[date, day["state"].value, "", *("" for _ in _CSV_FIGURES)]] if not day["outcomes"] else []
        for outcome in day["outcomes"]:
            values = cast("dict[str, Any]", outcome)
            rows.append([date, day["state"].value, outcome["variant"], *(f"{values[name]:g}" for name in _CSV_FIGURES)])
    return format_csv(["day", "state", "variant", *_CSV_FIGURES], rows)
