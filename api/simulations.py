"""Simulations: submit a trace, follow its progress, get the report. Owners see their own simulations, admins all."""

from __future__ import annotations

import base64
import re
import secrets
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Path, Response
from pydantic import Field
from typing_extensions import TypedDict

from api.http.conditional_requests import IdempotencyKeyHeader, build_creation_key, create_once
from api.http.dependencies import LimitParameter, PrincipalDep, Service, ServiceDep, StoreDep, create_router
from api.http.errors import ProblemError, problem_responses, raise_conflict, raise_not_found
from api.http.paging import CursorParameter, PageOf, decode_number_cursor, encode_cursor
from api.identity.audit import declare_audited, new_audit_entry
from api.identity.authorization import SUBMITTER, RouteRule, requires
from api.identity.principals import Principal, Role
from scheduler.documents.document import InvalidField
from scheduler.documents.simulation import SimulationDocument, to_simulation_files
from scheduler.domain.simulation_task import SimulationFiles, SimulationTask, TaskState
from scheduler.simulator.simulation_process import validate_input_files
from scheduler.store.api_protocol import IdempotencyKey, ServiceStore


class SimulationProgressView(TypedDict):
    """Progress over all policy sets."""

    fraction: Annotated[float, Field(description="Share of jobs that have ended, 0 to 1.")]
    jobs_done: Annotated[int, Field(description="Number of jobs that have ended, counted once per policy set.")]
    jobs_total: Annotated[int, Field(description="Number of jobs in the trace times the number of policy sets.")]
    playing: Annotated[str, Field(description="Policy set that is being simulated. Empty: none.")]


class SimulationView(TypedDict):
    """A simulation that runs in the background."""

    id: Annotated[str, Field(description="Unique id that starts with `sim-`.")]
    owner: Annotated[str, Field(description="Display name of the caller that submitted it.")]
    owner_id: Annotated[str, Field(description="Stable id of that caller, as in `/v1/whoami`.")]
    state: Annotated[str, Field(description="One of queued, running, succeeded, failed and cancelled.")]
    policies: Annotated[list[str], Field(description="Names of the policy sets to compare, in order.")]
    seed: Annotated[int, Field(description="Start value of the random numbers. The same one gives the same report.")]
    created_at_s: Annotated[float, Field(description="Time of submission, in seconds since 1970 (UTC).")]
    started_at_s: Annotated[
        float | None, Field(description="Start of the latest attempt, in seconds since 1970 (UTC). Null: not yet.")
    ]
    ended_at_s: Annotated[float | None, Field(description="End, in seconds since 1970 (UTC). Null: unfinished.")]
    progress: Annotated[SimulationProgressView, Field(description="How many jobs have ended in it so far.")]
    tries: Annotated[int, Field(description="Number of attempts so far.")]
    reason: Annotated[str, Field(description="Why it failed or was queued again. Empty: neither.")]
    description: Annotated[
        str,
        Field(
            description="What a replay simulates, and how it differs from the recorded cluster, one sentence a line. "
            "Empty: files were submitted."
        ),
    ]


class SimulationSeriesView(TypedDict):
    """Time series of a simulation under one policy set: means over `step_s` seconds, at most 400 values each."""

    policy: Annotated[str, Field(description="Name of the policy set.")]
    step_s: Annotated[float, Field(description="Length of an interval in seconds. The first one starts at 0.")]
    submitting_s: Annotated[float, Field(description="Seconds from the first to the last submission.")]
    inference_gpus: Annotated[float, Field(description="GPUs of all inference pools.")]
    inference_nodes: Annotated[int, Field(description="Nodes of all inference pools.")]
    queued_jobs: Annotated[list[float], Field(description="Jobs that wait for GPUs.")]
    training_usage_ratio: Annotated[list[float], Field(description="Useful share of the GPUs of training pools.")]
    inference_usage_ratio: Annotated[list[float], Field(description="Useful share of the GPUs of inference pools.")]
    lent_nodes: Annotated[list[float], Field(description="Inference nodes on loan.")]
    demand_gpus: Annotated[list[float], Field(description="GPUs that inference needs.")]
    forecast_gpus: Annotated[list[float], Field(description="GPUs by the forecast, at each pool's quantile.")]
    jct_s: Annotated[
        list[float], Field(description="Completion times in seconds, ascending, or 100 quantiles of them.")
    ]


class SimulationChartsView(TypedDict):
    """Time series of a simulation, for charts."""

    series: Annotated[
        list[SimulationSeriesView],
        Field(description="One entry per policy set, in order. Empty: an older version has simulated it."),
    ]


def simulation_view(task: SimulationTask) -> SimulationView:
    return {
        "id": task.id,
        "owner": task.owner,
        "owner_id": task.owner_id,
        "state": task.state.value,
        "policies": list(task.policies),
        "seed": task.seed,
        "created_at_s": task.created_at_s,
        "started_at_s": task.started_at_s,
        "ended_at_s": task.ended_at_s,
        "progress": progress_view(task),
        "tries": task.tries,
        "reason": task.reason,
        "description": task.description,
    }


def progress_view(task: SimulationTask) -> SimulationProgressView:
    return {
        "fraction": 1.0 if task.state is TaskState.SUCCEEDED else task.jobs_done / task.jobs_total,
        "jobs_done": task.jobs_done,
        "jobs_total": task.jobs_total,
        "playing": task.playing,
    }


router = create_router("simulations", prefix="/v1/simulations")

LIVE_SIMULATIONS_MAX = 50
"""Unfinished simulations per owner."""
_FILE_ERROR_PATTERN = re.compile(r"(?P<where>.+?): got '?(?P<value>.*?)'?; allowed: (?P<allowed>.+)", re.DOTALL)


_REPORT_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "What `ebbtide simulate -o json` prints: the seed, and one object a policy set.",
        "content": {"application/json": {"example": {"seed": 0, "policies": [{"policy": "ebbtide", "jobs": 2000}]}}},
    }
}


SimulationIdPath = Annotated[str, Path(description="Unique id from the response to the submission.")]


def _visible_task(simulation_id: SimulationIdPath, store: StoreDep, principal: PrincipalDep) -> SimulationTask:
    found = store.simulations.get_task(simulation_id)
    if found is None or not (principal.owns(found.owner_id) or principal.has_role(Role.ADMIN)):
        raise_not_found("simulation", simulation_id)
    return found


TaskDep = Annotated[SimulationTask, Depends(_visible_task)]


@router.post("", status_code=202, responses=problem_responses(409))
@requires(RouteRule(role=Role.SUBMITTER, body_setting="simulation_body_bytes"))
def create_simulation(
    document: SimulationDocument,
    service: ServiceDep,
    store: StoreDep,
    principal: PrincipalDep,
    response: Response,
    *,
    key: IdempotencyKeyHeader = "",
) -> SimulationView:
    """Submit the files of `ebbtide simulate`. They are checked at once and simulated in the background. With an
    `Idempotency-Key`, a retry returns the simulation of the first request in its current state."""
    if not principal.has_role_anywhere(Role.SUBMITTER):
        raise ProblemError(403, "forbidden", "a simulation needs the role submitter on any queue")
    creation_key = build_creation_key(key, principal, "simulation", document)

    def create() -> SimulationTask:
        submission = Submission(to_simulation_files(document), tuple(document.policies), document.seed)
        return submit(submission, service, store, principal, creation_key)

    declare_audited()
    task = create_once(store, creation_key, create, store.simulations.get_task)
    response.headers["Location"] = f"/v1/simulations/{task.id}"
    return simulation_view(task)


@dataclass(frozen=True, slots=True)
class Submission:
    """Input files of a new simulation, its policy sets, seed and description."""

    files: SimulationFiles
    policies: tuple[str, ...]
    seed: int
    description: str = ""


def submit(
    submission: Submission, service: Service, store: ServiceStore, principal: Principal, key: IdempotencyKey | None
) -> SimulationTask:
    """Check the files and store a queued simulation with its audit entry.

    Raises:
        ProblemError: 422 for invalid files, 429 while too many searches or checks run, 409 for too many simulations.
    """
    if store.simulations.count_live_tasks(principal.subject) >= LIVE_SIMULATIONS_MAX:
        raise_conflict(f"{LIVE_SIMULATIONS_MAX} simulations of {principal.name} are unfinished. Cancel one or wait")
    jobs = count_jobs(submission.files, submission.policies, service)
    task = _new_task(submission, principal, service, jobs=jobs)
    after = {"policies": list(task.policies), "jobs": task.jobs_total, "seed": task.seed}
    audit = new_audit_entry(principal, task.created_at_s, "CreateSimulation", task.id, after=after)
    store.simulations.create(task, submission.files, key, audit=audit)
    return task


@router.get("")
@requires(SUBMITTER)
def list_simulations(
    store: StoreDep, principal: PrincipalDep, limit: LimitParameter = 100, cursor: CursorParameter = ""
) -> PageOf[SimulationView]:
    """List the caller's simulations, newest first; admins see all. `next` is the cursor of the following page."""
    owner_id = "" if principal.has_role(Role.ADMIN) else principal.subject
    before = decode_number_cursor(cursor, "simulations")
    found = store.simulations.list_tasks(limit=limit + 1, before=before, owner_id=owner_id)
    next_cursor = encode_cursor("simulations", found[limit - 1].number) if len(found) > limit else None
    return {"items": [simulation_view(task) for task in found[:limit]], "next": next_cursor}


@router.get("/{simulation_id}")
@requires(SUBMITTER)
def get_simulation(task: TaskDep) -> SimulationView:
    """Return a simulation with its progress."""
    return simulation_view(task)


@router.get("/{simulation_id}/report", responses={**problem_responses(409), **_REPORT_RESPONSE})
@requires(SUBMITTER)
def get_simulation_report(task: TaskDep, store: StoreDep) -> dict[str, Any]:
    """Return what `ebbtide simulate -o json` prints, or 409 unless the simulation has succeeded."""
    report = _read_report(task, store)
    return {name: value for name, value in report.items() if name != "series"}


@router.get("/{simulation_id}/series", responses=problem_responses(409))
@requires(SUBMITTER)
def get_simulation_series(task: TaskDep, store: StoreDep) -> SimulationChartsView:
    """Return the time series of the report's charts, or 409 unless the simulation has succeeded."""
    return {"series": _read_report(task, store).get("series", [])}


def _read_report(task: SimulationTask, store: ServiceStore) -> dict[str, Any]:
    """Return the report. Raises a 409 unless the simulation has succeeded."""
    report = store.simulations.get_report(task.id)
    if report is None:
        reason = f": {task.reason}" if task.state is TaskState.FAILED else ""
        raise_conflict(f"simulation {task.id} is {task.state}{reason}. Only a succeeded simulation has a report")
    return report


@router.delete("/{simulation_id}", status_code=202, responses=problem_responses(409))
@requires(SUBMITTER)
def cancel_simulation(task: TaskDep, service: ServiceDep, store: StoreDep, principal: PrincipalDep) -> SimulationView:
    """Cancel a simulation; its process is killed within two seconds. Cancelling again changes nothing."""
    now_s = service.clock.now_s()
    audit = new_audit_entry(principal, now_s, "CancelSimulation", task.id, before={"state": task.state.value})
    after = store.simulations.cancel(task.id, now_s=now_s, audit=audit) or raise_not_found("simulation", task.id)
    if after.state is not TaskState.CANCELLED:
        raise_conflict(f"simulation {task.id} has ended ({after.state}) and cannot be cancelled")
    return simulation_view(after)


def new_simulation_id() -> str:
    return f"sim-{base64.b32encode(secrets.token_bytes(10)).decode().lower()}"


def _new_task(submission: Submission, principal: Principal, service: Service, *, jobs: int) -> SimulationTask:
    return SimulationTask(
        id=new_simulation_id(),
        owner=principal.name,
        owner_id=principal.subject,
        created_at_s=service.clock.now_s(),
        policies=submission.policies,
        seed=submission.seed,
        jobs_total=jobs * len(submission.policies),
        description=submission.description,
    )


def count_jobs(files: SimulationFiles, policies: tuple[str, ...], service: Service) -> int:
    """Check the files and return the number of jobs.

    Raises:
        ProblemError: 422 for invalid files, 429 while too many searches or checks run.
    """
    try:
        with service.acquire_search("too many simulations are being checked"):
            return validate_input_files(files, policies)
    except ValueError as error:
        match = _FILE_ERROR_PATTERN.fullmatch(str(error))
        invalid_fields = (InvalidField(match["where"], match["value"], match["allowed"]),) if match else ()
        raise ProblemError(422, "invalid-input", str(error), invalid_fields) from None
