"""Loans, and the switches with which operators stop lending."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from api.dependencies import Limit, WorldDep
from api.errors import refuse
from api.views import View, loan_view
from api.world import World
from scheduler.domain.codec import encode
from scheduler.domain.command import PauseLending, RecallAll, ResumeLending
from scheduler.domain.loan import LoanState

router = APIRouter(prefix="/v1", tags=["lending"])


@router.get("/loans")
def list_loans(
    world: WorldDep,
    state: Annotated[str, Query(description="Only loans in these states, separated by commas.")] = "",
    pool: str = "",
    limit: Limit = 100,
) -> View:
    """Every live loan, then up to `limit` ended ones, the last ended first."""
    states = _states(state)
    live = sorted(world.snapshot.loans.values(), key=lambda loan: (loan.offered_at_s, loan.id))
    ended = world.store.ended_loans(limit=limit)
    wanted = [loan for loan in (*live, *ended) if pool in ("", loan.pool) and (not states or loan.state in states)]
    return {"items": [loan_view(loan) for loan in wanted], "next": None}


@router.post("/lending:pause", status_code=202)
def pause(world: WorldDep) -> View:
    """No new loans; those that run go on."""
    return _switches(world.send(PauseLending()))


@router.post("/lending:resume", status_code=202)
def resume(world: WorldDep) -> View:
    """Lend again."""
    return _switches(world.send(ResumeLending()))


@router.post("/lending:recall-all", status_code=202)
def recall_all(world: WorldDep) -> View:
    """Take every lent node back by its deadline, and lend nothing until lending is resumed."""
    return _switches(world.send(RecallAll()))


def _switches(world: World) -> View:
    live = [loan for loan in world.snapshot.loans.values() if loan.is_live]
    return {**encode(world.snapshot.switches), "live_loans": len(live)}


def _states(text: str) -> frozenset[LoanState]:
    known = {state.value: state for state in LoanState}
    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        if name not in known:
            refuse("state", name, f"one or more of {', '.join(known)}")
    return frozenset(known[name] for name in names)
