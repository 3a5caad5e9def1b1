"""absorb: mirror reality and what people asked for into the snapshot. Passive: it decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.domain.commands import Command
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import DemandReading, LoanState
from scheduler.domain.job import Job
from scheduler.domain.job_records import SlottedSample
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import Observation
from scheduler.domain.scaling_curve import LINEAR_CURVE
from scheduler.domain.snapshot import UNSOLVED_CURVE, Snapshot
from scheduler.scheduling.commands import apply_command
from scheduler.scheduling.job_progress import switch_curves
from scheduler.scheduling.mutable_snapshot import SnapshotBuilder
from scheduler.scheduling.observation import mirror_nodes, mirror_runs, requeue

START_TIMEOUT_S = 900.0
"""Workers that neither run nor die within this time are given up; loading a large checkpoint takes minutes."""


@dataclass(frozen=True, slots=True)
class SnapshotUpdate:
    """`readings` are the demand figures that belong into the forecaster's history, `samples` into the
    series of jobs."""

    snapshot: Snapshot
    events: tuple[Event, ...]
    readings: tuple[tuple[str, DemandReading], ...]
    samples: tuple[SlottedSample, ...]


def update_snapshot(
    snapshot: Snapshot, observation: Observation, commands: Iterable[Command], *, outage_s: float = 0.0
) -> SnapshotUpdate:
    """The snapshot with everything in it that was seen and asked for up to `snapshot.now_s`.

    Each command takes effect once; one that no longer fits is refused by an event and changes nothing. Records
    that nothing happened to stay the same objects. `away_s`: for how long nobody has committed anything.
    """
    intake = SnapshotBuilder(snapshot)
    mirror_nodes(intake, observation)
    mirror_runs(intake, observation)
    for command in commands:
        apply_command(intake, command)
    switch_curves(intake)
    for job in _list_transitional_jobs(intake):
        _advance_job(intake, job, outage_s)
    _activate_loans(intake)
    return SnapshotUpdate(intake.view(), tuple(intake.events), tuple(intake.readings), tuple(intake.samples))


def _list_transitional_jobs(snapshot: SnapshotBuilder) -> list[Job]:
    """Jobs that may take a step by themselves, in the order in which they came."""
    names = snapshot.original.index.unsettled | snapshot.jobs.changed_keys
    return [job for job_id, job in snapshot.jobs.items() if job_id in names] if names else []


def _advance_job(snapshot: SnapshotBuilder, job: Job, outage_s: float) -> None:
    """The steps that a job takes by itself."""
    match job.state:
        case JobState.SUBMITTED | JobState.PLANNING:
            _finish_planning(snapshot, job)
        case JobState.QUEUED if job.memory.is_backing_off(snapshot.now_s):
            snapshot.transition_job(job, JobState.PLANNING, job.message)
        case JobState.PREEMPTED if not job.allocation.releasing:
            snapshot.transition_job(job, JobState.QUEUED, job.message)
        case JobState.STARTING | JobState.RESIZING if snapshot.now_s - _startable_since_s(job) > START_TIMEOUT_S:
            _abandon_start(snapshot, job, outage_s)


def _finish_planning(snapshot: SnapshotBuilder, job: Job) -> None:
    """PLANNING until the curve has a shape for the minimum on some GPU model, solved either way, and until the pause
    after a death by memory is over."""
    if job.memory.is_backing_off(snapshot.now_s):
        return
    curve = snapshot.curves.get(job.curve_key, UNSOLVED_CURVE) if job.spec.has_profile else LINEAR_CURVE
    if curve.is_count_solved(job.spec.min_gpus):
        snapshot.transition_job(job, JobState.QUEUED)
    elif job.state is JobState.SUBMITTED:
        snapshot.transition_job(job, JobState.PLANNING)


def _startable_since_s(job: Job) -> float:
    """Since when at the latest nothing of an earlier generation stands in the way of the present one."""
    leave_by_s = job.allocation.leave_by_s
    return job.state_since_s if leave_by_s is None else max(job.state_since_s, leave_by_s)


def _abandon_start(snapshot: SnapshotBuilder, job: Job, outage_s: float) -> None:
    """It is not the job's fault where no controller was there to start its workers."""
    is_fault = outage_s <= START_TIMEOUT_S
    why = f"its workers were {job.state} for more than {START_TIMEOUT_S:.0f} s"
    requeue(
        snapshot, job, why if is_fault else f"{why}, and no controller for {outage_s:.0f} s", counts_as_retry=is_fault
    )


def _activate_loans(snapshot: SnapshotBuilder) -> None:
    """An offered node is training's once the last inference pod has left it."""
    for name in sorted(snapshot.original.index.offered):
        loan = snapshot.loans[name]
        if loan.state is LoanState.OFFERED and snapshot.nodes[name].inference_gpus == 0:
            snapshot.loans[name] = loan.transition_to(LoanState.ACTIVE, snapshot.now_s)
            snapshot.record_event(EventCode.LOAN_ACTIVE, name, f"{name} is free of inference and serves training")
