"""Proposed loans: offer their nodes at the end of the notice, or withdraw them."""

from __future__ import annotations

from scheduler.domain.decisions import LendNode, Reason, ReasonCode, ReturnNode
from scheduler.domain.fleet import Loan, Pool
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policies.lending import LendingTarget
from scheduler.scheduling.stages.lendable_nodes import LoanRoom, WantedGpus, is_lendable


def settle_proposals(cycle: SchedulingCycle, pool: Pool, target: LendingTarget) -> None:
    """Offer proposed nodes whose notice has ended without a veto, and withdraw proposals that no longer hold.

    A node is offered in the tick in which its notice ends, full pass or not, so that the notice is as long as promised.
    The node must still be lendable then, and wanted by a job. The oldest proposals have precedence.
    """
    proposed = [loan for name in cycle.index.proposed if (loan := cycle.snapshot.loans[name]).pool == pool.name]
    if not proposed:
        return
    index, nodes, wanted = cycle.index, cycle.snapshot.original.nodes, WantedGpus(cycle, counts_proposed=False)
    gpus = {loan.node: loan.count_gpus(nodes[loan.node]) for loan in proposed}
    bearable = LoanRoom(
        target.nodes - index.unrecalled_loan_counts.get(pool.name, 0),
        target.gpus - index.unrecalled_loan_gpus.get(pool.name, 0),
    )
    lasting = LoanRoom(
        target.lasting_nodes - index.live_loan_counts.get(pool.name, 0) + len(proposed),
        target.lasting_gpus - index.live_loan_gpus.get(pool.name, 0) + sum(gpus.values()),
    )
    for loan in sorted(proposed, key=lambda loan: (loan.created_at_s, loan.node)):
        node, needed = nodes[loan.node], gpus[loan.node]
        if not is_lendable(node, cycle.now_s) or loan.indices != node.lendable_gpus:
            _withdraw(cycle, loan, f"node {loan.node} is down or cordoned, or can no longer be lent as proposed")
        elif not bearable.has(needed):
            _withdraw(cycle, loan, target.reason.detail)
        elif cycle.now_s < loan.offered_at_s:
            bearable.reserve(needed)
            lasting.reserve(needed)
        elif not target.allows_new_loans or not lasting.has(needed):
            _withdraw(cycle, loan, f"pool {pool.name} may make no new loan at the end of the notice")
        elif not wanted.take(node):
            _withdraw(cycle, loan, f"no job wants GPUs of node {loan.node} at the end of the notice")
        else:
            cycle.apply(LendNode(loan.node, target.reason))
            bearable.reserve(needed)
            lasting.reserve(needed)


def _withdraw(cycle: SchedulingCycle, loan: Loan, detail: str) -> None:
    cycle.apply(ReturnNode(loan.node, Reason(ReasonCode.NO_LONGER_LENDABLE, detail)))
