"""Retention: the leader deletes history, log files and archives that are older than their retention period.

It runs in its own thread, so that no tick waits for it. A round deletes one batch of each log and of a few job folders
per second until nothing old is left, writes an audit entry, and waits for a day.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from scheduler.executors.stored_logs import LogRoot
from scheduler.runtime.clock import Clock
from scheduler.runtime.controller import RETRY_PAUSE_S_MAX
from scheduler.store.api_protocol import HistoryLog
from scheduler.store.archives import ArchiveStore
from scheduler.store.protocol import FencedError, UnavailableError
from scheduler.store.sql_store import SqlStore

DAY_S = 86_400.0
JOB_LOGS = "logs"
"""Kind under which deleted log files of jobs are counted."""
ARCHIVES = "archives"
"""Kind under which deleted archives of working directories are counted."""


@dataclass(frozen=True, slots=True)
class RetentionPeriods:
    """Retention periods in seconds: of rows by log, of log files after the end of their job, and of unused archives.

    Logs that are not named are kept forever, and so are log files if `logs_s` and archives if `archives_s` is None.
    """

    rows_s: Mapping[HistoryLog, float]
    logs_s: float | None = None
    archives_s: float | None = None


@dataclass(frozen=True, slots=True)
class DeletionLimits:
    """Limits of one step: rows per log, and jobs whose log files are deleted.

    `pause_s` is the time between steps, `round_interval_s` the time between rounds.
    """

    rows: int = 500
    jobs: int = 20
    pause_s: float = 1.0
    round_interval_s: float = DAY_S


class Retention:
    """Deletion of old rows, log files and archives while this process leads.

    Args:
        epoch: returns the epoch of the lease; 0 while this process does not lead.
        run_root: the folder of log files; None if they are not on this machine.
        archives: the archives of working directories; None if they are not on this machine.
        on_deleted: called with a kind and the number of deleted items.
    """

    def __init__(
        self,
        store: SqlStore,
        periods: RetentionPeriods,
        *,
        clock: Clock,
        epoch: Callable[[], int],
        run_root: LogRoot | None = None,
        archives: ArchiveStore | None = None,
        on_deleted: Callable[[str, int], None],
        limits: DeletionLimits | None = None,
    ) -> None:
        self._store = store
        self._periods = periods
        self._clock = clock
        self._epoch = epoch
        self._run_root = run_root
        self._archives = archives
        self._on_deleted = on_deleted
        self._limits = limits or DeletionLimits()
        self._next_round_s = float("-inf")
        self._remaining_jobs: Iterator[str] | None = None

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set."""
        while not stop.is_set():
            pause_s = self._limits.pause_s
            try:
                with suppress(FencedError):  # the new leader continues
                    self.step()
            except UnavailableError:
                pause_s = RETRY_PAUSE_S_MAX  # the control loop logs the outage
            stop.wait(pause_s)

    def step(self) -> None:
        """Delete one batch, if this process leads and a round is due.

        Raises:
            FencedError: another process leads now.
            UnavailableError: the database does not respond.
        """
        now_s, epoch = self._clock.now_s(), self._epoch()
        if epoch == 0 or now_s < self._next_round_s:
            return
        completed = [self._delete_rows(log, now_s - period_s, epoch) for log, period_s in self._periods.rows_s.items()]
        completed.append(self._delete_job_logs(now_s))
        if all(completed):
            self._delete_archives(now_s)
            self._store.retention.audit_deletions(now_s=now_s, epoch=epoch)
            self._next_round_s, self._remaining_jobs = now_s + self._limits.round_interval_s, None

    def _delete_rows(self, log: HistoryLog, before_s: float, epoch: int) -> bool:
        """Delete a batch of rows and return whether no old rows are left."""
        batch = self._store.retention.delete_old_rows(log, before_s=before_s, rows_max=self._limits.rows, epoch=epoch)
        self._on_deleted(log.value, batch.rows)
        return batch.is_complete

    def _delete_job_logs(self, now_s: float) -> bool:
        """Delete log files of a batch of ended jobs and return whether it was the last batch."""
        if self._run_root is None or self._periods.logs_s is None:
            return True
        if self._remaining_jobs is None:
            self._remaining_jobs = self._run_root.list_jobs()
        job_ids = list(islice(self._remaining_jobs, self._limits.jobs))
        live = self._store.load().snapshot.jobs if job_ids else {}
        for job_id in job_ids:
            if job_id in live:
                continue
            job = self._store.get_ended_job(job_id)
            # The record of the job may have been deleted before its logs.
            since_s = self._run_root.find_last_write_s(job_id) if job is None else job.state_since_s
            if since_s < now_s - self._periods.logs_s:
                self._on_deleted(JOB_LOGS, self._run_root.delete_job(job_id))
        return len(job_ids) < self._limits.jobs

    def _delete_archives(self, now_s: float) -> None:
        """Delete archives that no job used within the retention period."""
        if self._archives is None or self._periods.archives_s is None:
            return
        jobs = self._store.load().snapshot.jobs.values()
        live = {job.spec.program.archive for job in jobs if job.spec.program.archive}
        deleted = self._archives.delete_unused(live, now_s=now_s, retention_s=self._periods.archives_s)
        self._on_deleted(ARCHIVES, deleted)
