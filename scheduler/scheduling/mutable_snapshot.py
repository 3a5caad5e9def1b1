"""Draft: a snapshot being changed decision by decision, with its ledger kept beside it.

Intake: the snapshot that `absorb` is filling, and the events it tells on the way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from scheduler.domain.events import Event, EventCode, JobStep
from scheduler.domain.fleet import DemandReading, Forecast, Loan, Node, Pool
from scheduler.domain.gpu_sets import FreeGpus
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_records import SlottedSample
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.snapshot_index import SnapshotIndex
from scheduler.scheduling.event_messages import job_step
from scheduler.scheduling.policies.quota import QuotaState


class MutableSnapshot:
    """Mutable on purpose, and never seen outside one call of the core: copying 4,000 jobs a decision is what made
    an earlier prototype slow. `view()` is the draft as a snapshot: it shares the draft's dictionaries, so it changes
    with the draft and must not outlive it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.original = snapshot
        self.jobs: dict[str, Job] = dict(snapshot.jobs)
        self.loans: dict[str, Loan] = dict(snapshot.loans)
        self.ended_loans: list[Loan] = []
        self.ledger: SnapshotIndex = snapshot.index.copy()
        self.ledger.jobs, self.ledger.loans = self.jobs, self.loans
        self._quota: QuotaState | None = None
        self._view = replace(snapshot, jobs=self.jobs, loans=self.loans, cached_index=self.ledger)

    @property
    def now_s(self) -> float:
        return self.original.now_s

    @property
    def next_generation(self) -> int:
        return self.original.generation + 1

    @property
    def rooms(self) -> Collection[FreeGpus]:
        """What is free on the nodes on which training may put something new."""
        return self.ledger.free_by_node.values()

    @property
    def usable_gpus(self) -> int:
        """How many GPUs are free on those nodes."""
        return self.ledger.free_gpu_total

    def view(self) -> Snapshot:
        return self._view

    def holder(self, node: str, index: int) -> str | None:
        return self.ledger.holders.get(node, {}).get(index)

    def jobs_on_node(self, node: str) -> frozenset[str]:
        """Jobs that hold GPUs of the node, leaving ones included."""
        return frozenset(self.ledger.holders.get(node, {}).values())

    @property
    def quota(self) -> QuotaState:
        """What each queue and each user holds; worked out at the first question, then kept."""
        if self._quota is None:
            self._quota = QuotaState(self._view)
        return self._quota

    def put_job(self, job: Job) -> None:
        """Replace a job and bring the ledger up to date."""
        before = self.jobs[job.id]
        self.jobs[job.id] = job
        self.ledger.put_job(job.id, before)
        if self._quota is not None:
            self._quota.allocate(job, job.allocation.target_gpus - before.allocation.target_gpus)

    def put_loan(self, loan: Loan) -> None:
        """Replace a loan, or add it. One that has just ended, of a node that is lent anew, goes to `ended_loans`."""
        before = self.loans.get(loan.node)
        if before is not None and not before.is_live:
            self.ended_loans.append(before)
        self.loans[loan.node] = loan
        self.ledger.put_loan(loan.node, before)


R = TypeVar("R")


class TrackedDict(dict[str, R], Generic[R]):
    """A copy of a mapping that knows which keys were written: a mapping that was not is handed on as it was."""

    def __init__(self, base: Mapping[str, R]) -> None:
        super().__init__(base)
        self._base = base
        self.changed_keys: set[str] = set()

    def __setitem__(self, key: str, record: R) -> None:
        self.changed_keys.add(key)
        super().__setitem__(key, record)

    def __delitem__(self, key: str) -> None:
        self.changed_keys.add(key)
        super().__delitem__(key)

    def clear(self) -> None:
        self.changed_keys.update(self)
        super().clear()

    def pop(self, key: str, *default: Any) -> Any:
        self.changed_keys.add(key)
        return super().pop(key, *default)

    @property
    def result(self) -> Mapping[str, R]:
        return self if self.changed_keys else self._base


class SnapshotBuilder:
    """Mutable working copies of a snapshot's mappings; like a Draft, it lives within one call of the core."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.original = snapshot
        self.now_s = snapshot.now_s
        self.pools: TrackedDict[Pool] = TrackedDict(snapshot.pools)
        self.nodes: TrackedDict[Node] = TrackedDict(snapshot.nodes)
        self.jobs: TrackedDict[Job] = TrackedDict(snapshot.jobs)
        self.loans: TrackedDict[Loan] = TrackedDict(snapshot.loans)
        self.curves: TrackedDict[ScalingCurve] = TrackedDict(snapshot.curves)
        self.demand: TrackedDict[DemandReading] = TrackedDict(snapshot.demand)
        self.forecasts: TrackedDict[Forecast] = TrackedDict(snapshot.forecasts)
        self.queues: TrackedDict[JobQueue] = TrackedDict(snapshot.queues)
        self.switches = snapshot.switches
        self.solver = snapshot.solver
        self.events: list[Event] = []
        self.readings: list[tuple[str, DemandReading]] = []
        self.samples: list[SlottedSample] = []

    @property
    def next_generation(self) -> int:
        return self.original.generation + 1

    def record_event(
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
        self.record_event(EventCode.COMMAND_REFUSED, subject, why)

    def transition_job(self, job: Job, state: JobState, message: str = "") -> Job:
        moved = job.transition_to(state, self.now_s, message=message)
        return self.record_transition(job, moved)

    def record_transition(self, before: Job, moved: Job) -> Job:
        self.jobs[before.id] = moved
        told, step = f"{before.state} -> {moved.state}: {moved.message}", job_step(moved, self.nodes, self.pools)
        self.record_event(EventCode.JOB_STATE, before.id, told.rstrip(": "), cause=moved.state.value, job=step)
        return moved

    def capacity(self, pool: str) -> int:
        return self.view().capacity(pool)

    def view(self) -> Snapshot:
        return replace(
            self.original,
            pools=self.pools.result,
            nodes=self.nodes.result,
            jobs=self.jobs.result,
            loans=self.loans.result,
            curves=self.curves.result,
            demand=self.demand.result,
            forecasts=self.forecasts.result,
            queues=self.queues.result,
            switches=self.switches,
            solver=self.solver,
        )
