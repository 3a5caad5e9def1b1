"""The whole fleet at a glance and who waits why, for the console and whoever wants to look without asking ten
questions."""

from __future__ import annotations

from collections import Counter, defaultdict
from heapq import nsmallest
from typing import Annotated

from fastapi import Query, Request

from api.answers.loan import switches_view
from api.answers.overview import (
    OverviewView,
    PoolGlance,
    WaitingView,
    pool_glance,
    waiting_job,
    waiting_job_view,
)
from api.answers.queue import queue_view
from api.dependencies import ServiceDep, WorldDep
from api.glances import Glances
from api.identity.principal import Role
from api.reasons import Reasons
from api.routing import noun_router
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import WAITING
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.quota import queue_uses
from scheduler.store.queries import place_of_job

router = noun_router("fleet")

WAITING_SHOWN = 10
KnownGeneration = Annotated[
    int | None,
    Query(ge=0, lt=2**63, description="Of an earlier answer: only nodes that have changed since are told."),
]


@router.get("/overview")
def get_overview(
    world: WorldDep, service: ServiceDep, request: Request, generation: KnownGeneration = None
) -> OverviewView:
    """Pools, nodes, queues, loans and live jobs as counts. With the `generation` of an earlier answer it tells of
    nodes only what has changed since, where that is still known."""
    snapshot, sight = world.committed, world.sight
    glances = request.app.state.glances
    assert isinstance(glances, Glances)
    changes = glances.since(generation, snapshot)
    sees_all = sight.is_whole
    seen = [job for job in snapshot.jobs.values() if not job.is_ended and (sees_all or sight.job(job))]
    uses = queue_uses(snapshot)
    return {
        "generation": snapshot.generation,
        "now_s": world.now_s,
        "complete": changes.complete,
        "leader": service.has_leader,
        "pools": _pools(snapshot),
        "nodes": changes.nodes,
        "gone": changes.gone,
        "queues": [queue_view(use) for name, use in uses.items() if world.principal.may(Role.VIEWER, name)],
        "waiting": [waiting_job(job) for job in nsmallest(WAITING_SHOWN, filter(_waits, seen), key=place_of_job)],
        "jobs": dict(Counter(job.state.value for job in seen)),
        "loans": dict(Counter(loan.state.value for loan in snapshot.loans.values() if loan.is_live)),
        "switches": switches_view(world.snapshot),
        "newest_event": service.store.newest_event(),
    }


@router.get("/waiting")
def list_waiting(
    world: WorldDep, request: Request, limit: Annotated[int, Query(ge=1, le=100)] = WAITING_SHOWN
) -> WaitingView:
    """The jobs that have waited longest, each with the reason in words, and how many wait for which reason. It may be
    of a state shortly before the newest."""
    reasons = request.app.state.reasons
    assert isinstance(reasons, Reasons)
    told, sight = reasons.look(world.committed), world.sight
    waiting = [job for job in told.snapshot.jobs.values() if _waits(job) and (sight.is_whole or sight.job(job))]
    longest = nsmallest(limit, waiting, key=place_of_job)
    codes = (told.reasons[job.id].code.value for job in waiting if job.id in told.reasons)
    items = [waiting_job_view(job, told.explained(job.id)) for job in longest]
    view: WaitingView = {"generation": told.snapshot.generation, "reasons": dict(Counter(codes)), "items": items}
    return world.redacted(view)


def _waits(job: Job) -> bool:
    return job.state in WAITING and job.intent is Intent.RUN


def _pools(snapshot: Snapshot) -> list[PoolGlance]:
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for node in snapshot.nodes.values():
        sizes[node.pool].append(node.gpus)
    return [pool_glance(pool, snapshot, sizes[name]) for name, pool in sorted(snapshot.pools.items())]
