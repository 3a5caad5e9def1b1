"""Simulations: hand in a trace, watch it being played, get the report. Each for whoever handed it in, and admins."""

from __future__ import annotations

import base64
import re
import secrets
from typing import Annotated, Any

from fastapi import Depends, Response

from api.answers.page import PageOf
from api.answers.simulations import SimulationView, simulation_view
from api.dependencies import Limit, PrincipalDep, Service, ServiceDep
from api.errors import ProblemError, conflict, not_found
from api.idempotency import IdempotencyKey, creation_key, make_once
from api.identity.principal import Principal, Role
from api.kept import SqlStoreDep
from api.paging import Cursor, cursor_of, number_in
from api.problems import problems
from api.routing import noun_router
from scheduler.documents.refusal import Refusal
from scheduler.documents.simulation import SimulationDocument, simulation_files
from scheduler.domain.simulation_task import SimulationFiles, SimulationTask, TaskState
from scheduler.simulator.task_files import check_files

router = noun_router("simulations", prefix="/v1/simulations")

LIVE_MAX = 50
"""Simulations of one owner that have not ended."""
_TOLD = re.compile(r"(?P<where>.+?): got '?(?P<value>.*?)'?; allowed: (?P<allowed>.+)", re.DOTALL)


_REPORTED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "What `ebbtide simulate -o json` prints: the seed, and one object a policy set.",
        "content": {"application/json": {"example": {"seed": 0, "policies": [{"policy": "ebbtide", "jobs": 2000}]}}},
    }
}


def _task(simulation_id: str, store: SqlStoreDep, principal: PrincipalDep) -> SimulationTask:
    found = store.simulations.task(simulation_id)
    if found is None or not (found.owner == principal.name or principal.may(Role.ADMIN)):
        not_found("simulation", simulation_id)
    return found


TaskDep = Annotated[SimulationTask, Depends(_task)]


@router.post("", status_code=202, responses=problems(409))
def create_simulation(
    document: SimulationDocument,
    service: ServiceDep,
    store: SqlStoreDep,
    principal: PrincipalDep,
    response: Response,
    *,
    key: IdempotencyKey = "",
) -> SimulationView:
    """Hand in what `ebbtide simulate` takes as files. All is read and checked at once, and played in the background.
    With an `Idempotency-Key`, asking again is safe: the answer is what the first request handed in, as it is now."""
    if not principal.may_somewhere(Role.SUBMITTER):
        raise ProblemError(403, "forbidden", "a simulation needs the role submitter, of any queue")
    kept = creation_key(key, principal, "simulation", document)

    def make() -> SimulationTask:
        if store.simulations.live_count(principal.name) >= LIVE_MAX:
            conflict(f"{LIVE_MAX} simulations of {principal.name} have not ended: cancel one, or wait")
        files = simulation_files(document)
        task = _new_task(document, principal, service, jobs=_checked(files, document.policies, service))
        store.simulations.create(task, files, kept)
        return task

    task = make_once(store, kept, make, store.simulations.task)
    response.headers["Location"] = f"/v1/simulations/{task.id}"
    return simulation_view(task)


@router.get("")
def list_simulations(
    store: SqlStoreDep, principal: PrincipalDep, limit: Limit = 100, cursor: Cursor = ""
) -> PageOf[SimulationView]:
    """One's own simulations, for an admin all, newest first. `next` is the cursor of the following page."""
    owner = "" if principal.may(Role.ADMIN) else principal.name
    before = number_in(cursor, "simulations")
    found = store.simulations.tasks(limit=limit + 1, before=before, owner=owner)
    following = cursor_of("simulations", found[limit - 1].number) if len(found) > limit else None
    return {"items": [simulation_view(each) for each in found[:limit]], "next": following}


@router.get("/{simulation_id}")
def get_simulation(task: TaskDep) -> SimulationView:
    """A simulation: its state, and how far it is."""
    return simulation_view(task)


@router.get("/{simulation_id}/report", responses={**problems(409), **_REPORTED})
def get_simulation_report(task: TaskDep, store: SqlStoreDep) -> dict[str, Any]:
    """What `ebbtide simulate -o json` prints; 409 where it has not succeeded (yet)."""
    report = store.simulations.report(task.id)
    if report is None:
        said = f": {task.reason}" if task.state is TaskState.FAILED else ""
        conflict(f"simulation {task.id} is {task.state}{said}; only one that succeeded has a report")
    return report


@router.delete("/{simulation_id}", status_code=202, responses=problems(409))
def cancel_simulation(task: TaskDep, service: ServiceDep, store: SqlStoreDep) -> SimulationView:
    """Cancel it: its process is killed within a second or two. Cancelling again changes nothing."""
    after = store.simulations.cancel(task.id, now_s=service.clock.now_s()) or not_found("simulation", task.id)
    if after.state is not TaskState.CANCELLED:
        conflict(f"simulation {task.id} has ended: it {after.state}")
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


def _checked(files: SimulationFiles, policies: list[str], service: Service) -> int:
    """How many jobs there are, or a problem: 422, or 429 while too many others are checked or solved."""
    try:
        with service.search("others are being read"):
            return check_files(files, policies)
    except ValueError as wrong:
        told = _TOLD.fullmatch(str(wrong))
        refused = (Refusal(told["where"], told["value"], told["allowed"]),) if told else ()
        raise ProblemError(422, "invalid-input", str(wrong), refused) from None
