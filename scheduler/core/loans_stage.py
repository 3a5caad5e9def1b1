"""Stages of decide that are about nodes: give back, recall, lend."""

from __future__ import annotations

from scheduler.core.course import Course
from scheduler.domain.decision import CancelRecall, LendNode, RecallNode, ReturnNode
from scheduler.domain.fleet import Node, NodeState, Pool, PoolKind
from scheduler.domain.loan import Loan, LoanState
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.policies.lending import LendingTarget


def return_empty_nodes(course: Course) -> None:
    """A recalled node is home as soon as no job holds a GPU of it any more."""
    for loan in list(course.draft.loans.values()):
        if loan.state is LoanState.RECALLED and not course.draft.users(loan.node):
            assert loan.return_by_s is not None
            early_s = loan.return_by_s - course.now_s
            detail = f"training has left {loan.node}, {early_s:.0f} s before its deadline"
            course.take(ReturnNode(loan.node, Reason(ReasonCode.TRAINING_LEFT, detail, {"early_s": early_s})))


def lend_or_recall(course: Course) -> None:
    """Recall, and cancel recalls, at every tick; lend at full passes only."""
    for pool in course.draft.base.pools.values():
        if pool.kind is not PoolKind.INFERENCE:
            continue
        target = course.policies.lend(course.draft.base, pool, course.settings)
        live = [loan for loan in course.draft.loans.values() if loan.pool == pool.name]
        standing = [loan for loan in live if loan.state in (LoanState.OFFERED, LoanState.ACTIVE)]
        if len(standing) > target.nodes:
            _recall(course, pool, target, len(standing) - target.nodes)
        elif target.may_grow:
            kept = _cancel_recalls(course, target, live, target.nodes - len(standing))
            if course.full_pass:
                _lend(course, pool, target, target.nodes - len(standing) - kept)


def _recall(course: Course, pool: Pool, target: LendingTarget, count: int) -> None:
    return_by_s = course.now_s + pool.lending.return_deadline_s
    for node in course.policies.reclaim(course.view, pool.name, count, course.settings):
        reason = Reason(ReasonCode.INFERENCE_NEEDS, target.reason.detail, target.reason.numbers)
        if course.draft.loans[node].state is LoanState.OFFERED:
            course.take(ReturnNode(node, reason))
        else:
            course.take(RecallNode(node, return_by_s, reason))


def _cancel_recalls(course: Course, target: LendingTarget, live: list[Loan], count: int) -> int:
    """Keep up to `count` nodes that are on their way home and still hold jobs."""
    leaving = [loan.node for loan in live if loan.state is LoanState.RECALLED and course.draft.users(loan.node)]
    for node in leaving[:count]:
        course.take(CancelRecall(node, Reason(ReasonCode.FORECAST_FELL, target.reason.detail, target.reason.numbers)))
    return len(leaving[:count])


def _lend(course: Course, pool: Pool, target: LendingTarget, count: int) -> None:
    """Lend up to `count` more nodes, those that inference uses least."""
    on_loan = {loan.node for loan in course.draft.loans.values() if loan.is_live}
    idle = [node for node in course.draft.base.nodes.values() if node.name not in on_loan and _lendable(node, pool)]
    idle.sort(key=lambda node: (node.inference_gpus, node.name))
    for node in idle[: max(0, count)]:
        course.take(LendNode(node.name, target.reason))


def _lendable(node: Node, pool: Pool) -> bool:
    return node.pool == pool.name and node.state is NodeState.UP and not node.cordoned
