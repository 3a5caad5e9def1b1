"""Events for decisions, dropped decisions and breaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import (
    CancelRecall,
    Decision,
    JobDecision,
    LendNode,
    PreemptJob,
    ProposeLoan,
    ReasonCode,
    RecallNode,
    RejectJob,
    ResizeJob,
    ReturnNode,
    StartJob,
    StopJob,
    SuspendRun,
    decision_subject,
)
from scheduler.domain.events import Event, EventCode, JobStep
from scheduler.domain.fleet import LoanState, Node, Pool, PoolKind, build_loan_id
from scheduler.domain.job import Job
from scheduler.domain.recall_receipts import JobExit, RecallOutcome, RecallReceipt
from scheduler.domain.shadow_lending import ShadowLending, get_shadow
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, Violation


def decision_event(before: Snapshot, decision: Decision) -> Event:
    """Return the event of a decision. `before` is the state in which it is applied."""
    code, message, numbers = _describe_decision(before, decision)
    numbers = {**decision.reason.numbers, **numbers}
    subject = _find_loan_id(before, decision) if code in _PROPOSAL_CODES else decision_subject(decision)
    return Event(before.now_s, code, subject, message, numbers, decision.reason.code.value)


_PROPOSAL_CODES = (EventCode.LOAN_PROPOSED, EventCode.LOAN_WITHDRAWN)


def _find_loan_id(before: Snapshot, decision: Decision) -> str:
    """Return the loan that the decision begins or withdraws. A receiver of its event needs the id to veto it."""
    assert isinstance(decision, ProposeLoan | ReturnNode)
    loan = before.loans.get(decision.node)
    if isinstance(decision, ReturnNode) and loan is not None:
        return loan.id
    return build_loan_id(decision.node, before.generation + 1)


def shadow_events(now_s: float, before: Snapshot, after: Mapping[str, ShadowLending]) -> Iterator[Event]:
    """Yield an event for each pool in shadow mode that would lend more or fewer nodes than before."""
    for pool, shadow in after.items():
        nodes_before, nodes = len(get_shadow(before.shadows, pool, now_s).nodes), len(shadow.nodes)
        if nodes == nodes_before:
            continue
        gpu_hours = shadow.compute_gpu_s(now_s) / 3600.0
        listed = f": {', '.join(shadow.nodes[:8])}{', ...' if nodes > 8 else ''}" if nodes else ""
        message = (
            f"in shadow mode, pool {pool} would lend {nodes} node{'s' * (nodes != 1)}, {nodes_before} before{listed}; "
            f"{gpu_hours:.1f} GPU-hours so far"
        )
        numbers = {"nodes": float(nodes), "nodes_before": float(nodes_before), "gpu_hours": gpu_hours}
        yield Event(now_s, EventCode.SHADOW_CHANGED, pool, message, numbers, ReasonCode.SHADOW_MODE.value)


def with_job_step(event: Event, decision: Decision, after: Snapshot) -> Event:
    """Add the job's step to the event. `after` is the state with the decision applied."""
    if not isinstance(decision, JobDecision):
        return event
    return replace(event, job=job_step(after.jobs[decision.job_id], after.nodes, after.pools))


def job_step(job: Job, nodes: Mapping[str, Node], pools: Mapping[str, Pool]) -> JobStep:
    """Return a job's current state, generation, GPUs and plan, for events."""
    allocation, gpus, lent_gpus = job.allocation, 0, 0
    for name, indices in allocation.target.items():
        gpus += len(indices)
        if pools[nodes[name].pool].kind is PoolKind.INFERENCE:
            lent_gpus += len(indices)
    plan = "" if allocation.plan is None else allocation.plan.summarize()
    return JobStep(job.state, allocation.generation, gpus, lent_gpus, plan)


def violation_event(now_s: float, violation: Violation) -> Event:
    return Event(now_s, EventCode.DECISION_DROPPED, violation.subject, f"{violation.invariant}: {violation.detail}")


def breach_event(now_s: float, breach: Breach) -> Event:
    return Event(now_s, EventCode.BREACH, breach.subject, f"{breach.kind}: {breach.detail}")


def unmet_demand_events(before: Snapshot, decisions: Iterable[Decision]) -> Iterator[Event]:
    """Yield an event for each pool whose inference needs more GPUs than are not lent, and whose nodes are recalled.

    It says how many GPUs come back, and by when. `before` is the state in which the decisions are applied.
    """
    recalls: dict[str, list[RecallNode]] = {}
    for decision in decisions:
        if isinstance(decision, RecallNode):
            recalls.setdefault(before.nodes[decision.node].pool, []).append(decision)
    for pool, recalled in recalls.items():
        reading = before.demand.get(pool)
        kept = before.capacity(pool) - before.index.lent_gpus.get(pool, 0)
        if reading is None or reading.gpus <= kept:
            continue
        gpus = sum(before.loans[each.node].count_gpus(before.nodes[each.node]) for each in recalled)
        return_by_s = max(each.return_by_s for each in recalled)
        message = (
            f"inference of pool {pool} needs {reading.gpus:.1f} GPUs, but {kept} are not lent: {gpus} GPUs come back "
            f"within {return_by_s - before.now_s:.0f} s"
        )
        numbers = {"needed_gpus": reading.gpus, "kept_gpus": float(kept), "returning_gpus": float(gpus)}
        yield Event(before.now_s, EventCode.DEMAND_UNMET, pool, message, {**numbers, "return_by_s": return_by_s})


_EXIT_WORDS = {
    JobExit.MOVED: "moved",
    JobExit.SHRANK: "shrank",
    JobExit.PREEMPTED: "preempted",
    JobExit.ENDED: "ended by itself",
    JobExit.LEAVING: "already leaving",
}


def receipt_event(receipt: RecallReceipt) -> Event:
    """Return the event of a complete receipt. Its cause is the outcome."""
    assert receipt.closed_at_s is not None, "the receipt is complete"
    assert receipt.outcome is not None, "a complete receipt has an outcome"
    exits, lost_gpu_s = receipt.count_exits(), receipt.lost_gpu_s
    parts = [_describe_outcome(receipt)]
    if exits:
        parts.append("jobs: " + ", ".join(f"{count} {_EXIT_WORDS[each]}" for each, count in exits.items()))
    if lost_gpu_s:
        parts.append(f"{lost_gpu_s / 3600.0:.2f} GPU-hours of work were lost")
    numbers = {"gpus": float(receipt.gpus), "jobs": float(len(receipt.jobs)), "lost_gpu_s": lost_gpu_s}
    numbers |= {"asked_at_s": receipt.asked_at_s, "return_by_s": receipt.return_by_s, "lost_steps": receipt.lost_steps}
    numbers |= {f"jobs_{each}": float(count) for each, count in exits.items()}
    if receipt.choice is not None:
        numbers |= {"cost_gpu_s": receipt.choice.cost_gpu_s, "alternatives": float(receipt.choice.alternatives)}
    if receipt.freed_at_s is not None:
        numbers["early_s"] = receipt.return_by_s - receipt.freed_at_s
    if receipt.return_s is not None:
        numbers["return_s"] = receipt.return_s
    if receipt.serving_at_s is not None and receipt.settled_at_s is not None:
        numbers["serving_after_s"] = receipt.serving_at_s - receipt.settled_at_s
        parts.append(f"inference used it again after {numbers['serving_after_s']:.0f} s")
    message = f"recall of node {receipt.node}: {'; '.join(parts)}"
    return Event(
        receipt.closed_at_s, EventCode.RECALL_RECEIPT, receipt.node, message, numbers, cause=receipt.outcome.value
    )


def _describe_outcome(receipt: RecallReceipt) -> str:
    match receipt.outcome:
        case RecallOutcome.CANCELLED:
            return "it was cancelled"
        case RecallOutcome.LOST:
            return "the node went down before it was returned"
    assert receipt.freed_at_s is not None, "a returned node is free"
    early_s = receipt.return_by_s - receipt.freed_at_s
    return f"freed {-early_s:.1f} s after its deadline" if early_s < 0 else f"freed {early_s:.0f} s before its deadline"


def _describe_decision(before: Snapshot, decision: Decision) -> tuple[EventCode, str, dict[str, float]]:
    detail = decision.reason.detail
    match decision:
        case StartJob(gpus=gpus):
            return EventCode.JOB_STARTED, detail, {"gpus": float(gpu_sets.count(gpus))}
        case ResizeJob():
            return _describe_resize(before, decision)
        case PreemptJob(leave_by_s=leave_by_s):
            return EventCode.JOB_PREEMPTED, detail, {"leave_by_s": leave_by_s}
        case SuspendRun(leave_by_s=leave_by_s):
            return EventCode.JOB_SUSPENDED, detail, {"leave_by_s": leave_by_s}
        case StopJob():
            return EventCode.JOB_STOPPED, detail, {}
        case RejectJob():
            return EventCode.JOB_REJECTED, detail, {}
        case ProposeLoan(offer_at_s=offer_at_s):
            notice_s = offer_at_s - before.now_s
            message = f"node {decision.node} will be offered to training in {notice_s:.0f} s unless vetoed: {detail}"
            return EventCode.LOAN_PROPOSED, message, {"offer_at_s": offer_at_s}
        case LendNode():
            return EventCode.NODE_LENT, f"node {decision.node} is offered to training: {detail}", {}
        case RecallNode(return_by_s=return_by_s):
            message = f"node {decision.node} must be returned within {return_by_s - before.now_s:.0f} s: {detail}"
            return EventCode.NODE_RECALLED, message, {"return_by_s": return_by_s}
        case CancelRecall():
            return EventCode.NODE_RECALL_CANCELLED, f"the recall of node {decision.node} is cancelled: {detail}", {}
        case ReturnNode() if _is_proposed(before, decision.node):
            return EventCode.LOAN_WITHDRAWN, f"the proposal to lend node {decision.node} is withdrawn: {detail}", {}
        case ReturnNode():
            return EventCode.NODE_RETURNED, detail, {}


def _is_proposed(before: Snapshot, node: str) -> bool:
    loan = before.loans.get(node)
    return loan is not None and loan.state is LoanState.PROPOSED


def _describe_resize(before: Snapshot, decision: ResizeJob) -> tuple[EventCode, str, dict[str, float]]:
    old = before.jobs[decision.job_id].allocation
    before_gpus, gpus = old.target_gpus, gpu_sets.count(decision.gpus)
    if gpus != before_gpus:
        code = EventCode.JOB_GROWN if gpus > before_gpus else EventCode.JOB_SHRUNK
    else:
        code = EventCode.JOB_REARRANGED if decision.gpus == old.target else EventCode.JOB_MOVED
    target = f"{gpu_sets.format_gpu_count(gpus)} on {gpu_sets.format_gpus(decision.gpus)}"
    message = f"{before_gpus} -> {target} as {decision.plan.summarize()}: {decision.reason.detail}"
    return code, message, {"gpus_before": float(before_gpus), "gpus": float(gpus), "leave_by_s": decision.leave_by_s}
