"""DailyComparisons: once a day the leader compares savings with "no lending" and "no elasticity", in the background.

A thread of the leader begins and records comparisons. A process of its own with low priority and limits reads the
recorded jobs, so that neither the tick nor its process pays for it, and queues a simulation. That runs like any other,
in a process of an API. Whatever ends in between, the present leader goes on where the stored row says.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import psutil

from scheduler.domain.savings_comparison import (
    COMPARED_POLICIES,
    COMPARISON_OWNER_ID,
    COMPARISON_TITLE,
    DAY_S,
    POLICY_BY_VARIANT,
    RECORDED_S,
    ComparisonState,
    DailyComparison,
    Variant,
    find_day,
    read_outcomes,
)
from scheduler.domain.simulation_task import SimulationTask, TaskState
from scheduler.runtime.clock import Clock
from scheduler.runtime.process_pool import ProcessPool
from scheduler.simulator.recorded_period import NothingRecordedError, RecordedPeriod, build_recorded_period
from scheduler.simulator.simulation_process import NICENESS, validate_input_files
from scheduler.store.api_protocol import ServiceStore
from scheduler.store.job_query import JobQuery
from scheduler.store.protocol import FencedError, UnavailableError
from scheduler.store.sql_store import SqlStore

log = logging.getLogger(__name__)

JOBS_MAX = 20_000
"""Most ended jobs of a comparison, the newest ones."""
PERIOD_S = 30.0
FIRST_AFTER_S = 600.0
"""Time for which a process must have led before it begins a comparison: after a start there is more urgent work."""
PREPARATION_S_MAX = 1800.0
_MEMORY_BYTES, _CPU_S = 2**30, 600
"""Limits of the process that reads the recorded jobs: memory beyond its libraries, and CPU time."""
_OWNER = "ebbtide"


def load_recorded_period(store: ServiceStore, to_s: float) -> RecordedPeriod:
    """Return what was recorded in the days before `to_s`.

    Raises:
        NothingRecordedError: it is not enough to simulate. The message says what is missing.
    """
    snapshot, from_s = store.load().snapshot, to_s - RECORDED_S
    ended = store.find_ended_jobs(JobQuery(since_s=from_s, until_s=to_s), after=None, limit=JOBS_MAX)
    jobs = {job.id: job for job in (*ended, *snapshot.jobs.values())}
    readings = {name: store.list_readings(name, since_s=from_s) for name in snapshot.pools}
    return build_recorded_period(snapshot, jobs.values(), readings, from_s=from_s, to_s=to_s)


class ComparisonPreparation:
    """The process that prepares a comparison.

    Args:
        url: the database, which the process opens itself.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool: ProcessPool | None = None
        self._result: Future[str] | None = None

    def poll(self, comparison: DailyComparison) -> str | None:
        """Start to prepare the comparison, or return the result: why it is skipped, or an empty string once its
        simulation is queued. None: not known yet.

        Raises:
            Exception: the preparation failed.
        """
        if self._result is None:
            self._pool = ProcessPool(1, _limit_process)
            self._result = self._pool.submit(prepare_comparison, self._url, comparison)
        if not self._result.done():
            return None
        result = self._result
        self.close()
        return result.result()

    def close(self) -> None:
        """End the process, in the middle of its work if need be."""
        if self._pool is not None:
            self._pool.kill()
        self._pool = self._result = None


def _limit_process() -> None:
    os.nice(NICENESS)
    # Libraries reserve address space for their threads when they are loaded, which is before.
    memory_bytes = psutil.Process().memory_info().vms + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S + 5))


def prepare_comparison(url: str, comparison: DailyComparison) -> str:
    """Queue the simulation of the comparison. Return why there is nothing to simulate, or an empty string.

    Raises:
        ValueError: the recorded jobs cannot be simulated.
    """
    store = SqlStore(url)
    try:
        period = load_recorded_period(store, comparison.to_s)
        jobs = validate_input_files(period.files, COMPARED_POLICIES)
        task = SimulationTask(
            id=comparison.simulation_id,
            owner=_OWNER,
            owner_id=COMPARISON_OWNER_ID,
            created_at_s=comparison.to_s,
            policies=COMPARED_POLICIES,
            seed=0,
            jobs_total=jobs * len(COMPARED_POLICIES),
            description="\n".join((COMPARISON_TITLE, *period.differences)),
        )
        if store.simulations.get_task(task.id) is None:
            store.simulations.create(task, period.files)
    except NothingRecordedError as error:
        return str(error)
    finally:
        store.close()
    return ""


class DailyComparisons:
    """Begins and records one comparison a day while this process leads.

    Args:
        epoch: returns the epoch of the lease; 0 while this process does not lead.
        policy: name of the policy set in use.
        on_ended: called with the state of each comparison that ends.
        begins: whether to begin comparisons. Without, those that are under way are ended.
    """

    def __init__(
        self,
        store: ServiceStore,
        preparation: ComparisonPreparation,
        *,
        clock: Clock,
        epoch: Callable[[], int],
        policy: str,
        on_ended: Callable[[str], None],
        begins: bool = True,
    ) -> None:
        self._begins = begins
        self._store = store
        self._preparation = preparation
        self._clock = clock
        self._epoch = epoch
        self._policy = policy
        self._on_ended = on_ended
        self._leading_epoch = 0
        self._leading_since_s = 0.0
        self._prepares: tuple[int, float] | None = None

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set."""
        try:
            while not stop.wait(PERIOD_S):
                try:
                    self.step()
                except UnavailableError:
                    pass  # the control loop logs the outage
                except Exception:
                    log.exception("the daily comparison of savings could not go on; it is tried again")
        finally:
            self._stop_preparing()

    def step(self) -> None:
        """Do what is due, if this process leads.

        Raises:
            UnavailableError: the database does not respond.
        """
        now_s, epoch = self._clock.now_s(), self._epoch()
        if epoch != self._leading_epoch:
            self._leading_epoch, self._leading_since_s = epoch, now_s
            self._stop_preparing()
        if epoch == 0:
            return
        with suppress(FencedError):  # the new leader continues
            for comparison in self._store.comparisons.list_running():
                self._advance(comparison, now_s)
            is_due = self._begins and now_s >= self._leading_since_s + FIRST_AFTER_S
            if is_due and self._store.comparisons.get(find_day(now_s)) is None:
                self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        day_s, wanted = find_day(now_s), POLICY_BY_VARIANT[Variant.TODAY]
        name = datetime.fromtimestamp(day_s, UTC).strftime("sim-savings-%Y-%m-%d")
        comparison = DailyComparison(day_s, now_s, ComparisonState.RUNNING, name)
        if self._policy == wanted:
            self._store.comparisons.put(comparison, epoch=self._leading_epoch)
            self._advance(comparison, now_s)
        else:
            reason = f"the comparison needs the policy set {wanted}, and this service uses {self._policy}"
            self._end(comparison, ComparisonState.SKIPPED, now_s, reason)

    def _advance(self, comparison: DailyComparison, now_s: float) -> None:
        end = partial(self._end, comparison, now_s=now_s)
        task = self._store.simulations.get_task(comparison.simulation_id)
        if task is not None and task.state is TaskState.SUCCEEDED:
            self._record_results(comparison, task, now_s)
        elif task is not None and task.state in (TaskState.FAILED, TaskState.CANCELLED):
            end(ComparisonState.FAILED, reason=task.reason or f"its simulation was {task.state}")
        elif now_s >= comparison.to_s + DAY_S:
            self._store.simulations.cancel(comparison.simulation_id, now_s=now_s)
            end(
                ComparisonState.FAILED,
                reason="it did not end within a day. Check that an API process runs, and that "
                "EBBTIDE_SIMULATIONS_AT_ONCE is 1 or more",
            )
        elif task is None:
            self._prepare(comparison, now_s)

    def _prepare(self, comparison: DailyComparison, now_s: float) -> None:
        if self._prepares is None or self._prepares[0] != comparison.day_s:
            self._stop_preparing()
            self._prepares = (comparison.day_s, now_s)
        try:
            skipped = self._preparation.poll(comparison)
        except UnavailableError:
            self._prepares = None
            raise
        except Exception as error:
            # Another leader may have queued the simulation meanwhile.
            if self._store.simulations.get_task(comparison.simulation_id) is None:
                self._end(comparison, ComparisonState.FAILED, now_s, str(error) or type(error).__name__)
            return
        if skipped:
            self._end(comparison, ComparisonState.SKIPPED, now_s, skipped)
        elif skipped is not None:
            self._prepares = None
        elif now_s >= self._prepares[1] + PREPARATION_S_MAX:
            reason = f"reading the recorded jobs took longer than {PREPARATION_S_MAX:.0f} s"
            self._end(comparison, ComparisonState.FAILED, now_s, reason)

    def _record_results(self, comparison: DailyComparison, task: SimulationTask, now_s: float) -> None:
        report = self._store.simulations.get_report(task.id)
        assert report is not None, "a succeeded simulation has a report"
        differences = tuple(task.description.splitlines()[1:])
        found = replace(comparison, differences=differences, outcomes=read_outcomes(report))
        self._end(found, ComparisonState.SUCCEEDED, now_s)

    def _end(self, comparison: DailyComparison, state: ComparisonState, now_s: float, reason: str = "") -> None:
        self._stop_preparing()
        ended = replace(comparison, state=state, reason=reason, ended_at_s=now_s)
        self._store.comparisons.put(ended, epoch=self._leading_epoch)
        self._on_ended(state.value)
        if state is ComparisonState.FAILED:
            log.warning("the comparison of savings of the day that began at %d failed: %s", ended.day_s, reason)

    def _stop_preparing(self) -> None:
        self._prepares = None
        self._preparation.close()
