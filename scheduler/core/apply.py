"""apply: decisions become the desired state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from scheduler.core.draft import Draft
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.allocation import Allocation
from scheduler.domain.decision import (
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
from scheduler.domain.gpus import Gpus, Seats
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.loan import Loan, LoanState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.snapshot import Snapshot


def apply(snapshot: Snapshot, decisions: Iterable[Decision]) -> Snapshot:
    """The desired state after `decisions`, in their order.

    Raises:
        ValueError: a decision does not fit the state it meets (`illegal` finds that out first).
    """
    draft = Draft(snapshot)
    for decision in decisions:
        take(draft, decision)
    return draft.view()


def take(draft: Draft, decision: Decision) -> None:
    """Apply one decision to a draft."""
    if isinstance(decision, JobDecision):
        draft.put_job(_decided(draft, draft.jobs[decision.job_id], decision))
    else:
        _move_loan(draft, decision)


@dataclass(frozen=True, slots=True)
class Archived:
    """A snapshot without what has ended, and what was taken out of it."""

    snapshot: Snapshot
    ended_jobs: tuple[Job, ...]
    ended_loans: tuple[Loan, ...]


def archive(snapshot: Snapshot) -> Archived:
    """Take out ended loans, and jobs that have ended and whose last GPU was seen free."""
    ledger = snapshot.ledger
    jobs = tuple(job for job in ledger.ordered(ledger.unsettled) if job.is_ended and not job.allocation.held_gpus)
    all_live = sum(ledger.away.values()) == len(snapshot.loans)
    loans = () if all_live else tuple(loan for loan in snapshot.loans.values() if not loan.is_live)
    if not jobs and not loans:
        return Archived(snapshot, (), ())
    kept = dict(snapshot.jobs)
    for job in jobs:
        del kept[job.id]
    live = {node: loan for node, loan in snapshot.loans.items() if loan.is_live}
    return Archived(replace(snapshot, jobs=kept, loans=live), jobs, loans)


def released(
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
    return job.moved(state, now_s, message=message, allocation=allocation, preemptions=preemptions)


def _decided(draft: Draft, job: Job, decision: JobDecision) -> Job:
    now_s, generation, message = draft.now_s, draft.next_generation, decision.reason.detail
    match decision:
        case StartJob(gpus=gpus, plan=plan):
            leaving = job.allocation.leave_by_s if job.allocation.releasing else None
            leave_by_s = now_s if leaving is None else leaving
            allocation = _retarget(job.allocation, gpus, plan, generation=generation, leave_by_s=leave_by_s)
            return job.moved(JobState.STARTING, now_s, allocation=allocation).on_new_plan()
        case ResizeJob(gpus=gpus, plan=plan, leave_by_s=leave_by_s, seats=seats):
            kept = job.allocation
            allocation = _retarget(kept, gpus, plan, generation=generation, leave_by_s=leave_by_s, seats=seats)
            return job.moved(JobState.RESIZING, now_s, allocation=allocation, resizes=1).on_new_plan()
        case PreemptJob(leave_by_s=by_s):
            state = JobState.PREEMPTED
            return released(job, state, now_s, generation=generation, leave_by_s=by_s, message=message, preemptions=1)
        case SuspendRun(leave_by_s=by_s):
            return released(job, JobState.SUSPENDED, now_s, generation=generation, leave_by_s=by_s)
        case StopJob(leave_by_s=by_s):
            return released(job, JobState.CANCELLED, now_s, generation=generation, leave_by_s=by_s, message=message)
        case RejectJob():
            return job.moved(JobState.FAILED, now_s, message=message)


def _retarget(
    allocation: Allocation,
    gpus: Gpus,
    plan: ParallelPlan | None,
    *,
    generation: int,
    leave_by_s: float,
    seats: Seats = (),
) -> Allocation:
    left = gpu_sets.minus(allocation.target, gpus)
    return Allocation(
        generation=allocation.generation + 1,
        target=gpus,
        releasing=gpu_sets.union(allocation.releasing, left),
        plan=plan,
        leave_by_s=leave_by_s,
        asked_at_generation=generation,
        seats=seats,
    )


def _move_loan(draft: Draft, decision: LendNode | RecallNode | CancelRecall | ReturnNode) -> None:
    now_s, node = draft.now_s, decision.node
    match decision:
        case LendNode():
            loan_id = f"{node}-{draft.next_generation}"
            pool = draft.base.nodes[node].pool
            draft.put_loan(Loan(loan_id, node, pool, LoanState.OFFERED, now_s, now_s))
        case RecallNode(return_by_s=return_by_s):
            draft.put_loan(draft.loans[node].moved(LoanState.RECALLED, now_s, return_by_s=return_by_s))
        case CancelRecall():
            draft.put_loan(draft.loans[node].moved(LoanState.ACTIVE, now_s))
        case ReturnNode():
            draft.put_loan(draft.loans[node].moved(LoanState.RETURNED, now_s))
