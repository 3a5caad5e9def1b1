"""Loans, and the switches with which operators stop lending."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from api.answers.loan import LoanView, SwitchesView, loan_view, switches_view
from api.answers.page import PageOf
from api.dependencies import Limit, WorldDep
from api.errors import refuse
from scheduler.domain.command import PauseLending, RecallAll, ResumeLending
from scheduler.domain.loan import LoanState

router = APIRouter(prefix="/v1", tags=["lending"])


@router.get("/loans")
def list_loans(
    world: WorldDep,
    state: Annotated[str, Query(description="Only loans in these states, separated by commas.")] = "",
    pool: str = "",
    limit: Limit = 100,
) -> PageOf[LoanView]:
    """Every live loan, then up to `limit` ended ones, the last ended first."""
    states = _states(state)
    live = sorted(world.snapshot.loans.values(), key=lambda loan: (loan.offered_at_s, loan.id))
    ended = world.store.ended_loans(limit=limit)
    wanted = [loan for loan in (*live, *ended) if pool in ("", loan.pool) and (not states or loan.state in states)]
    return {"items": [loan_view(loan) for loan in wanted], "next": None}


@router.post("/lending:pause", status_code=202)
def pause_lending(world: WorldDep) -> SwitchesView:
    """No new loans; those that run go on."""
    return switches_view(world.send(PauseLending()).snapshot)


@router.post("/lending:resume", status_code=202)
def resume_lending(world: WorldDep) -> SwitchesView:
    """Lend again."""
    return switches_view(world.send(ResumeLending()).snapshot)


@router.post("/lending:recall-all", status_code=202)
def recall_all_loans(world: WorldDep) -> SwitchesView:
    """Take every lent node back by its deadline, and lend nothing until lending is resumed."""
    return switches_view(world.send(RecallAll()).snapshot)


def _states(text: str) -> frozenset[LoanState]:
    known = {state.value: state for state in LoanState}
    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        if name not in known:
            refuse("state", name, f"one or more of {', '.join(known)}")
    return frozenset(known[name] for name in names)
