"""Loan: one inference node in training use, from the offer to the return."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class LoanState(StrEnum):
    OFFERED = "offered"
    ACTIVE = "active"
    RECALLED = "recalled"
    RETURNED = "returned"
    LOST = "lost"


STANDING_LOANS = frozenset({LoanState.OFFERED, LoanState.ACTIVE})
LIVE_LOANS = STANDING_LOANS | {LoanState.RECALLED}

LOAN_EDGES: dict[tuple[LoanState, LoanState], str] = {
    (LoanState.OFFERED, LoanState.ACTIVE): "the last inference pod left the node",
    (LoanState.OFFERED, LoanState.RETURNED): "inference wants the node before training used it, or cannot leave it",
    (LoanState.OFFERED, LoanState.LOST): "the node went down before training used it",
    (LoanState.ACTIVE, LoanState.RECALLED): "inference will need the node",
    (LoanState.ACTIVE, LoanState.LOST): "the node went down while lent",
    (LoanState.RECALLED, LoanState.ACTIVE): "the forecast fell again, so the recall was cancelled",
    (LoanState.RECALLED, LoanState.RETURNED): "training has left the node",
    (LoanState.RECALLED, LoanState.LOST): "the node went down before it was home",
}


@dataclass(frozen=True, slots=True)
class Loan:
    """`return_by_s` is set while RECALLED: the time by which training must have left. `lent_at_s` is when training
    could first use the node, `recalled_at_s` when the recall began that was not cancelled; both outlast the loan."""

    id: str
    node: str
    pool: str
    state: LoanState
    offered_at_s: float
    state_since_s: float
    return_by_s: float | None = None
    lent_at_s: float | None = None
    recalled_at_s: float | None = None

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_LOANS

    def moved(self, state: LoanState, now_s: float, *, return_by_s: float | None = None) -> Loan:
        """The loan in its next state.

        Raises:
            ValueError: the table of loan edges does not know the step.
        """
        if (self.state, state) not in LOAN_EDGES:
            raise ValueError(f"loan {self.id}: no step leads from {self.state} to {state}")
        lent_at_s = now_s if self.lent_at_s is None and state is LoanState.ACTIVE else self.lent_at_s
        recalled_at_s = {LoanState.ACTIVE: None, LoanState.RECALLED: now_s}.get(state, self.recalled_at_s)
        moved = replace(self, state=state, state_since_s=now_s, return_by_s=return_by_s)
        return replace(moved, lent_at_s=lent_at_s, recalled_at_s=recalled_at_s)
