"""Update a snapshot with an observation and commands. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from scheduler.domain.commands import Command
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import DemandReading, LoanState
from scheduler.domain.job import Job
from scheduler.domain.job_records import SlottedSample
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import Observation
from scheduler.domain.program import SETUP_TIMEOUT_S
from scheduler.domain.scaling_curve import LINEAR_CURVE
from scheduler.domain.snapshot import UNSOLVED_CURVE, Snapshot
from scheduler.scheduling.commands import apply_command
from scheduler.scheduling.job_progress import switch_curves
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from scheduler.scheduling.observation import mirror_nodes, mirror_pod_facts, mirror_runs
from scheduler.scheduling.quarantine import quarantine_nodes
from scheduler.scheduling.run_outcomes import requeue
from scheduler.scheduling.step_learning import learn_constants, record_step_times

START_TIMEOUT_S = 900.0
"""Workers that neither run nor fail within this time are given up. Loading a large checkpoint takes minutes."""


@dataclass(frozen=True, slots=True)
class SnapshotUpdate:
    """The updated snapshot, its events, new and back-filled demand readings by pool, and new samples of jobs."""

    snapshot: Snapshot
    events: tuple[Event, ...]
    readings: tuple[tuple[str, DemandReading], ...]
    samples: tuple[SlottedSample, ...]
    backfill: tuple[tuple[str, DemandReading], ...] = ()


def update_snapshot(
    snapshot: Snapshot, observation: Observation, commands: Iterable[Command], *, outage_s: float = 0.0
) -> SnapshotUpdate:
    """Return the snapshot with everything that was observed and requested up to `snapshot.now_s`.

    The arguments are not changed, and unchanged records stay the same objects. A command that no longer fits is refused
    by an event and has no effect.

    Args:
        outage_s: Seconds since the last commit. After a long outage, jobs that did not start are not at fault.
    """
    updated = MutableSnapshot(snapshot)
    mirror_nodes(updated, observation)
    mirror_runs(updated, observation)
    for command in commands:
        apply_command(updated, command)
    mirror_pod_facts(updated, observation)
    quarantine_nodes(updated)
    switch_curves(updated)
    for job in _list_transitional_jobs(updated):
        _advance_job(updated, job, outage_s)
    record_step_times(updated)
    learn_constants(updated)
    _activate_loans(updated)
    _track_unused_loans(updated)
    return SnapshotUpdate(
        updated.view(),
        tuple(updated.events),
        tuple(updated.readings),
        tuple(updated.samples),
        tuple((pool, reading) for (pool, _), reading in updated.backfill.items()),
    )


def _list_transitional_jobs(snapshot: MutableSnapshot) -> list[Job]:
    """Return the jobs that may change their state by themselves, in the order of the snapshot."""
    job_ids = snapshot.original.index.unsettled | snapshot.jobs.changed_keys
    return [job for job_id, job in snapshot.jobs.items() if job_id in job_ids] if job_ids else []


def _advance_job(snapshot: MutableSnapshot, job: Job, outage_s: float) -> None:
    """Move a job that its own state allows to move on."""
    match job.state:
        case JobState.SUBMITTED | JobState.PLANNING:
            _finish_planning(snapshot, job)
        case JobState.QUEUED if snapshot.now_s < job.retry_at_s:
            snapshot.transition_job(job, JobState.PLANNING, job.message)
        case JobState.PREEMPTED if not job.allocation.releasing:
            snapshot.transition_job(job, JobState.QUEUED, job.message)
        case JobState.STARTING | JobState.RESIZING if snapshot.now_s - _startable_since_s(job) > _start_limit_s(job):
            _abandon_start(snapshot, job, outage_s)


def _finish_planning(snapshot: MutableSnapshot, job: Job) -> None:
    """Queue the job once a plan for its minimum is solved, feasible or not, and its backoff has ended."""
    if snapshot.now_s < job.retry_at_s:
        if job.state is JobState.SUBMITTED:
            snapshot.transition_job(job, JobState.PLANNING)
        return
    curve = snapshot.curves.get(job.curve_key, UNSOLVED_CURVE) if job.spec.has_profile else LINEAR_CURVE
    if curve.is_count_solved(job.spec.min_gpus):
        snapshot.transition_job(job, JobState.QUEUED)
    elif job.state is JobState.SUBMITTED:
        snapshot.transition_job(job, JobState.PLANNING)


def _startable_since_s(job: Job) -> float:
    """Return the time from which no worker of an earlier generation blocks the start."""
    leave_by_s = job.allocation.leave_by_s
    return job.state_since_s if leave_by_s is None else max(job.state_since_s, leave_by_s)


def _start_limit_s(job: Job) -> float:
    """Return the time in which the job must start. Its setup command, which agents end, adds its own limit."""
    return START_TIMEOUT_S + SETUP_TIMEOUT_S * bool(job.spec.program.setup)


def _abandon_start(snapshot: MutableSnapshot, job: Job, outage_s: float) -> None:
    """Give up a start. It counts as a retry unless no controller was running to start the workers."""
    is_job_fault = outage_s <= START_TIMEOUT_S
    message = f"its workers were {job.state} for more than {_start_limit_s(job):.0f} s"
    if not is_job_fault:
        message = f"{message}, and no controller ran for {outage_s:.0f} s"
    requeue(snapshot, job, message, counts_as_retry=is_job_fault)


def _activate_loans(snapshot: MutableSnapshot) -> None:
    """Activate the loans of offered nodes on which inference uses only the GPUs that the loan leaves to it."""
    for name in sorted(snapshot.original.index.offered):
        loan, node = snapshot.loans[name], snapshot.nodes[name]
        if loan.state is LoanState.OFFERED and node.inference_gpus <= loan.count_kept_gpus(node):
            snapshot.put_loan(loan.transition_to(LoanState.ACTIVE, snapshot.now_s))
            message = f"inference has left node {name}; training can use it"
            if loan.is_partial:
                message = f"inference has left {len(loan.indices)} of {node.gpus} GPUs of node {name} to training"
            snapshot.record_event(EventCode.LOAN_ACTIVE, name, message)


def _track_unused_loans(snapshot: MutableSnapshot) -> None:
    """Record since when no job holds GPUs of each node on loan."""
    unused = [
        (loan, None if snapshot.jobs_on_node(name) else snapshot.now_s)
        for name, loan in snapshot.loans.items()
        if loan.state is LoanState.ACTIVE
    ]
    for loan, since_s in unused:
        if (since_s is None) != (loan.unused_since_s is None):
            snapshot.put_loan(replace(loan, unused_since_s=since_s))
