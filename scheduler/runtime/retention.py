"""Retention: while its process leads, what is older than it is to be kept goes, a little at a time.

A thread of its own, so that no tick waits for it. A round takes out all that is old enough, a slice of each log and a
few folders a second, tells the audit log what went, and rests for a day.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice

from scheduler.executors.local_records import RunRoot
from scheduler.runtime.clock import Clock
from scheduler.runtime.controller import RETRY_PAUSE_S_MAX
from scheduler.store.api_protocol import HistoryLog
from scheduler.store.protocol import FencedError, UnavailableError
from scheduler.store.sql_store import SqlStore

DAY_S = 86_400.0
JOB_LOGS = "logs"
"""What is counted for a job whose logs went."""


@dataclass(frozen=True, slots=True)
class RetentionPeriods:
    """For how long, in s: rows of each log, and what the ranks of a job have printed after its end. What is not named
    is kept for ever; None: so are logs of jobs."""

    rows_s: Mapping[HistoryLog, float]
    logs_s: float | None = None


@dataclass(frozen=True, slots=True)
class DeletionLimits:
    """In each step up to `rows` of each log and the logs of up to `jobs` jobs go; `pause_s` between two steps, `rest_s`
    between two rounds."""

    rows: int = 500
    jobs: int = 20
    pause_s: float = 1.0
    round_interval_s: float = DAY_S


class Retention:
    """`epoch` is that of the lease, 0 for who does not lead. `root`: where logs of jobs lie, None: not here. `note` is
    told what went, by its kind."""

    def __init__(
        self,
        store: SqlStore,
        periods: RetentionPeriods,
        *,
        clock: Clock,
        epoch: Callable[[], int],
        run_root: RunRoot | None = None,
        on_deleted: Callable[[str, int], None],
        limits: DeletionLimits | None = None,
    ) -> None:
        self._store = store
        self._periods = periods
        self._clock = clock
        self._epoch = epoch
        self._run_root = run_root
        self._on_deleted = on_deleted
        self._limits = limits or DeletionLimits()
        self._next_round_s = float("-inf")
        self._remaining_jobs: Iterator[str] | None = None

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set."""
        while not stop.is_set():
            pause_s = self._limits.pause_s
            try:
                with suppress(FencedError):  # who leads now goes on with it
                    self.step()
            except UnavailableError:
                pause_s = RETRY_PAUSE_S_MAX  # the loop that decides says so, and nobody waits for this one
            stop.wait(pause_s)

    def step(self) -> None:
        """Raises FencedError, UnavailableError."""
        now_s, epoch = self._clock.now_s(), self._epoch()
        if epoch == 0 or now_s < self._next_round_s:
            return
        are_last = [self._delete_rows(log, now_s - kept_s, epoch) for log, kept_s in self._periods.rows_s.items()]
        is_last = self._delete_job_logs(now_s)
        if is_last and all(are_last):
            self._store.retention.audit_deletions(now_s=now_s, epoch=epoch)
            self._next_round_s, self._remaining_jobs = now_s + self._limits.round_interval_s, None

    def _delete_rows(self, log: HistoryLog, before_s: float, epoch: int) -> bool:
        """Whether nothing is left to remove."""
        done = self._store.retention.delete_old_rows(log, before_s=before_s, rows_max=self._limits.rows, epoch=epoch)
        self._on_deleted(log.value, done.rows)
        return done.is_complete

    def _delete_job_logs(self, now_s: float) -> bool:
        """Likewise. What is found of no job, or of one that lives, stays."""
        if self._run_root is None or self._periods.logs_s is None:
            return True
        if self._remaining_jobs is None:
            self._remaining_jobs = self._run_root.list_jobs()
        looked_at = list(islice(self._remaining_jobs, self._limits.jobs))
        for job_id in looked_at:
            job = self._store.get_ended_job(job_id)
            if job is not None and job.state_since_s < now_s - self._periods.logs_s:
                self._on_deleted(JOB_LOGS, self._run_root.remove_runs(job_id))
        return len(looked_at) < self._limits.jobs

    @contextmanager
    def run_in_background(self, stop: threading.Event) -> Iterator[None]:
        """Within it, it runs; `stop` is set at its end."""
        thread = threading.Thread(target=self.run, args=(stop,), name="retention")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
