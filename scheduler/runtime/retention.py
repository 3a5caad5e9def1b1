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
from scheduler.runtime.outage import PAUSE_S_MAX
from scheduler.store.front import HistoryLog
from scheduler.store.protocol import FencedError, UnavailableError
from scheduler.store.sql import SqlStore

DAY_S = 86_400.0
LOGS = "logs"
"""What is counted for a job whose logs went."""


@dataclass(frozen=True, slots=True)
class Kept:
    """For how long, in s: rows of each log, and what the ranks of a job have printed after its end. What is not named
    is kept for ever; None: so are logs of jobs."""

    rows_s: Mapping[HistoryLog, float]
    logs_s: float | None = None


@dataclass(frozen=True, slots=True)
class Stride:
    """In each step up to `rows` of each log and the logs of up to `jobs` jobs go; `pause_s` between two steps, `rest_s`
    between two rounds."""

    rows: int = 500
    jobs: int = 20
    pause_s: float = 1.0
    rest_s: float = DAY_S


class Retention:
    """`epoch` is that of the lease, 0 for who does not lead. `root`: where logs of jobs lie, None: not here. `note` is
    told what went, by its kind."""

    def __init__(
        self,
        store: SqlStore,
        kept: Kept,
        *,
        clock: Clock,
        epoch: Callable[[], int],
        root: RunRoot | None = None,
        note: Callable[[str, int], None],
        stride: Stride | None = None,
    ) -> None:
        self._store = store
        self._kept = kept
        self._clock = clock
        self._epoch = epoch
        self._root = root
        self._note = note
        self._stride = stride or Stride()
        self._rests_until_s = float("-inf")
        self._jobs: Iterator[str] | None = None

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set."""
        while not stop.is_set():
            pause_s = self._stride.pause_s
            try:
                with suppress(FencedError):  # who leads now goes on with it
                    self.step()
            except UnavailableError:
                pause_s = PAUSE_S_MAX  # the loop that decides says so, and nobody waits for this one
            stop.wait(pause_s)

    def step(self) -> None:
        """Raises FencedError, UnavailableError."""
        now_s, epoch = self._clock.now_s(), self._epoch()
        if epoch == 0 or now_s < self._rests_until_s:
            return
        are_last = [self._remove(log, now_s - kept_s, epoch) for log, kept_s in self._kept.rows_s.items()]
        is_last = self._remove_logs(now_s)
        if is_last and all(are_last):
            self._store.sweep.tell(now_s=now_s, epoch=epoch)
            self._rests_until_s, self._jobs = now_s + self._stride.rest_s, None

    def _remove(self, log: HistoryLog, before_s: float, epoch: int) -> bool:
        """Whether nothing is left to remove."""
        done = self._store.sweep.remove(log, before_s=before_s, rows_max=self._stride.rows, epoch=epoch)
        self._note(log.value, done.rows)
        return done.is_last

    def _remove_logs(self, now_s: float) -> bool:
        """Likewise. What is found of no job, or of one that lives, stays."""
        if self._root is None or self._kept.logs_s is None:
            return True
        if self._jobs is None:
            self._jobs = self._root.jobs()
        looked_at = list(islice(self._jobs, self._stride.jobs))
        for job_id in looked_at:
            job = self._store.ended_job(job_id)
            if job is not None and job.state_since_s < now_s - self._kept.logs_s:
                self._note(LOGS, self._root.remove_runs(job_id))
        return len(looked_at) < self._stride.jobs

    @contextmanager
    def beside(self, stop: threading.Event) -> Iterator[None]:
        """Within it, it runs; `stop` is set at its end."""
        thread = threading.Thread(target=self.run, args=(stop,), name="retention")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
