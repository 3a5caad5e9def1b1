"""Stages of decide that are about nodes: give back, recall, lend."""

from __future__ import annotations

from scheduler.core.course import Course
from scheduler.domain.decision import CancelRecall, LendNode, RecallNode, ReturnNode
from scheduler.domain.fleet import Node, NodeState, Pool, PoolKind
from scheduler.domain.loan import Loan, LoanState
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.policies.lending import LendingTarget, training_wants


def return_empty_nodes(course: Course) -> None:
    """A recalled node is home as soon as no job holds a GPU of it any more."""
    for name in sorted(course.draft.ledger.recalled):
        loan = course.draft.loans[name]
        if not course.draft.users(name):
            assert loan.return_by_s is not None
            early_s = loan.return_by_s - course.now_s
            detail = f"training has left {loan.node}, {early_s:.0f} s before its deadline"
            course.take(ReturnNode(loan.node, Reason(ReasonCode.TRAINING_LEFT, detail, {"early_s": early_s})))


def recall_drained(course: Course) -> None:
    """An operator who drains a lent node wants it empty and home: only then can it be removed."""
    for name in sorted(course.draft.ledger.draining):
        loan = course.draft.loans.get(name)
        if loan is None or loan.state not in (LoanState.OFFERED, LoanState.ACTIVE):
            continue
        deadline_s = course.now_s + course.draft.base.pools[loan.pool].lending.return_deadline_s
        _call_home(course, loan.node, deadline_s, Reason(ReasonCode.NODE_DRAINED, f"{loan.node} is being drained"))


def give_up_offers(course: Course) -> None:
    """Inference that has not left an offered node within the return deadline cannot leave it: its pods fit nowhere
    else, or nobody may disrupt them. The node would be kept from both sides for nothing."""
    for name in sorted(course.draft.ledger.offered):
        loan = course.draft.loans[name]
        if course.now_s >= course.offer_ends_s(loan):
            gpus = course.draft.base.nodes[name].inference_gpus
            waited_s = course.now_s - loan.offered_at_s
            detail = f"inference still holds {gpus} GPUs of {name}, {waited_s:.0f} s after it was offered to training"
            numbers = {"inference_gpus": float(gpus), "waited_s": waited_s}
            course.take(ReturnNode(name, Reason(ReasonCode.OFFER_EXPIRED, detail, numbers)))


def lend_or_recall(course: Course) -> None:
    """Recall, and cancel recalls, at every tick; lend at full passes only."""
    for pool in course.draft.base.pools.values():
        if pool.kind is not PoolKind.INFERENCE:
            continue
        target = course.policies.lend(course.draft.base, pool, course.settings)
        ledger = course.draft.ledger
        standing = ledger.standing.get(pool.name, 0)
        if standing > target.nodes:
            _recall(course, pool, target, standing - target.nodes)
        elif target.may_grow:
            _cancel_recalls(course, pool, target, target.nodes - standing)
            spare = target.lasting_nodes - ledger.away.get(pool.name, 0)  # those on their way home are not home yet
            if course.full_pass and spare > 0:
                wanted = training_wants(course.view, course.settings, grows=course.policies.scales)
                _lend(course, pool, target, spare, wanted)


def _recall(course: Course, pool: Pool, target: LendingTarget, count: int) -> None:
    return_by_s = course.now_s + pool.lending.return_deadline_s
    for node in course.policies.reclaim(course.view, pool.name, count, course.settings):
        reason = Reason(ReasonCode.INFERENCE_NEEDS, target.reason.detail, target.reason.numbers)
        _call_home(course, node, return_by_s, reason)


def _call_home(course: Course, node: str, return_by_s: float, reason: Reason) -> None:
    if course.draft.loans[node].state is LoanState.OFFERED:
        course.take(ReturnNode(node, reason))
    else:
        course.take(RecallNode(node, return_by_s, reason))


def _cancel_recalls(course: Course, pool: Pool, target: LendingTarget, count: int) -> None:
    """Keep up to `count` nodes that are on their way home and still hold jobs.

    It takes a forecast that was made after the recall: a demand that swings about the bound from reading to reading
    must not call a node back, keep it and call it back again.
    """
    forecast = course.draft.base.forecasts.get(pool.name)
    made_at_s = forecast.made_at_s if forecast else float("-inf")
    recalled = [course.draft.loans[node] for node in sorted(course.draft.ledger.recalled)]
    leaving = [
        loan.node
        for loan in recalled
        if loan.pool == pool.name and _may_stay(course, loan) and made_at_s > loan.state_since_s
    ]
    for node in leaving[:count]:
        course.take(CancelRecall(node, Reason(ReasonCode.FORECAST_FELL, target.reason.detail, target.reason.numbers)))


def _may_stay(course: Course, loan: Loan) -> bool:
    node = course.draft.base.nodes[loan.node]
    return not node.cordoned and bool(course.draft.users(loan.node))


def _lend(course: Course, pool: Pool, target: LendingTarget, count: int, wanted_gpus: float) -> None:
    """Lend up to `count` more nodes, those that inference uses least, and no more than training wants GPUs. An offer
    that was given up in this tick is not made again in it."""
    on_loan = {loan.node for loan in course.draft.loans.values() if loan.is_live} | course.draft.base.ledger.offered
    idle = [node for node in course.draft.base.nodes.values() if node.name not in on_loan and _lendable(node, pool)]
    idle.sort(key=lambda node: (node.inference_gpus, node.name))
    for node in idle[:count]:
        if wanted_gpus <= 0:
            break
        course.take(LendNode(node.name, target.reason))
        wanted_gpus -= node.gpus


def _lendable(node: Node, pool: Pool) -> bool:
    return node.pool == pool.name and node.state is NodeState.UP and not node.cordoned
