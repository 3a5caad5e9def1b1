"""Stage: return, recall and lend nodes."""

from __future__ import annotations

from scheduler.domain.decisions import (
    CancelRecall,
    LendNode,
    Reason,
    ReasonCode,
    RecallChoice,
    RecallNode,
    ReturnNode,
)
from scheduler.domain.fleet import Loan, LoanState, Node, NodeState, Pool, PoolKind
from scheduler.scheduling.cycle import SchedulingCycle, StageReport
from scheduler.scheduling.policies.lending import (
    LendingTarget,
    count_wanted_gpus,
    is_unused_too_long,
    unused_loan_ends_s,
)
from scheduler.scheduling.policies.recall_selection import price_choice


def adjust_loans(cycle: SchedulingCycle) -> StageReport:
    """Return vacated nodes, then bring the loans of each inference pool to the number that the pool can spare."""
    _return_vacated_nodes(cycle)
    _recall_draining_nodes(cycle)
    _withdraw_expired_offers(cycle)
    _recall_unused_nodes(cycle)
    for pool in cycle.snapshot.original.pools.values():
        if pool.kind is PoolKind.INFERENCE:
            _adjust_pool(cycle, pool)
    return StageReport(recheck_at_s=_next_unused_recall_s(cycle))


def _return_vacated_nodes(cycle: SchedulingCycle) -> None:
    """Return recalled nodes on which no job holds GPUs any more."""
    for name in sorted(cycle.index.recalled):
        loan = cycle.snapshot.loans[name]
        if not cycle.snapshot.jobs_on_node(name):
            assert loan.return_by_s is not None
            early_s = loan.return_by_s - cycle.now_s
            detail = f"training left node {loan.node} {early_s:.0f} s before its deadline"
            cycle.apply(ReturnNode(loan.node, Reason(ReasonCode.TRAINING_LEFT, detail, {"early_s": early_s})))


def _recall_draining_nodes(cycle: SchedulingCycle) -> None:
    """Recall lent nodes that an operator drains, because only a returned node can be removed."""
    for name in sorted(cycle.index.draining):
        loan = cycle.snapshot.loans.get(name)
        if loan is None or loan.state not in (LoanState.OFFERED, LoanState.ACTIVE):
            continue
        deadline_s = cycle.now_s + cycle.snapshot.original.pools[loan.pool].lending.return_deadline_s
        _recall_node(cycle, loan.node, deadline_s, Reason(ReasonCode.NODE_DRAINED, f"draining node {loan.node}"))


def _withdraw_expired_offers(cycle: SchedulingCycle) -> None:
    """Withdraw offers of nodes that inference has not left within the return deadline.

    Its pods fit nowhere else, or must not be disrupted. Until then neither side can use the free GPUs of the node.
    """
    for name in sorted(cycle.index.offered):
        loan = cycle.snapshot.loans[name]
        if cycle.now_s >= cycle.offer_deadline_s(loan):
            gpus = cycle.snapshot.original.nodes[name].inference_gpus
            waited_s = cycle.now_s - loan.offered_at_s
            detail = f"inference still holds {gpus} GPUs of node {name} {waited_s:.0f} s after it was offered"
            numbers = {"inference_gpus": float(gpus), "waited_s": waited_s}
            cycle.apply(ReturnNode(name, Reason(ReasonCode.OFFER_EXPIRED, detail, numbers)))


def _recall_unused_nodes(cycle: SchedulingCycle) -> None:
    """Give back nodes that no job has used for the shortest worthwhile loan."""
    for name, loan in sorted(cycle.snapshot.loans.items()):
        pool = cycle.snapshot.original.pools[loan.pool]
        if loan.state is LoanState.ACTIVE and is_unused_too_long(loan, pool, cycle.settings, cycle.now_s):
            assert loan.unused_since_s is not None
            unused_s = cycle.now_s - loan.unused_since_s
            detail = f"no job has used node {name} for {unused_s:.0f} s"
            reason = Reason(ReasonCode.UNUSED_BY_TRAINING, detail, {"unused_s": unused_s})
            _recall_node(cycle, name, cycle.now_s + pool.lending.return_deadline_s, reason)


def _next_unused_recall_s(cycle: SchedulingCycle) -> float:
    """Return when the next unused node goes back if no job uses it until then. Infinite without one."""
    pools = cycle.snapshot.original.pools
    return min(
        (
            unused_loan_ends_s(loan, pools[loan.pool], cycle.settings)
            for loan in cycle.snapshot.loans.values()
            if loan.state is LoanState.ACTIVE
        ),
        default=float("inf"),
    )


def _adjust_pool(cycle: SchedulingCycle, pool: Pool) -> None:
    """Recall nodes, or cancel recalls, in every tick. Lend nodes in full passes only.

    A cordoned node that goes back is of no use to inference, so the pool can then lend less.
    """
    target = cycle.policies.lend(cycle.view, pool, cycle.settings)
    lent = cycle.index.unrecalled_loan_counts.get(pool.name, 0)
    if lent > target.nodes:
        while lent > target.nodes:
            _recall_nodes(cycle, pool, target, lent - target.nodes)
            still_lent = cycle.index.unrecalled_loan_counts.get(pool.name, 0)
            if still_lent == lent:
                return
            lent, target = still_lent, cycle.policies.lend(cycle.view, pool, cycle.settings)
    elif target.allows_new_loans:
        _cancel_recalls(cycle, pool, target, target.nodes - lent)
        spare = target.lasting_nodes - cycle.index.live_loan_counts.get(pool.name, 0)  # recalled nodes still count
        if cycle.full_pass and spare > 0:
            _lend_nodes(cycle, pool, target, spare)


def _recall_nodes(cycle: SchedulingCycle, pool: Pool, target: LendingTarget, count: int) -> None:
    return_by_s = cycle.now_s + pool.lending.return_deadline_s
    nodes = cycle.policies.reclaim(cycle.view, pool.name, count, cycle.settings)
    choice = price_choice(cycle.view, pool.name, nodes, cycle.settings)
    for node in nodes:
        reason = Reason(ReasonCode.INFERENCE_NEEDS_NODE, target.reason.detail, target.reason.numbers)
        _recall_node(cycle, node, return_by_s, reason, choice)


def _recall_node(
    cycle: SchedulingCycle, node: str, return_by_s: float, reason: Reason, choice: RecallChoice | None = None
) -> None:
    if cycle.snapshot.loans[node].state is LoanState.OFFERED:
        cycle.apply(ReturnNode(node, reason))
    else:
        cycle.apply(RecallNode(node, return_by_s, reason, choice))


def _cancel_recalls(cycle: SchedulingCycle, pool: Pool, target: LendingTarget, count: int) -> None:
    """Cancel the recall of up to `count` nodes on which jobs still run.

    The forecast must be newer than the recall. Otherwise a demand that varies around the bound would recall a node and
    cancel the recall again and again.
    """
    forecast = cycle.snapshot.original.forecasts.get(pool.name)
    made_at_s = forecast.made_at_s if forecast else float("-inf")
    recalled = [cycle.snapshot.loans[node] for node in sorted(cycle.index.recalled)]
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


def _lend_nodes(cycle: SchedulingCycle, pool: Pool, target: LendingTarget, count: int) -> None:
    """Lend up to `count` nodes, those that inference uses least first, as long as jobs could use their GPUs.

    An offer that was withdrawn in this tick is not repeated in it.
    """
    on_loan = {loan.node for loan in cycle.snapshot.loans.values() if loan.is_live}
    on_loan |= cycle.snapshot.original.index.offered
    idle = [
        node for node in cycle.snapshot.original.nodes.values() if node.name not in on_loan and _is_lendable(node, pool)
    ]
    idle.sort(key=lambda node: (node.inference_gpus, node.name))
    wanted_gpus: dict[str, float] = {}
    for node in idle:
        if node.gpu not in wanted_gpus:
            scales, mixes = cycle.policies.scales, cycle.policies.deal_nodes is not None
            wanted_gpus[node.gpu] = count_wanted_gpus(cycle.view, node.gpu, cycle.settings, scales=scales, mixes=mixes)
        if wanted_gpus[node.gpu] > 0 and count > 0:
            cycle.apply(LendNode(node.name, target.reason))
            wanted_gpus[node.gpu] -= node.gpus
            count -= 1


def _is_lendable(node: Node, pool: Pool) -> bool:
    return node.pool == pool.name and node.state is NodeState.UP and not node.cordoned
