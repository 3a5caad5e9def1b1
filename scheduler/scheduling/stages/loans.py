"""Stages of decide that are about nodes: give back, recall, lend."""

from __future__ import annotations

from scheduler.domain.decisions import CancelRecall, LendNode, Reason, ReasonCode, RecallNode, ReturnNode
from scheduler.domain.fleet import Loan, LoanState, Node, NodeState, Pool, PoolKind
from scheduler.scheduling.cycle import SchedulingCycle
from scheduler.scheduling.policies.lending import LendingTarget, training_demand_gpus


def return_empty_nodes(cycle: SchedulingCycle) -> None:
    """A recalled node is home as soon as no job holds a GPU of it any more."""
    for name in sorted(cycle.snapshot.ledger.recalled):
        loan = cycle.snapshot.loans[name]
        if not cycle.snapshot.jobs_on_node(name):
            assert loan.return_by_s is not None
            early_s = loan.return_by_s - cycle.now_s
            detail = f"training has left {loan.node}, {early_s:.0f} s before its deadline"
            cycle.apply(ReturnNode(loan.node, Reason(ReasonCode.TRAINING_LEFT, detail, {"early_s": early_s})))


def recall_draining_nodes(cycle: SchedulingCycle) -> None:
    """An operator who drains a lent node wants it empty and home: only then can it be removed."""
    for name in sorted(cycle.snapshot.ledger.draining):
        loan = cycle.snapshot.loans.get(name)
        if loan is None or loan.state not in (LoanState.OFFERED, LoanState.ACTIVE):
            continue
        deadline_s = cycle.now_s + cycle.snapshot.original.pools[loan.pool].lending.return_deadline_s
        _recall_node(cycle, loan.node, deadline_s, Reason(ReasonCode.NODE_DRAINED, f"{loan.node} is being drained"))


def withdraw_expired_offers(cycle: SchedulingCycle) -> None:
    """Inference that has not left an offered node within the return deadline cannot leave it: its pods fit nowhere
    else, or nobody may disrupt them. The node would be kept from both sides for nothing."""
    for name in sorted(cycle.snapshot.ledger.offered):
        loan = cycle.snapshot.loans[name]
        if cycle.now_s >= cycle.offer_deadline_s(loan):
            gpus = cycle.snapshot.original.nodes[name].inference_gpus
            waited_s = cycle.now_s - loan.offered_at_s
            detail = f"inference still holds {gpus} GPUs of {name}, {waited_s:.0f} s after it was offered to training"
            numbers = {"inference_gpus": float(gpus), "waited_s": waited_s}
            cycle.apply(ReturnNode(name, Reason(ReasonCode.OFFER_EXPIRED, detail, numbers)))


def adjust_loans(cycle: SchedulingCycle) -> None:
    """Recall, and cancel recalls, at every tick; lend at full passes only."""
    for pool in cycle.snapshot.original.pools.values():
        if pool.kind is not PoolKind.INFERENCE:
            continue
        target = cycle.policies.lend(cycle.snapshot.original, pool, cycle.settings)
        ledger = cycle.snapshot.ledger
        standing = ledger.unrecalled_loan_counts.get(pool.name, 0)
        if standing > target.nodes:
            _recall_nodes(cycle, pool, target, standing - target.nodes)
        elif target.allows_new_loans:
            _cancel_recalls(cycle, pool, target, target.nodes - standing)
            spare = target.lasting_nodes - ledger.live_loan_counts.get(
                pool.name, 0
            )  # those on their way home are not home yet
            if cycle.full_pass and spare > 0:
                wanted = training_demand_gpus(cycle.view, cycle.settings, scales=cycle.policies.scales)
                _lend_nodes(cycle, pool, target, spare, wanted)


def _recall_nodes(cycle: SchedulingCycle, pool: Pool, target: LendingTarget, count: int) -> None:
    return_by_s = cycle.now_s + pool.lending.return_deadline_s
    for node in cycle.policies.reclaim(cycle.view, pool.name, count, cycle.settings):
        reason = Reason(ReasonCode.INFERENCE_NEEDS_NODE, target.reason.detail, target.reason.numbers)
        _recall_node(cycle, node, return_by_s, reason)


def _recall_node(cycle: SchedulingCycle, node: str, return_by_s: float, reason: Reason) -> None:
    if cycle.snapshot.loans[node].state is LoanState.OFFERED:
        cycle.apply(ReturnNode(node, reason))
    else:
        cycle.apply(RecallNode(node, return_by_s, reason))


def _cancel_recalls(cycle: SchedulingCycle, pool: Pool, target: LendingTarget, count: int) -> None:
    """Keep up to `count` nodes that are on their way home and still hold jobs.

    It takes a forecast that was made after the recall: a demand that swings about the bound from reading to reading
    must not call a node back, keep it and call it back again.
    """
    forecast = cycle.snapshot.original.forecasts.get(pool.name)
    made_at_s = forecast.made_at_s if forecast else float("-inf")
    recalled = [cycle.snapshot.loans[node] for node in sorted(cycle.snapshot.ledger.recalled)]
    leaving = [
        loan.node
        for loan in recalled
        if loan.pool == pool.name and _can_stay(cycle, loan) and made_at_s > loan.state_since_s
    ]
    for node in leaving[:count]:
        cycle.apply(CancelRecall(node, Reason(ReasonCode.FORECAST_FELL, target.reason.detail, target.reason.numbers)))


def _can_stay(cycle: SchedulingCycle, loan: Loan) -> bool:
    node = cycle.snapshot.original.nodes[loan.node]
    return not node.cordoned and bool(cycle.snapshot.jobs_on_node(loan.node))


def _lend_nodes(cycle: SchedulingCycle, pool: Pool, target: LendingTarget, count: int, wanted_gpus: float) -> None:
    """Lend up to `count` more nodes, those that inference uses least, and no more than training wants GPUs. An offer
    that was given up in this tick is not made again in it."""
    on_loan = {
        loan.node for loan in cycle.snapshot.loans.values() if loan.is_live
    } | cycle.snapshot.original.index.offered
    idle = [
        node for node in cycle.snapshot.original.nodes.values() if node.name not in on_loan and _is_lendable(node, pool)
    ]
    idle.sort(key=lambda node: (node.inference_gpus, node.name))
    for node in idle[:count]:
        if wanted_gpus <= 0:
            break
        cycle.apply(LendNode(node.name, target.reason))
        wanted_gpus -= node.gpus


def _is_lendable(node: Node, pool: Pool) -> bool:
    return node.pool == pool.name and node.state is NodeState.UP and not node.cordoned
