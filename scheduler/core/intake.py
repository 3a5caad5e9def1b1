"""Intake: the snapshot that `absorb` is filling, and the events it tells on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from scheduler.core.story import job_step
from scheduler.domain.event import Event, EventCode, JobStep
from scheduler.domain.fleet import DemandReading, Node, Pool
from scheduler.domain.forecast import Forecast
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.domain.loan import Loan
from scheduler.domain.sample import PlacedSample
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot

R = TypeVar("R")


class Working(dict[str, R], Generic[R]):
    """A copy of a mapping that knows which keys were written: a mapping that was not is handed on as it was."""

    def __init__(self, base: Mapping[str, R]) -> None:
        super().__init__(base)
        self._base = base
        self.written: set[str] = set()

    def __setitem__(self, key: str, record: R) -> None:
        self.written.add(key)
        super().__setitem__(key, record)

    def __delitem__(self, key: str) -> None:
        self.written.add(key)
        super().__delitem__(key)

    def clear(self) -> None:
        self.written.update(self)
        super().clear()

    def pop(self, key: str, *default: Any) -> Any:
        self.written.add(key)
        return super().pop(key, *default)

    @property
    def settled(self) -> Mapping[str, R]:
        return self if self.written else self._base


class Intake:
    """Mutable working copies of a snapshot's mappings; like a Draft, it lives within one call of the core."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.base = snapshot
        self.now_s = snapshot.now_s
        self.pools: Working[Pool] = Working(snapshot.pools)
        self.nodes: Working[Node] = Working(snapshot.nodes)
        self.jobs: Working[Job] = Working(snapshot.jobs)
        self.loans: Working[Loan] = Working(snapshot.loans)
        self.curves: Working[ScalingCurve] = Working(snapshot.curves)
        self.demand: Working[DemandReading] = Working(snapshot.demand)
        self.forecasts: Working[Forecast] = Working(snapshot.forecasts)
        self.queues: Working[JobQueue] = Working(snapshot.queues)
        self.switches = snapshot.switches
        self.solver = snapshot.solver
        self.events: list[Event] = []
        self.readings: list[tuple[str, DemandReading]] = []
        self.samples: list[PlacedSample] = []

    @property
    def next_generation(self) -> int:
        return self.base.generation + 1

    def tell(
        self,
        code: EventCode,
        subject: str,
        message: str,
        numbers: Mapping[str, float] | None = None,
        *,
        cause: str = "",
        job: JobStep | None = None,
    ) -> None:
        self.events.append(Event(self.now_s, code, subject, message, numbers or {}, cause, job))

    def refuse(self, subject: str, why: str) -> None:
        """A command that fitted when it was sent and no longer does: people are told, nothing changes."""
        self.tell(EventCode.COMMAND_REFUSED, subject, why)

    def move_job(self, job: Job, state: JobState, message: str = "") -> Job:
        moved = job.moved(state, self.now_s, message=message)
        return self.put_moved(job, moved)

    def put_moved(self, before: Job, moved: Job) -> Job:
        self.jobs[before.id] = moved
        told, step = f"{before.state} -> {moved.state}: {moved.message}", job_step(moved, self.nodes, self.pools)
        self.tell(EventCode.JOB_STATE, before.id, told.rstrip(": "), cause=moved.state.value, job=step)
        return moved

    def capacity(self, pool: str) -> int:
        return self.view().capacity(pool)

    def view(self) -> Snapshot:
        return replace(
            self.base,
            pools=self.pools.settled,
            nodes=self.nodes.settled,
            jobs=self.jobs.settled,
            loans=self.loans.settled,
            curves=self.curves.settled,
            demand=self.demand.settled,
            forecasts=self.forecasts.settled,
            queues=self.queues.settled,
            switches=self.switches,
            solver=self.solver,
        )
