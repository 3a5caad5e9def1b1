"""Stage: return, recall and lend nodes."""

from __future__ import annotations

from scheduler.domain.decisions import (
    CancelRecall,
    LendNode,
    ProposeLoan,
    Reason,
    ReasonCode,
    RecallChoice,
    RecallNode,
    ReturnNode,
)
from scheduler.domain.fleet import Loan, LoanState, Pool, PoolKind
from scheduler.domain.shadow_lending import ShadowLending
from scheduler.domain.standby import StandbyPhase
from scheduler.scheduling.cycle import SchedulingCycle, StageReport
from scheduler.scheduling.policies.lending import (
    LendingTarget,
    demand_lost_at_s,
    is_unused_too_long,
    unused_loan_ends_s,
)
from scheduler.scheduling.policies.recall_selection import RecallNeed, price_choice
from scheduler.scheduling.stages.lendable_nodes import LoanRoom, LoanSupply
from scheduler.scheduling.stages.loan_proposals import settle_proposals
from scheduler.scheduling.stages.shadow_loans import update_shadow_loans


def adjust_loans(cycle: SchedulingCycle) -> StageReport:
    """Return vacated nodes, then bring the loans of each inference pool to the number that the pool can spare."""
    _return_vacated_nodes(cycle)
    _recall_draining_nodes(cycle)
    _recall_withheld_nodes(cycle)
    _withdraw_failed_standbys(cycle)
    _recall_overused_nodes(cycle)
    _withdraw_expired_offers(cycle)
    _recall_unused_nodes(cycle)
    supply, shadows = LoanSupply(cycle), dict[str, ShadowLending]()
    for pool in cycle.snapshot.original.pools.values():
        if pool.kind is PoolKind.INFERENCE:
            _adjust_pool(cycle, pool, supply)
            if pool.lending.is_shadow:
                target = cycle.policies.lend(cycle.view, pool, cycle.settings)
                shadows[pool.name] = update_shadow_loans(cycle, pool, target, supply.list_nodes(pool.name))
    recheck_at_s = min(_next_unused_recall_s(cycle), _next_demand_loss_s(cycle))
    return StageReport(recheck_at_s=recheck_at_s, shadows=shadows)


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


def _recall_withheld_nodes(cycle: SchedulingCycle) -> None:
    """Recall lent nodes that their owner has since excluded from lending, or lends other GPUs of."""
    index = cycle.index
    for name in sorted(index.withheld | index.outdated_loans):
        loan = cycle.snapshot.loans.get(name)
        if loan is not None and loan.is_unrecalled:
            deadline_s = cycle.now_s + cycle.snapshot.original.pools[loan.pool].lending.return_deadline_s
            detail = "is not lendable" if name in index.withheld else "has other lendable GPUs than those on loan"
            _recall_node(cycle, name, deadline_s, Reason(ReasonCode.OPERATOR_ASKED, f"node {name} {detail}"))


def _recall_overused_nodes(cycle: SchedulingCycle) -> None:
    """Take back partially lent nodes of which inference uses, or waits for, more GPUs than the loan leaves to it."""
    for name in sorted(cycle.index.overused_loans):
        loan, node = cycle.snapshot.loans[name], cycle.snapshot.original.nodes[name]
        kept = loan.count_kept_gpus(node)
        detail = f"inference needs {node.inference_gpus} GPUs of node {name}, and its loan leaves {kept}"
        numbers = {"inference_gpus": float(node.inference_gpus), "kept_gpus": float(kept)}
        deadline_s = cycle.now_s + cycle.snapshot.original.pools[loan.pool].lending.return_deadline_s
        _recall_node(cycle, name, deadline_s, Reason(ReasonCode.INFERENCE_NEEDS_NODE, detail, numbers))


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


def _withdraw_failed_standbys(cycle: SchedulingCycle) -> None:
    """Withdraw offers of nodes whose standby replicas are absent or did not become idle."""
    nodes = cycle.snapshot.original.nodes
    for name in sorted(cycle.index.offered):
        standby = nodes[name].standby
        if standby is not None and standby.phase in (StandbyPhase.ABSENT, StandbyPhase.SLEEP_FAILED):
            detail = f"no inference replica is idle on node {name}: {standby.detail}"
            cycle.apply(ReturnNode(name, Reason(ReasonCode.STANDBY_FAILED, detail)))


def _recall_unused_nodes(cycle: SchedulingCycle) -> None:
    """Give back nodes that no job has used for the shortest worthwhile loan."""
    for loan in _list_unused_loans(cycle):
        name, pool = loan.node, cycle.snapshot.original.pools[loan.pool]
        if is_unused_too_long(loan, pool, cycle.settings, cycle.now_s):
            assert loan.unused_since_s is not None
            unused_s = cycle.now_s - loan.unused_since_s
            detail = f"no job has used node {name} for {unused_s:.0f} s"
            reason = Reason(ReasonCode.UNUSED_BY_TRAINING, detail, {"unused_s": unused_s})
            _recall_node(cycle, name, cycle.now_s + pool.lending.return_deadline_s, reason)


def _next_unused_recall_s(cycle: SchedulingCycle) -> float:
    """Return when the next unused node goes back if no job uses it until then. Infinite without one."""
    pools = cycle.snapshot.original.pools
    unused = _list_unused_loans(cycle)
    return min((unused_loan_ends_s(loan, pools[loan.pool], cycle.settings) for loan in unused), default=float("inf"))


def _list_unused_loans(cycle: SchedulingCycle) -> list[Loan]:
    """Return the active loans of nodes that no job uses, by node."""
    loans = cycle.snapshot.loans.values()
    unused = (loan for loan in loans if loan.unused_since_s is not None and loan.state is LoanState.ACTIVE)
    return sorted(unused, key=lambda loan: loan.node)


def _next_demand_loss_s(cycle: SchedulingCycle) -> float:
    """Return when the demand of a pool with loans first counts as lost. Infinite without loans."""
    snapshot, lent = cycle.snapshot.original, cycle.index.unrecalled_loan_counts
    lenders = [pool for name, pool in snapshot.pools.items() if lent.get(name, 0)]
    lost_at_s = (demand_lost_at_s(pool, snapshot.demand.get(pool.name), cycle.settings) for pool in lenders)
    return min((each for each in lost_at_s if each > cycle.now_s), default=float("inf"))


def _adjust_pool(cycle: SchedulingCycle, pool: Pool, supply: LoanSupply) -> None:
    """Recall nodes, cancel recalls, or settle proposals in every tick. Lend or propose nodes in full passes only.

    A cordoned node that goes back is of no use to inference, so the pool can then lend less.
    """
    target = _find_target(cycle, pool)
    settle_proposals(cycle, pool, target)
    need = _find_excess(cycle, pool, target)
    if not need.is_met:
        while not need.is_met:
            lent = cycle.index.unrecalled_loan_counts.get(pool.name, 0)
            _recall_nodes(cycle, pool, target, need)
            if cycle.index.unrecalled_loan_counts.get(pool.name, 0) == lent:
                return
            target = _find_target(cycle, pool)
            need = _find_excess(cycle, pool, target)
    elif target.allows_new_loans:
        _cancel_recalls(cycle, pool, target)
        if cycle.full_pass:
            _lend_nodes(cycle, pool, target, supply)


def _find_excess(cycle: SchedulingCycle, pool: Pool, target: LendingTarget) -> RecallNeed:
    """Return by how much the loans that are not recalled exceed the target."""
    lent = cycle.index.unrecalled_loan_counts.get(pool.name, 0) - target.nodes
    return RecallNeed(max(0, lent), max(0, cycle.index.unrecalled_loan_gpus.get(pool.name, 0) - target.gpus))


def _find_target(cycle: SchedulingCycle, pool: Pool) -> LendingTarget:
    """Return the policy's target; nothing for a pool in shadow mode, whose real loans go back."""
    if pool.lending.is_shadow:
        return LendingTarget(0, False, Reason(ReasonCode.SHADOW_MODE, f"pool {pool.name} is in shadow mode"))
    return cycle.policies.lend(cycle.view, pool, cycle.settings)


def _recall_nodes(cycle: SchedulingCycle, pool: Pool, target: LendingTarget, need: RecallNeed) -> None:
    return_by_s = cycle.now_s + pool.lending.return_deadline_s
    is_lost = target.reason.code is ReasonCode.DEMAND_LOST
    code = ReasonCode.DEMAND_LOST if is_lost else ReasonCode.INFERENCE_NEEDS_NODE
    nodes = cycle.policies.reclaim(cycle.view, pool.name, need, cycle.settings)
    choice = price_choice(cycle.view, pool.name, nodes, cycle.settings)
    for node in nodes:
        reason = Reason(code, target.reason.detail, target.reason.numbers)
        _recall_node(cycle, node, return_by_s, reason, choice)


def _recall_node(
    cycle: SchedulingCycle, node: str, return_by_s: float, reason: Reason, choice: RecallChoice | None = None
) -> None:
    if cycle.snapshot.loans[node].state is LoanState.OFFERED:
        cycle.apply(ReturnNode(node, reason))
    else:
        cycle.apply(RecallNode(node, return_by_s, reason, choice))


def _cancel_recalls(cycle: SchedulingCycle, pool: Pool, target: LendingTarget) -> None:
    """Cancel recalls of nodes on which jobs still run, as far as the pool can bear their loans.

    The forecast must be newer than the recall. Otherwise a demand that varies around the bound would recall a node and
    cancel the recall again and again.
    """
    forecast = cycle.snapshot.original.forecasts.get(pool.name)
    made_at_s = forecast.made_at_s if forecast else float("-inf")
    recalled = [cycle.snapshot.loans[node] for node in sorted(cycle.index.recalled)]
    leaving = [
        cycle.snapshot.original.nodes[loan.node]
        for loan in recalled
        if loan.pool == pool.name and _can_stay(cycle, loan) and made_at_s > loan.state_since_s
    ]
    index = cycle.index
    room = LoanRoom(
        target.nodes - index.unrecalled_loan_counts.get(pool.name, 0),
        target.gpus - index.unrecalled_loan_gpus.get(pool.name, 0),
    )
    reason = Reason(ReasonCode.FORECAST_FELL, target.reason.detail, target.reason.numbers)
    for node in leaving:
        if room.take(cycle.snapshot.loans[node.name].count_gpus(node)):
            cycle.apply(CancelRecall(node.name, reason))


def _can_stay(cycle: SchedulingCycle, loan: Loan) -> bool:
    node = cycle.snapshot.original.nodes[loan.node]
    is_lendable_again = node.lendable and not node.cordoned and loan.indices == node.lendable_gpus
    has_room = not loan.is_partial or node.inference_gpus <= loan.count_kept_gpus(node)
    return is_lendable_again and has_room and bool(cycle.snapshot.jobs_on_node(loan.node))


def _lend_nodes(cycle: SchedulingCycle, pool: Pool, target: LendingTarget, supply: LoanSupply) -> None:
    """Lend nodes, those that inference has to leave least first, as long as jobs could use their GPUs.

    Recalled nodes still count as lent. A node with more GPUs than may still be lent is passed over, so that a part of
    another node can fill the rest. A pool that gives notice proposes nodes instead. An offer or a proposal that was
    withdrawn in this tick is not repeated in it.
    """
    loans, index, notice_s = cycle.snapshot.loans, cycle.snapshot.original.index, pool.lending.notice_s
    room = LoanRoom(
        target.lasting_nodes - cycle.index.live_loan_counts.get(pool.name, 0),
        target.lasting_gpus - cycle.index.live_loan_gpus.get(pool.name, 0),
    )
    for node in supply.list_nodes(pool.name) if not room.is_empty else ():
        loan = loans.get(node.name)
        is_taken = (loan is not None and loan.is_live) or node.name in index.offered or node.name in index.proposed
        if not is_taken and room.has(node.loan_gpus) and supply.wanted.take(node):
            room.take(node.loan_gpus)
            propose = ProposeLoan(node.name, cycle.now_s + notice_s, target.reason)
            cycle.apply(propose if notice_s else LendNode(node.name, target.reason))
            if room.is_empty:
                return
