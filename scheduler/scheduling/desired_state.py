"""apply: decisions become the desired state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

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
)
from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.gpu_sets import Gpus, RankPlacement
from scheduler.domain.job import Job
from scheduler.domain.job_state import Allocation, JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.mutable_snapshot import MutableSnapshot


def apply_decisions(snapshot: Snapshot, decisions: Iterable[Decision]) -> Snapshot:
    """The desired state after `decisions`, in their order.

    Raises:
        ValueError: a decision does not fit the state it meets (`illegal` finds that out first).
    """
    draft = MutableSnapshot(snapshot)
    for decision in decisions:
        apply_decision(draft, decision)
    return draft.view()


def apply_decision(snapshot: MutableSnapshot, decision: Decision) -> None:
    """Apply one decision to a draft."""
    if isinstance(decision, JobDecision):
        snapshot.put_job(_apply_job_decision(snapshot, snapshot.jobs[decision.job_id], decision))
    else:
        _apply_node_decision(snapshot, decision)


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """A snapshot without what has ended, and what was taken out of it."""

    snapshot: Snapshot
    ended_jobs: tuple[Job, ...]
    ended_loans: tuple[Loan, ...]


def archive_ended(snapshot: Snapshot) -> ArchiveResult:
    """Take out ended loans, and jobs that have ended and whose last GPU was seen free."""
    ledger = snapshot.index
    jobs = tuple(
        job for job in ledger.sort_by_submission(ledger.unsettled) if job.is_ended and not job.allocation.held_gpus
    )
    all_live = sum(ledger.live_loan_counts.values()) == len(snapshot.loans)
    loans = () if all_live else tuple(loan for loan in snapshot.loans.values() if not loan.is_live)
    if not jobs and not loans:
        return ArchiveResult(snapshot, (), ())
    kept = dict(snapshot.jobs)
    for job in jobs:
        del kept[job.id]
    live = {node: loan for node, loan in snapshot.loans.items() if loan.is_live}
    return ArchiveResult(replace(snapshot, jobs=kept, loans=live), jobs, loans)


def release_gpus(
    job: Job,
    state: JobState,
    now_s: float,
    *,
    generation: int,
    leave_by_s: float,
    message: str = "",
    preemptions: int = 0,
) -> Job:
    """The job in `state` without a target: all it held is being released, and a new generation says so."""
    allocation = _retarget(job.allocation, {}, None, generation=generation, leave_by_s=leave_by_s)
    return job.transition_to(state, now_s, message=message, allocation=allocation, preemptions=preemptions)


def _apply_job_decision(snapshot: MutableSnapshot, job: Job, decision: JobDecision) -> Job:
    now_s, generation, message = snapshot.now_s, snapshot.next_generation, decision.reason.detail
    match decision:
        case StartJob(gpus=gpus, plan=plan):
            leaving = job.allocation.leave_by_s if job.allocation.releasing else None
            leave_by_s = now_s if leaving is None else leaving
            allocation = _retarget(job.allocation, gpus, plan, generation=generation, leave_by_s=leave_by_s)
            return job.transition_to(JobState.STARTING, now_s, allocation=allocation).with_new_plan()
        case ResizeJob(gpus=gpus, plan=plan, leave_by_s=leave_by_s, seats=seats):
            kept = job.allocation
            allocation = _retarget(kept, gpus, plan, generation=generation, leave_by_s=leave_by_s, seats=seats)
            return job.transition_to(JobState.RESIZING, now_s, allocation=allocation, resizes=1).with_new_plan()
        case PreemptJob(leave_by_s=by_s):
            state = JobState.PREEMPTED
            return release_gpus(
                job, state, now_s, generation=generation, leave_by_s=by_s, message=message, preemptions=1
            )
        case SuspendRun(leave_by_s=by_s):
            return release_gpus(job, JobState.SUSPENDED, now_s, generation=generation, leave_by_s=by_s)
        case StopJob(leave_by_s=by_s):
            return release_gpus(job, JobState.CANCELLED, now_s, generation=generation, leave_by_s=by_s, message=message)
        case RejectJob():
            return job.transition_to(JobState.FAILED, now_s, message=message)


def _retarget(
    allocation: Allocation,
    gpus: Gpus,
    plan: ParallelPlan | None,
    *,
    generation: int,
    leave_by_s: float,
    seats: RankPlacement = (),
) -> Allocation:
    left = gpu_sets.difference(allocation.target, gpus)
    return Allocation(
        generation=allocation.generation + 1,
        target=gpus,
        releasing=gpu_sets.union(allocation.releasing, left),
        plan=plan,
        leave_by_s=leave_by_s,
        asked_at_generation=generation,
        seats=seats,
    )


def _apply_node_decision(
    snapshot: MutableSnapshot, decision: LendNode | RecallNode | CancelRecall | ReturnNode
) -> None:
    now_s, node = snapshot.now_s, decision.node
    match decision:
        case LendNode():
            loan_id = f"{node}-{snapshot.next_generation}"
            pool = snapshot.original.nodes[node].pool
            snapshot.put_loan(Loan(loan_id, node, pool, LoanState.OFFERED, now_s, now_s))
        case RecallNode(return_by_s=return_by_s):
            snapshot.put_loan(snapshot.loans[node].transition_to(LoanState.RECALLED, now_s, return_by_s=return_by_s))
        case CancelRecall():
            snapshot.put_loan(snapshot.loans[node].transition_to(LoanState.ACTIVE, now_s))
        case ReturnNode():
            snapshot.put_loan(snapshot.loans[node].transition_to(LoanState.RETURNED, now_s))
