"""Decisions, violations and breaches told as events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import (
    CancelRecall,
    Decision,
    JobDecision,
    LendNode,
    PreemptJob,
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
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Breach, Violation


def decision_event(before: Snapshot, decision: Decision) -> Event:
    """`before` is the state that the decision was taken on: it says whether a resize grows or shrinks a job."""
    code, message, numbers = _describe_decision(before, decision)
    numbers = {**decision.reason.numbers, **numbers}
    return Event(before.now_s, code, decision_subject(decision), message, numbers, decision.reason.code.value)


def with_job_step(event: Event, decision: Decision, after: Snapshot) -> Event:
    """The event with where the job stands in `after`, in which the decision was applied."""
    if not isinstance(decision, JobDecision):
        return event
    return replace(event, job=job_step(after.jobs[decision.job_id], after.nodes, after.pools))


def job_step(job: Job, nodes: Mapping[str, Node], pools: Mapping[str, Pool]) -> JobStep:
    """Where the job stands now."""
    allocation, gpus, lent_gpus = job.allocation, 0, 0
    for name, indices in allocation.target.items():
        gpus += len(indices)
        if pools[nodes[name].pool].kind is PoolKind.INFERENCE:
            lent_gpus += len(indices)
    plan = "" if allocation.plan is None else allocation.plan.summarize()
    return JobStep(job.state, allocation.generation, gpus, lent_gpus, plan)


def violation_event(now_s: float, violation: Violation) -> Event:
    return Event(now_s, EventCode.DECISION_DROPPED, violation.subject, f"{violation.law}: {violation.detail}")


def breach_event(now_s: float, breach: Breach) -> Event:
    return Event(now_s, EventCode.BREACH, breach.subject, f"{breach.kind}: {breach.detail}")


def _describe_decision(before: Snapshot, decision: Decision) -> tuple[EventCode, str, dict[str, float]]:
    why = decision.reason.detail
    match decision:
        case StartJob(gpus=gpus):
            return EventCode.JOB_STARTED, why, {"gpus": float(gpu_sets.count(gpus))}
        case ResizeJob():
            return _describe_resize(before, decision)
        case PreemptJob(leave_by_s=leave_by_s):
            return EventCode.JOB_PREEMPTED, why, {"leave_by_s": leave_by_s}
        case SuspendRun(leave_by_s=leave_by_s):
            return EventCode.JOB_SUSPENDED, why, {"leave_by_s": leave_by_s}
        case StopJob():
            return EventCode.JOB_STOPPED, why, {}
        case RejectJob():
            return EventCode.JOB_REJECTED, why, {}
        case LendNode():
            return EventCode.NODE_LENT, f"{decision.node} is offered to training: {why}", {}
        case RecallNode(return_by_s=return_by_s):
            seconds = return_by_s - before.now_s
            message = f"{decision.node} has to be home in {seconds:.0f} s: {why}"
            return EventCode.NODE_RECALLED, message, {"return_by_s": return_by_s}
        case CancelRecall():
            return EventCode.NODE_RECALL_CANCELLED, f"{decision.node} may stay: {why}", {}
        case ReturnNode():
            return EventCode.NODE_RETURNED, why, {}


def _describe_resize(before: Snapshot, decision: ResizeJob) -> tuple[EventCode, str, dict[str, float]]:
    old = before.jobs[decision.job_id].allocation
    had, has = old.target_gpus, gpu_sets.count(decision.gpus)
    same = EventCode.JOB_REARRANGED if decision.gpus == old.target else EventCode.JOB_MOVED
    code = EventCode.JOB_GROWN if has > had else EventCode.JOB_SHRUNK if has < had else same
    where = gpu_sets.format_gpus(decision.gpus)
    message = (
        f"{had} -> {gpu_sets.format_gpu_count(has)} on {where} as {decision.plan.summarize()}: {decision.reason.detail}"
    )
    return code, message, {"gpus_before": float(had), "gpus": float(has), "leave_by_s": decision.leave_by_s}
