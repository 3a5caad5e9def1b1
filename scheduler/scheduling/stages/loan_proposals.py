"""Proposed loans: offer their nodes at the end of the notice, or withdraw them."""

from __future__ import annotations

from scheduler.domain.decisions import LendNode, Reason, ReasonCode, ReturnNode
from scheduler.domain.fleet import Loan, Pool
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policies.lending import LendingTarget
from scheduler.scheduling.stages.lendable_nodes import WantedGpus, is_lendable


def settle_proposals(cycle: SchedulingCycle, pool: Pool, target: LendingTarget) -> None:
    """Offer proposed nodes whose notice has ended without a veto, and withdraw proposals that no longer hold.

    A node is offered in the tick in which its notice ends, full pass or not, so that the notice is as long as promised.
    The node must still be lendable then, and wanted by a job. The oldest proposals have precedence.
    """
    proposed = [loan for name in cycle.index.proposed if (loan := cycle.snapshot.loans[name]).pool == pool.name]
    if not proposed:
        return
    nodes, wanted = cycle.snapshot.original.nodes, WantedGpus(cycle, counts_proposed=False)
    unrecalled = cycle.index.unrecalled_loan_counts.get(pool.name, 0)
    in_effect = cycle.index.live_loan_counts.get(pool.name, 0) - len(proposed)
    bearable, lasting = target.nodes - unrecalled, target.lasting_nodes - in_effect
    for loan in sorted(proposed, key=lambda loan: (loan.created_at_s, loan.node)):
        if not is_lendable(nodes[loan.node], cycle.now_s):
            _withdraw(cycle, loan, f"node {loan.node} is down or cordoned, or its standby replicas cannot sleep")
        elif bearable <= 0:
            _withdraw(cycle, loan, target.reason.detail)
        elif cycle.now_s < loan.offered_at_s:
            bearable, lasting = bearable - 1, lasting - 1
        elif not target.allows_new_loans or lasting <= 0:
            _withdraw(cycle, loan, f"pool {pool.name} may make no new loan at the end of the notice")
        elif not wanted.take(nodes[loan.node]):
            _withdraw(cycle, loan, f"no job wants GPUs of node {loan.node} at the end of the notice")
        else:
            cycle.apply(LendNode(loan.node, target.reason))
            bearable, lasting = bearable - 1, lasting - 1


def _withdraw(cycle: SchedulingCycle, loan: Loan, detail: str) -> None:
    cycle.apply(ReturnNode(loan.node, Reason(ReasonCode.NO_LONGER_LENDABLE, detail)))
