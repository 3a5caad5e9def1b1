"""A mutable working copy of a snapshot, used within one call of the scheduler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from scheduler.domain.events import Event, EventCode, JobStep
from scheduler.domain.fleet import DemandReading, Forecast, Loan, Node, Pool
from scheduler.domain.gpu_sets import FreeGpus
from scheduler.domain.hardware import GpuProfile
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_records import SlottedSample
from scheduler.domain.job_state import JobState
from scheduler.domain.return_times import ReturnTimes
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.shadow_lending import ShadowLending
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.snapshot_index import SnapshotIndex
from scheduler.scheduling.event_messages import job_step
from scheduler.scheduling.policies.quota import QuotaState

R = TypeVar("R")


class TrackedDict(dict[str, R], Generic[R]):
    """A copy of a mapping that records which keys were written."""

    def __init__(self, base: Mapping[str, R]) -> None:
        super().__init__(base)
        self._base: Mapping[str, R] | None = base
        self.changed_keys: set[str] = set()

    def __setitem__(self, key: str, record: R) -> None:
        self.changed_keys.add(key)
        self._base = None
        dict.__setitem__(self, key, record)

    def __delitem__(self, key: str) -> None:
        self._mark_changed(key)
        super().__delitem__(key)

    def __reduce__(self) -> tuple[type[dict[str, R]], tuple[dict[str, R]]]:
        return dict, (dict(self),)

    def clear(self) -> None:
        if self:
            self._mark_changed(*self)
            super().clear()

    def pop(self, key: str, *default: Any) -> Any:
        self._mark_changed(key)
        return super().pop(key, *default)

    @property
    def result(self) -> Mapping[str, R]:
        """The original mapping while nothing was written, else this one."""
        return self if self._base is None else self._base

    def _mark_changed(self, *keys: str) -> None:
        self.changed_keys.update(keys)
        self._base = None  # a reference would keep the mappings of all earlier ticks alive


class MutableSnapshot:
    """Working copies of a snapshot's mappings, with the events, readings and samples recorded meanwhile.

    Observations and commands write any mapping. Decisions change jobs and loans only, through `put_job` and `put_loan`,
    which keep `index` and `quota` up to date. Both are built at first use; from then on no other mapping may change.
    `measured_jobs` are those whose executor observed their steps. `backfill` are readings of the past by
    pool and time, which replace stored ones.
    """

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
        self.gpu_profiles: TrackedDict[GpuProfile] = TrackedDict(snapshot.gpu_profiles)
        self.return_times: TrackedDict[ReturnTimes] = TrackedDict(snapshot.return_times)
        self.shadows: TrackedDict[ShadowLending] = TrackedDict(snapshot.shadows)
        self.gpu_throughputs = snapshot.gpu_throughputs
        self.step_measurements = snapshot.step_measurements
        self.switches = snapshot.switches
        self.lending_set_by = snapshot.lending_set_by
        self.lending_set_at_s = snapshot.lending_set_at_s
        self.solver = snapshot.solver
        self.curve_hardware = snapshot.curve_hardware
        self.events: list[Event] = []
        self.readings: list[tuple[str, DemandReading]] = []
        self.backfill: dict[tuple[str, float], DemandReading] = {}
        self.samples: list[SlottedSample] = []
        self.ended_loans: list[Loan] = []
        self.measured_jobs: set[str] = set()
        self._index: SnapshotIndex | None = None
        self._quota: QuotaState | None = None
        self._view: Snapshot | None = None

    @property
    def next_generation(self) -> int:
        return self.original.generation + 1

    def view(self) -> Snapshot:
        """Return the current state. It shares the working mappings, so later changes show in it."""
        if self._view is not None:
            return self._view
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
            gpu_profiles=self.gpu_profiles.result,
            return_times=self.return_times.result,
            shadows=self.shadows.result,
            switches=self.switches,
            lending_set_by=self.lending_set_by,
            lending_set_at_s=self.lending_set_at_s,
            solver=self.solver,
            curve_hardware=self.curve_hardware,
            gpu_throughputs=self.gpu_throughputs,
            step_measurements=self.step_measurements,
        )

    @property
    def index(self) -> SnapshotIndex:
        if self._index is None:
            unchanged = not self.jobs.changed_keys and not self.nodes.changed_keys and not self.loans.changed_keys
            self._index = (self.original if unchanged else self.view()).index.copy()
            self._index.jobs, self._index.loans = self.jobs, self.loans
            self._view = replace(self.view(), jobs=self.jobs, loans=self.loans, cached_index=self._index)
        return self._index

    @property
    def quota(self) -> QuotaState:
        """GPUs that each queue and each user holds."""
        if self._quota is None:
            _ = self.index  # from now on the view follows every change
            self._quota = QuotaState(self.view())
        return self._quota

    def capacity(self, pool: str) -> int:
        """Return the GPUs of the pool's nodes that are up."""
        return self.view().capacity(pool)

    @property
    def free_gpus(self) -> Collection[FreeGpus]:
        """Free GPUs of each node on which training may start workers."""
        return self.index.free_by_node.values()

    @property
    def free_gpu_total(self) -> int:
        return self.index.free_gpu_total

    def holder(self, node: str, gpu_index: int) -> str | None:
        """Return the id of the job that holds the GPU, or None."""
        return self.index.holders.get(node, {}).get(gpu_index)

    def jobs_on_node(self, node: str) -> frozenset[str]:
        """Return the ids of jobs that hold GPUs of the node, including GPUs that they are releasing."""
        return frozenset(self.index.holders.get(node, {}).values())

    def put_job(self, job: Job) -> None:
        """Add or replace a job."""
        before = self.jobs.get(job.id)
        self.jobs[job.id] = job
        if self._index is not None:
            self._index.put_job(job.id, before)
        if self._quota is not None:
            self._quota.allocate(job, job.allocation.target_gpus - (before.allocation.target_gpus if before else 0))

    def put_loan(self, loan: Loan) -> None:
        """Add or replace the loan of a node. A replaced loan that has ended is moved to `ended_loans`."""
        before = self.loans.get(loan.node)
        if before is not None and not before.is_live:
            self.ended_loans.append(before)
        self.loans[loan.node] = loan
        if self._index is not None:
            self._index.put_loan(loan.node, before)

    def transition_job(self, job: Job, state: JobState, message: str = "") -> Job:
        """Move a job to `state`, and record the event."""
        return self.record_transition(job, job.transition_to(state, self.now_s, message=message))

    def record_transition(self, before: Job, after: Job) -> Job:
        """Replace a job that changed its state, and record the event."""
        self.put_job(after)
        message = f"{before.state} -> {after.state}: {after.message}".rstrip(": ")
        step = job_step(after, self.nodes, self.pools)
        self.record_event(EventCode.JOB_STATE, before.id, message, cause=after.state.value, job=step)
        return after

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

    def refuse(self, subject: str, message: str) -> None:
        """Record that a command about `subject` no longer fits the state and has no effect."""
        self.record_event(EventCode.COMMAND_REFUSED, subject, message)
