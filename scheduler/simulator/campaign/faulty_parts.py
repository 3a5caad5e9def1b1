"""What a controller of a campaign runs on: a clock that jumps, a store that fails and an executor that raises.

The wrappers only fail as they are told. `FaultCase` says when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from scheduler.domain.fleet import Forecast
from scheduler.domain.job import Job
from scheduler.domain.observation import Observation, Run, RunPhase
from scheduler.domain.reading_bins import ReadingBin
from scheduler.domain.snapshot import Snapshot
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.forecast.demand_history import FloatArray
from scheduler.forecast.forecaster import FitTask
from scheduler.forecast.pool_model import PoolModel
from scheduler.forecast.regression import NormalEquations
from scheduler.runtime.clock import CATCH_UP_RATE
from scheduler.simulator.campaign.case import CaseEventKind
from scheduler.simulator.fault_injection import LossyStore
from scheduler.store.protocol import Commit, ConflictError, Lease, LoadedState, Store, UnavailableError

_LIVE_PHASES = {RunPhase.STARTING, RunPhase.RUNNING, RunPhase.LEAVING}


class ExecutorError(Exception):
    """The simulated executor failed. The process of its controller dies and is started again."""


@dataclass(slots=True)
class HostFaults:
    """Faults that the controller on one host meets from now on. `counts` are those that had an effect, in all hosts."""

    counts: Counter[CaseEventKind]
    store_down_until_s: float = -1.0
    counted_outage_until_s: float = -1.0
    slow_commit_s: float = 0.0
    armed: set[CaseEventKind] = field(default_factory=set)
    stale_observations: int = 0
    lost_reports_of: str = ""
    reports_lost_until_s: float = -1.0
    stale_run_of: str = ""

    def reset(self) -> None:
        """End all faults."""
        self.store_down_until_s = self.reports_lost_until_s = -1.0
        self.slow_commit_s, self.stale_observations, self.stale_run_of = 0.0, 0, ""
        self.armed.clear()

    def take(self, kind: CaseEventKind) -> bool:
        """Return whether a fault that happens once is armed, and disarm and count it."""
        if kind not in self.armed:
            return False
        self.armed.discard(kind)
        self.counts[kind] += 1
        return True


class JumpingClock:
    """The clock of one host, beside the time of the world. It behaves as `RealClock` when it is set back."""

    def __init__(self, world: SimulatedExecutor) -> None:
        self._world = world
        self._skew_s = 0.0
        self._last_s = self._last_world_s = world.now_s

    def now_s(self) -> float:
        world_s = self._world.now_s
        minimum_s = self._last_s + CATCH_UP_RATE * (world_s - self._last_world_s)
        self._last_s, self._last_world_s = max(minimum_s, world_s + self._skew_s), world_s
        return self._last_s

    def elapsed_s(self) -> float:
        return self._world.now_s

    def jump(self, seconds: float) -> None:
        self.now_s()
        self._skew_s += seconds

    def to_world_s(self, at_s: float) -> float:
        """Return the time of the world at which this clock shows `at_s`, at the earliest."""
        return self._world.now_s + max(0.0, at_s - self.now_s())


class FaultyStore(LossyStore):
    """Store of one host: it can be down, be slow, refuse a commit, or lose the answer to one.

    `fail_transaction` lets the next transaction of the database fail in its middle, and returns whether it will: only a
    database has transactions. Otherwise the commit is refused before it begins.
    """

    def __init__(
        self, store: Store, world: SimulatedExecutor, faults: HostFaults, fail_transaction: Callable[[], bool]
    ) -> None:
        super().__init__(store)
        self._world, self._faults, self._fail_transaction = world, faults, fail_transaction

    def commit(self, commit: Commit) -> None:
        faults = self._faults
        self._require_available()
        if faults.slow_commit_s:
            faults.counts[CaseEventKind.SLOW_COMMIT] += 1
            self._world.advance_to(self._world.now_s + faults.slow_commit_s)
            faults.slow_commit_s = 0.0
        if faults.take(CaseEventKind.COMMIT_CONFLICT):
            raise ConflictError("simulated conflict: another controller committed first")
        if faults.take(CaseEventKind.COMMIT_REFUSED) and not self._fail_transaction():
            raise UnavailableError("simulated: the database refused the transaction")
        super().commit(commit)
        if faults.take(CaseEventKind.COMMIT_UNANSWERED):
            raise UnavailableError("simulated: the database wrote the transaction, and the answer was lost")

    def load(self) -> LoadedState:
        self._require_available()
        return super().load()

    def count_pending_commands(self) -> int:
        self._require_available()
        return super().count_pending_commands()

    def acquire_lease(self, holder: str, *, now_s: float, ttl_s: float) -> Lease | None:
        self._require_available()
        return super().acquire_lease(holder, now_s=now_s, ttl_s=ttl_s)

    def _require_available(self) -> None:
        faults = self._faults
        if self._world.now_s < faults.store_down_until_s:
            if faults.counted_outage_until_s != faults.store_down_until_s:
                faults.counted_outage_until_s = faults.store_down_until_s
                faults.counts[CaseEventKind.STORE_OUTAGE] += 1
            raise UnavailableError("simulated: the database does not respond")


class LeaveDeadlines:
    """The deadlines for leaving in the time of the world, shared by all hosts.

    Real executors measure a deadline by the clock of their host. Where two hosts that both believe to lead have clocks
    that differ, the earlier deadline stays in force, as in an agent. Each record of a job is translated once.
    """

    def __init__(self) -> None:
        self._stated: dict[str, tuple[float, float]] = {}
        self._translated: dict[str, tuple[Job, Job]] = {}

    def translate(self, desired: Snapshot, *, lead_s: float) -> Snapshot:
        """Return the state with deadlines in the time of the world, which the clock of the host leads by `lead_s`."""
        stated, translated = self._stated, self._translated
        self._stated, self._translated = {}, {}
        for job_id, job in desired.jobs.items():
            if (leave_by_s := job.allocation.leave_by_s) is None:
                continue
            known_s, by_s = stated.get(job_id, (leave_by_s, inf))
            by_s = min(leave_by_s - lead_s, by_s if known_s == leave_by_s else inf)
            pair = translated.get(job_id)
            if pair is None or pair[0] is not job or pair[1].allocation.leave_by_s != by_s:
                pair = job, replace(job, allocation=replace(job.allocation, leave_by_s=by_s))
            self._stated[job_id], self._translated[job_id] = (leave_by_s, by_s), pair
        return replace(desired, jobs={**desired.jobs, **{job_id: pair[1] for job_id, pair in self._translated.items()}})


class FaultyExecutor:
    """Executor of one host in the shared world.

    As in real executors, a state that is older than one that another controller put into effect changes nothing.
    """

    def __init__(
        self,
        world: SimulatedExecutor,
        clock: JumpingClock,
        faults: HostFaults,
        put_into_effect: Callable[[Snapshot], bool],
        deadlines: LeaveDeadlines,
    ) -> None:
        self._world, self._clock, self._faults, self._put_into_effect = world, clock, faults, put_into_effect
        self._deadlines = deadlines
        self._last: Observation | None = None
        self._first_runs: dict[str, Run] = {}

    def observe(self) -> Observation:
        faults, last = self._faults, self._last
        if faults.take(CaseEventKind.OBSERVE_ERROR):
            raise ExecutorError("simulated: the executor cannot observe")
        if faults.stale_observations and last is not None:
            faults.stale_observations -= 1
            faults.counts[CaseEventKind.STALE_OBSERVATION] += 1
            return last
        seen = self._world.observe()
        if self._world.now_s < faults.reports_lost_until_s and last is not None:
            seen = self._lose_reports(seen, last)
        self._last = seen
        return self._repeat_first_report(seen)

    def converge(self, desired: Snapshot) -> None:
        if self._faults.take(CaseEventKind.CONVERGE_ERROR):
            raise ExecutorError("simulated: the executor cannot converge")
        if self._put_into_effect(desired):
            lead_s = self._clock.now_s() - self._world.now_s
            self._world.converge(self._deadlines.translate(desired, lead_s=lead_s))

    def close(self) -> None:
        """Do nothing: the world goes on without this controller."""

    def _repeat_first_report(self, seen: Observation) -> Observation:
        """Return the observation with the first known state of the run of which a late report arrives."""
        live = {run.job_id: run for run in seen.runs if run.phase in _LIVE_PHASES}
        first = {job_id: self._first_runs.get(job_id, run) for job_id, run in live.items()}
        self._first_runs = {
            job_id: run if run.generation == live[job_id].generation else live[job_id] for job_id, run in first.items()
        }
        job_id, self._faults.stale_run_of = self._faults.stale_run_of, ""
        if job_id not in live or self._first_runs[job_id] == live[job_id]:
            return seen
        self._faults.counts[CaseEventKind.STALE_RUN] += 1
        runs = (self._first_runs[job_id] if run is live[job_id] else run for run in seen.runs)
        return replace(seen, runs=tuple(runs))

    def _lose_reports(self, seen: Observation, last: Observation) -> Observation:
        """Return the observation with the last known state of the run whose reports are lost."""
        known = {(run.job_id, run.generation): run for run in last.runs}
        runs = list[Run]()
        for run in seen.runs:
            old = known.get((run.job_id, run.generation))
            if run.job_id == self._faults.lost_reports_of and old is not None and old != run:
                self._faults.counts[CaseEventKind.LOST_REPORT] += 1
                run = old
            runs.append(run)
        return replace(seen, runs=tuple(runs))


class PersistenceForecaster:
    """Forecaster that expects the last reading to last, with a margin that grows with the quantile. It fits nothing."""

    equations: tuple[NormalEquations, ...] = ()
    step_s = 300.0

    def __init__(self, *, zone: str = "UTC") -> None:
        self._gpus = 0.0

    def observe(self, time_s: float, gpus: float) -> None:
        self._gpus = gpus

    def observe_bin(self, readings: ReadingBin) -> None:
        self._gpus = readings.last_gpus

    def forecast(self, now_s: float, horizon_s: float, *, quantiles: tuple[float, ...]) -> Forecast:
        gpus = tuple(self._gpus * (0.9 + 0.2 * level) for level in quantiles)
        return Forecast(now_s, horizon_s, quantiles, gpus, "persistence")

    def list_due_fits(self, now_s: float, prior: FloatArray) -> Mapping[float, FitTask]:
        """Return nothing: there is no model to fit."""
        return {}

    def accept(self, horizon_s: float, model: PoolModel) -> None:
        """Raise AssertionError: no fit was due."""
        raise AssertionError("no fit was due")
