"""Apply decisions to a snapshot. The result is the desired state that executors converge to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import (
    CancelRecall,
    Decision,
    JobDecision,
    LendNode,
    NodeDecision,
    PreemptJob,
    ProposeLoan,
    RecallNode,
    RejectJob,
    ResizeJob,
    ReturnNode,
    StartJob,
    StopJob,
    SuspendRun,
)
from scheduler.domain.fleet import Loan, LoanState, build_loan_id
from scheduler.domain.gpu_sets import Gpus, RankPlacement
from scheduler.domain.job import Job
from scheduler.domain.job_state import Allocation, JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.run_times import record_run_time
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.mutable_snapshot import MutableSnapshot


def apply_decisions(snapshot: Snapshot, decisions: Iterable[Decision]) -> Snapshot:
    """Return the desired state after `decisions`, applied in order.

    Raises:
        ValueError: a decision does not fit the state in which it is applied. `find_violation` detects this first.
    """
    desired = MutableSnapshot(snapshot)
    for decision in decisions:
        apply_decision(desired, decision)
    return desired.view()


def apply_decision(snapshot: MutableSnapshot, decision: Decision) -> None:
    """Apply one legal decision."""
    if isinstance(decision, JobDecision):
        snapshot.put_job(_apply_job_decision(snapshot, snapshot.jobs[decision.job_id], decision))
    else:
        _apply_node_decision(snapshot, decision)


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """A snapshot without ended jobs and loans, and those that were removed."""

    snapshot: Snapshot
    ended_jobs: tuple[Job, ...]
    ended_loans: tuple[Loan, ...]


def archive_ended(snapshot: Snapshot) -> ArchiveResult:
    """Remove ended loans, and ended jobs whose GPUs were all observed to be free. Only the jobs' run times remain."""
    index = snapshot.index
    unsettled = index.sort_by_submission(index.unsettled)
    jobs = tuple(job for job in unsettled if job.is_ended and not job.allocation.held_gpus)
    all_live = sum(index.live_loan_counts.values()) == len(snapshot.loans)
    loans = () if all_live else tuple(loan for loan in snapshot.loans.values() if not loan.is_live)
    if not jobs and not loans:
        return ArchiveResult(snapshot, (), ())
    live_jobs, run_times = dict(snapshot.jobs), snapshot.run_times
    for job in jobs:
        del live_jobs[job.id]
        run_times = record_run_time(run_times, job, snapshot.queues, snapshot.now_s)
    live_loans = {node: loan for node, loan in snapshot.loans.items() if loan.is_live}
    live = replace(snapshot, jobs=live_jobs, loans=live_loans, run_times=run_times)
    return ArchiveResult(live, jobs, loans)


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
    """Return the job in `state`, with a new generation that releases all its GPUs."""
    allocation = retarget(job.allocation, {}, None, generation=generation, leave_by_s=leave_by_s)
    return job.transition_to(state, now_s, message=message, allocation=allocation, preemptions=preemptions)


def _apply_job_decision(snapshot: MutableSnapshot, job: Job, decision: JobDecision) -> Job:
    now_s, generation, message = snapshot.now_s, snapshot.next_generation, decision.reason.detail
    match decision:
        case StartJob(gpus=gpus, plan=plan):
            leave_by_s = job.allocation.leave_by_s if job.allocation.releasing else None
            leave_by_s = now_s if leave_by_s is None else leave_by_s
            allocation = retarget(job.allocation, gpus, plan, generation=generation, leave_by_s=leave_by_s)
            started = job.transition_to(JobState.STARTING, now_s, allocation=allocation)
            return started.with_new_plan(job.curve_correction)
        case ResizeJob(gpus=gpus, plan=plan, leave_by_s=leave_by_s, seats=seats):
            allocation = retarget(job.allocation, gpus, plan, generation=generation, leave_by_s=leave_by_s, seats=seats)
            resized = job.transition_to(JobState.RESIZING, now_s, allocation=allocation, resizes=1)
            return resized.with_new_plan(job.curve_correction)
        case PreemptJob(leave_by_s=by_s):
            return release_gpus(
                job, JobState.PREEMPTED, now_s, generation=generation, leave_by_s=by_s, message=message, preemptions=1
            )
        case SuspendRun(leave_by_s=by_s):
            return release_gpus(job, JobState.SUSPENDED, now_s, generation=generation, leave_by_s=by_s)
        case StopJob(leave_by_s=by_s):
            return release_gpus(job, JobState.CANCELLED, now_s, generation=generation, leave_by_s=by_s, message=message)
        case RejectJob():
            return job.transition_to(JobState.FAILED, now_s, message=message)


def retarget(
    allocation: Allocation,
    gpus: Gpus,
    plan: ParallelPlan | None,
    *,
    generation: int,
    leave_by_s: float,
    seats: RankPlacement = (),
) -> Allocation:
    """Return the allocation of a new generation on `gpus`. Those that it gives up are being released."""
    given_up = gpu_sets.difference(allocation.target, gpus)
    return Allocation(
        generation=allocation.next_generation,
        target=gpus,
        releasing=gpu_sets.union(allocation.releasing, given_up),
        plan=plan,
        leave_by_s=leave_by_s,
        asked_at_generation=generation,
        seats=seats,
    )


def _apply_node_decision(snapshot: MutableSnapshot, decision: NodeDecision) -> None:
    now_s, node = snapshot.now_s, decision.node
    owned, loan_id = snapshot.original.nodes[node], build_loan_id(node, snapshot.next_generation)
    new_loan = partial(Loan, loan_id, node, owned.pool, gpus=owned.loan_gpus, indices=owned.lendable_gpus)
    match decision:
        case ProposeLoan(offer_at_s=offer_at_s):
            snapshot.put_loan(new_loan(LoanState.PROPOSED, offer_at_s, now_s, proposed_at_s=now_s))
        case LendNode():
            loan = snapshot.loans.get(node)
            if loan is not None and loan.state is LoanState.PROPOSED:
                snapshot.put_loan(loan.transition_to(LoanState.OFFERED, now_s))
            else:
                snapshot.put_loan(new_loan(LoanState.OFFERED, now_s, now_s))
        case RecallNode(return_by_s=return_by_s):
            snapshot.put_loan(snapshot.loans[node].transition_to(LoanState.RECALLED, now_s, return_by_s=return_by_s))
        case CancelRecall():
            snapshot.put_loan(snapshot.loans[node].transition_to(LoanState.ACTIVE, now_s))
        case ReturnNode():
            snapshot.put_loan(snapshot.loans[node].transition_to(LoanState.RETURNED, now_s))
