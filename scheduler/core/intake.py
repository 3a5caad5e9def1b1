"""Intake: the snapshot that `absorb` is filling, and the events it tells on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from scheduler.domain.event import Event, EventCode
from scheduler.domain.fleet import DemandReading, Node, Pool
from scheduler.domain.forecast import Forecast
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.loan import Loan
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot


class Intake:
    """Mutable working copies of a snapshot's mappings; like a Draft, it lives within one call of the core."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.base = snapshot
        self.now_s = snapshot.now_s
        self.pools: dict[str, Pool] = dict(snapshot.pools)
        self.nodes: dict[str, Node] = dict(snapshot.nodes)
        self.jobs: dict[str, Job] = dict(snapshot.jobs)
        self.loans: dict[str, Loan] = dict(snapshot.loans)
        self.curves: dict[str, ScalingCurve] = dict(snapshot.curves)
        self.demand: dict[str, DemandReading] = dict(snapshot.demand)
        self.forecasts: dict[str, Forecast] = dict(snapshot.forecasts)
        self.switches = snapshot.switches
        self.solver = snapshot.solver
        self.events: list[Event] = []
        self.readings: list[tuple[str, DemandReading]] = []

    @property
    def next_generation(self) -> int:
        return self.base.generation + 1

    def tell(self, code: EventCode, subject: str, message: str, numbers: Mapping[str, float] | None = None) -> None:
        self.events.append(Event(self.now_s, code, subject, message, numbers or {}))

    def refuse(self, subject: str, why: str) -> None:
        """A command that fitted when it was sent and no longer does: people are told, nothing changes."""
        self.tell(EventCode.COMMAND_REFUSED, subject, why)

    def move_job(self, job: Job, state: JobState, message: str = "") -> Job:
        moved = job.moved(state, self.now_s, message=message)
        return self.put_moved(job, moved)

    def put_moved(self, before: Job, moved: Job) -> Job:
        self.jobs[before.id] = moved
        self.tell(EventCode.JOB_STATE, before.id, f"{before.state} -> {moved.state}: {moved.message}".rstrip(": "))
        return moved

    def capacity(self, pool: str) -> int:
        return self.view().capacity(pool)

    def view(self) -> Snapshot:
        return replace(
            self.base,
            pools=self.pools,
            nodes=self.nodes,
            jobs=self.jobs,
            loans=self.loans,
            curves=self.curves,
            demand=self.demand,
            forecasts=self.forecasts,
            switches=self.switches,
            solver=self.solver,
        )
