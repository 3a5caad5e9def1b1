"""absorb: mirror reality and what people asked for into the snapshot. Passive: it decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.core.commands import obey
from scheduler.core.frozen_layers import take_up_curves
from scheduler.core.intake import Intake
from scheduler.core.mirror import mirror_nodes, mirror_runs, requeue
from scheduler.domain.command import Command
from scheduler.domain.event import Event, EventCode
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.loan import LoanState
from scheduler.domain.observation import Observation
from scheduler.domain.sample import PlacedSample
from scheduler.domain.scaling_curve import LINEAR_CURVE
from scheduler.domain.snapshot import UNSOLVED, Snapshot

STUCK_AFTER_S = 900.0
"""Workers that neither run nor die within this time are given up; loading a large checkpoint takes minutes."""


@dataclass(frozen=True, slots=True)
class Absorbed:
    """`readings` are the demand figures that belong into the forecaster's history, `samples` into the
    series of jobs."""

    snapshot: Snapshot
    events: tuple[Event, ...]
    readings: tuple[tuple[str, DemandReading], ...]
    samples: tuple[PlacedSample, ...]


def absorb(
    snapshot: Snapshot, observation: Observation, commands: Iterable[Command], *, away_s: float = 0.0
) -> Absorbed:
    """The snapshot with everything in it that was seen and asked for up to `snapshot.now_s`.

    Each command takes effect once; one that no longer fits is refused by an event and changes nothing. Records
    that nothing happened to stay the same objects. `away_s`: for how long nobody has committed anything.
    """
    intake = Intake(snapshot)
    mirror_nodes(intake, observation)
    mirror_runs(intake, observation)
    for command in commands:
        obey(intake, command)
    take_up_curves(intake)
    for job in _unsettled(intake):
        _move_on(intake, job, away_s)
    _activate_loans(intake)
    return Absorbed(intake.view(), tuple(intake.events), tuple(intake.readings), tuple(intake.samples))


def _unsettled(intake: Intake) -> list[Job]:
    """Jobs that may take a step by themselves, in the order in which they came."""
    names = intake.base.ledger.unsettled | intake.jobs.written
    return [job for job_id, job in intake.jobs.items() if job_id in names] if names else []


def _move_on(intake: Intake, job: Job, away_s: float) -> None:
    """The steps that a job takes by itself."""
    match job.state:
        case JobState.SUBMITTED | JobState.PLANNING:
            _leave_planning(intake, job)
        case JobState.QUEUED if job.memory.backs_off(intake.now_s):
            intake.move_job(job, JobState.PLANNING, job.message)
        case JobState.PREEMPTED if not job.allocation.releasing:
            intake.move_job(job, JobState.QUEUED, job.message)
        case JobState.STARTING | JobState.RESIZING if intake.now_s - _could_begin_s(job) > STUCK_AFTER_S:
            _give_up_on(intake, job, away_s)


def _leave_planning(intake: Intake, job: Job) -> None:
    """PLANNING until the curve has a shape for the minimum on some GPU model, solved either way, and until the pause
    after a death by memory is over."""
    if job.memory.backs_off(intake.now_s):
        return
    curve = intake.curves.get(job.curve_key, UNSOLVED) if job.spec.has_profile else LINEAR_CURVE
    if curve.is_solved_for(job.spec.min_gpus):
        intake.move_job(job, JobState.QUEUED)
    elif job.state is JobState.SUBMITTED:
        intake.move_job(job, JobState.PLANNING)


def _could_begin_s(job: Job) -> float:
    """Since when at the latest nothing of an earlier generation stands in the way of the present one."""
    leave_by_s = job.allocation.leave_by_s
    return job.state_since_s if leave_by_s is None else max(job.state_since_s, leave_by_s)


def _give_up_on(intake: Intake, job: Job, away_s: float) -> None:
    """It is not the job's fault where no controller was there to start its workers."""
    is_fault = away_s <= STUCK_AFTER_S
    why = f"its workers were {job.state} for more than {STUCK_AFTER_S:.0f} s"
    requeue(intake, job, why if is_fault else f"{why}, and no controller for {away_s:.0f} s", charged=is_fault)


def _activate_loans(intake: Intake) -> None:
    """An offered node is training's once the last inference pod has left it."""
    for name in sorted(intake.base.ledger.offered):
        loan = intake.loans[name]
        if loan.state is LoanState.OFFERED and intake.nodes[name].inference_gpus == 0:
            intake.loans[name] = loan.moved(LoanState.ACTIVE, intake.now_s)
            intake.tell(EventCode.LOAN_ACTIVE, name, f"{name} is free of inference and serves training")
