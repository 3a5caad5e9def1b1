"""What the API tells of simulations.

Simulations: hand in a trace, watch it being played, get the report. Each for whoever handed it in, and admins.
"""

from __future__ import annotations

import base64
import re
import secrets
from typing import Annotated, Any

from fastapi import Depends, Response
from typing_extensions import TypedDict

from api.http.conditional_requests import IdempotencyKeyHeader, build_creation_key, create_once
from api.http.dependencies import LimitParameter, PrincipalDep, Service, ServiceDep, SqlStoreDep, create_router
from api.http.errors import ProblemError, problem_responses, raise_conflict, raise_not_found
from api.http.paging import CursorParameter, PageOf, decode_number_cursor, encode_cursor
from api.identity.principals import Principal, Role
from scheduler.documents.document import InvalidField
from scheduler.documents.simulation import SimulationDocument, to_simulation_files
from scheduler.domain.simulation_task import SimulationFiles, SimulationTask, TaskState
from scheduler.simulator.simulation_process import validate_input_files


class SimulationProgressView(TypedDict):
    """Jobs that have ended, over all policy sets. `playing` is the policy set that is played now, empty: none is."""

    fraction: float
    jobs_done: int
    jobs_total: int
    playing: str


class SimulationView(TypedDict):
    """`state`: queued, running, succeeded, failed or cancelled. `reason` says why it failed, or waits again."""

    id: str
    owner: str
    state: str
    policies: list[str]
    seed: int
    created_at_s: float
    started_at_s: float | None
    ended_at_s: float | None
    progress: SimulationProgressView
    tries: int
    reason: str


def simulation_view(task: SimulationTask) -> SimulationView:
    return {
        "id": task.id,
        "owner": task.owner,
        "state": task.state.value,
        "policies": list(task.policies),
        "seed": task.seed,
        "created_at_s": task.created_at_s,
        "started_at_s": task.started_at_s,
        "ended_at_s": task.ended_at_s,
        "progress": {
            "fraction": 1.0 if task.state is TaskState.SUCCEEDED else task.jobs_done / task.jobs_total,
            "jobs_done": task.jobs_done,
            "jobs_total": task.jobs_total,
            "playing": task.playing,
        },
        "tries": task.tries,
        "reason": task.reason,
    }


router = create_router("simulations", prefix="/v1/simulations")

LIVE_SIMULATIONS_MAX = 50
"""Simulations of one owner that have not ended."""
_FILE_ERROR_PATTERN = re.compile(r"(?P<where>.+?): got '?(?P<value>.*?)'?; allowed: (?P<allowed>.+)", re.DOTALL)


_REPORT_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "What `ebbtide simulate -o json` prints: the seed, and one object a policy set.",
        "content": {"application/json": {"example": {"seed": 0, "policies": [{"policy": "ebbtide", "jobs": 2000}]}}},
    }
}


def _visible_task(simulation_id: str, store: SqlStoreDep, principal: PrincipalDep) -> SimulationTask:
    found = store.simulations.get_task(simulation_id)
    if found is None or not (found.owner == principal.name or principal.has_role(Role.ADMIN)):
        raise_not_found("simulation", simulation_id)
    return found


TaskDep = Annotated[SimulationTask, Depends(_visible_task)]


@router.post("", status_code=202, responses=problem_responses(409))
def create_simulation(
    document: SimulationDocument,
    service: ServiceDep,
    store: SqlStoreDep,
    principal: PrincipalDep,
    response: Response,
    *,
    key: IdempotencyKeyHeader = "",
) -> SimulationView:
    """Hand in what `ebbtide simulate` takes as files. All is read and checked at once, and played in the background.
    With an `Idempotency-Key`, asking again is safe: the answer is what the first request handed in, as it is now."""
    if not principal.has_role_anywhere(Role.SUBMITTER):
        raise ProblemError(403, "forbidden", "a simulation needs the role submitter, of any queue")
    kept = build_creation_key(key, principal, "simulation", document)

    def make() -> SimulationTask:
        if store.simulations.count_live_tasks(principal.name) >= LIVE_SIMULATIONS_MAX:
            raise_conflict(
                f"{LIVE_SIMULATIONS_MAX} simulations of {principal.name} have not ended: cancel one, or wait"
            )
        files = to_simulation_files(document)
        task = _new_task(document, principal, service, jobs=_count_jobs(files, document.policies, service))
        store.simulations.create(task, files, kept)
        return task

    task = create_once(store, kept, make, store.simulations.get_task)
    response.headers["Location"] = f"/v1/simulations/{task.id}"
    return simulation_view(task)


@router.get("")
def list_simulations(
    store: SqlStoreDep, principal: PrincipalDep, limit: LimitParameter = 100, cursor: CursorParameter = ""
) -> PageOf[SimulationView]:
    """One's own simulations, for an admin all, newest first. `next` is the cursor of the following page."""
    owner = "" if principal.has_role(Role.ADMIN) else principal.name
    before = decode_number_cursor(cursor, "simulations")
    found = store.simulations.list_tasks(limit=limit + 1, before=before, owner=owner)
    following = encode_cursor("simulations", found[limit - 1].number) if len(found) > limit else None
    return {"items": [simulation_view(each) for each in found[:limit]], "next": following}


@router.get("/{simulation_id}")
def get_simulation(task: TaskDep) -> SimulationView:
    """A simulation: its state, and how far it is."""
    return simulation_view(task)


@router.get("/{simulation_id}/report", responses={**problem_responses(409), **_REPORT_RESPONSE})
def get_simulation_report(task: TaskDep, store: SqlStoreDep) -> dict[str, Any]:
    """What `ebbtide simulate -o json` prints; 409 where it has not succeeded (yet)."""
    report = store.simulations.get_report(task.id)
    if report is None:
        said = f": {task.reason}" if task.state is TaskState.FAILED else ""
        raise_conflict(f"simulation {task.id} is {task.state}{said}; only one that succeeded has a report")
    return report


@router.delete("/{simulation_id}", status_code=202, responses=problem_responses(409))
def cancel_simulation(task: TaskDep, service: ServiceDep, store: SqlStoreDep) -> SimulationView:
    """Cancel it: its process is killed within a second or two. Cancelling again changes nothing."""
    after = store.simulations.cancel(task.id, now_s=service.clock.now_s()) or raise_not_found("simulation", task.id)
    if after.state is not TaskState.CANCELLED:
        raise_conflict(f"simulation {task.id} has ended: it {after.state}")
    return simulation_view(after)


def _new_task(document: SimulationDocument, principal: Principal, service: Service, *, jobs: int) -> SimulationTask:
    return SimulationTask(
        id=f"sim-{base64.b32encode(secrets.token_bytes(10)).decode().lower()}",
        owner=principal.name,
        created_at_s=service.clock.now_s(),
        policies=tuple(document.policies),
        seed=document.seed,
        jobs_total=jobs * len(document.policies),
    )


def _count_jobs(files: SimulationFiles, policies: list[str], service: Service) -> int:
    """How many jobs there are, or a problem: 422, or 429 while too many others are checked or solved."""
    try:
        with service.acquire_search("others are being read"):
            return validate_input_files(files, policies)
    except ValueError as wrong:
        told = _FILE_ERROR_PATTERN.fullmatch(str(wrong))
        refused = (InvalidField(told["where"], told["value"], told["allowed"]),) if told else ()
        raise ProblemError(422, "invalid-input", str(wrong), refused) from None
