"""Loans and the switches of lending as answers."""

from __future__ import annotations

from typing_extensions import TypedDict

from api.answers.page import AtSeconds
from scheduler.domain.loan import Loan, LoanState
from scheduler.domain.snapshot import Snapshot


class LoanView(TypedDict):
    """`return_by_s` is set while it is recalled: the time by which training must have left. `lent_at_s`: when training
    could first use the node; `recalled_at_s`: when the recall began that was not cancelled; null where it never was (or
    an older version wrote the loan)."""

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
