"""Loans of inference nodes to training, and the switches that stop lending."""

from __future__ import annotations

from typing_extensions import TypedDict

from api.http.dependencies import ContextDep, LimitParameter, create_router
from api.http.paging import (
    AtSeconds,
    CursorParameter,
    PageOf,
    StatesParameter,
    TextParameter,
    page_of_loans,
    parse_states,
)
from api.identity.authorization import ADMIN, VIEWER, requires
from scheduler.domain.commands import PauseLending, RecallAll, ResumeLending
from scheduler.domain.fleet import LIVE_LOAN_STATES, Loan, LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import LoanQuery


class LoanView(TypedDict):
    """`return_by_s`: deadline for training to leave, while recalled. `lent_at_s`: when training could first use the
    node. `recalled_at_s`: start of the current recall; null if there is none or an older version wrote the loan."""

    id: str
    node: str
    pool: str
    state: LoanState
    offered_at_s: AtSeconds
    state_since_s: AtSeconds
    return_by_s: AtSeconds | None
    lent_at_s: AtSeconds | None
    recalled_at_s: AtSeconds | None
    is_live: bool


class SwitchesView(TypedDict):
    lending_paused: bool
    loans_recalled: bool
    resizes_frozen: bool
    live_loans: int


def loan_view(loan: Loan) -> LoanView:
    return {
        "id": loan.id,
        "node": loan.node,
        "pool": loan.pool,
        "state": loan.state,
        "offered_at_s": loan.offered_at_s,
        "state_since_s": loan.state_since_s,
        "return_by_s": loan.return_by_s,
        "lent_at_s": loan.lent_at_s,
        "recalled_at_s": loan.recalled_at_s,
        "is_live": loan.is_live,
    }


def switches_view(snapshot: Snapshot) -> SwitchesView:
    switches = snapshot.switches
    return {
        "lending_paused": switches.lending_paused,
        "loans_recalled": switches.loans_recalled,
        "resizes_frozen": switches.resizes_frozen,
        "live_loans": sum(loan.is_live for loan in snapshot.loans.values()),
    }


router = create_router("lending")


@router.get("/loans")
@requires(VIEWER)
def list_loans(
    context: ContextDep,
    *,
    state: StatesParameter = "",
    pool: TextParameter = "",
    node: TextParameter = "",
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[LoanView]:
    """List loans, including ended ones, newest offer first."""
    query = LoanQuery(parse_states(state, LoanState, live=LIVE_LOAN_STATES), pool, node)
    page = page_of_loans(context.snapshot.loans.values(), context.store, query, cursor=cursor, limit=limit)
    return {"items": [loan_view(loan) for loan in page["items"]], "next": page["next"]}


@router.post("/lending:pause", status_code=202)
@requires(ADMIN)
def pause_lending(context: ContextDep) -> SwitchesView:
    """Offer no new loans. Active loans continue."""
    return switches_view(context.send(PauseLending()).snapshot)


@router.post("/lending:resume", status_code=202)
@requires(ADMIN)
def resume_lending(context: ContextDep) -> SwitchesView:
    """Resume lending."""
    return switches_view(context.send(ResumeLending()).snapshot)


@router.post("/lending:recall-all", status_code=202)
@requires(ADMIN)
def recall_all_loans(context: ContextDep) -> SwitchesView:
    """Recall every lent node by its deadline, and lend nothing until lending is resumed."""
    return switches_view(context.send(RecallAll()).snapshot)
