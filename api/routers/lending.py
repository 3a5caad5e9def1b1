"""Loans, and the switches with which operators stop lending."""

from __future__ import annotations

from api.answers.loan import LoanView, SwitchesView, loan_view, switches_view
from api.answers.page import PageOf
from api.dependencies import Limit, WorldDep
from api.filters import States, Text, states_in
from api.paging import Cursor, page_of_loans
from api.routing import noun_router
from scheduler.domain.command import PauseLending, RecallAll, ResumeLending
from scheduler.domain.loan import LIVE_LOANS, LoanState
from scheduler.store.queries import LoanQuery

router = noun_router("lending")


@router.get("/loans")
def list_loans(
    world: WorldDep,
    *,
    state: States = "",
    pool: Text = "",
    node: Text = "",
    limit: Limit = 100,
    cursor: Cursor = "",
) -> PageOf[LoanView]:
    """Loans, those offered last first, ended ones included."""
    wanted = LoanQuery(states_in(state, LoanState, live=LIVE_LOANS), pool, node)
    page = page_of_loans(world.snapshot.loans.values(), world.store, wanted, cursor=cursor, limit=limit)
    return {"items": [loan_view(loan) for loan in page["items"]], "next": page["next"]}


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
