"""MemoryRunLog: a run log for tests without a database. It passes the contract tests of SqlRunLog."""

from __future__ import annotations

import threading
from dataclasses import replace

from scheduler.domain.observation import AgentReport, BegunRun, KillOrder, Run
from scheduler.store.protocol import FencedError


class MemoryRunLog:
    """RunLog whose lease has the epoch set by `set_epoch`."""

    def __init__(self, *, epoch: int = 1) -> None:
        self._lock = threading.Lock()
        self._epoch = epoch
        self._begun: dict[tuple[str, int], BegunRun] = {}
        self._reports: dict[tuple[str, str], AgentReport] = {}

    def set_epoch(self, epoch: int) -> None:
        with self._lock:
            self._epoch = epoch

    def begin_run(self, run: BegunRun, *, epoch: int) -> bool:
        with self._lock:
            self._fence(epoch)
            key = (run.job_id, run.generation)
            return self._begun.setdefault(key, run) is run

    def record_kill_order(self, job_id: str, generation: int, kill_order: KillOrder, *, epoch: int) -> None:
        with self._lock:
            self._fence(epoch)
            if known := self._begun.get((job_id, generation)):
                self._begun[job_id, generation] = replace(known, doom=kill_order)

    def record_end(self, run: Run, *, epoch: int) -> None:
        with self._lock:
            self._fence(epoch)
            known = self._begun.get((run.job_id, run.generation))
            if known is not None and known.end is None:
                self._begun[run.job_id, run.generation] = replace(known, end=run)

    def list_begun_runs(self) -> tuple[BegunRun, ...]:
        with self._lock:
            return tuple(self._begun[key] for key in sorted(self._begun))

    def list_begun_runs_of(self, job_id: str) -> tuple[BegunRun, ...]:
        return tuple(run for run in self.list_begun_runs() if run.job_id == job_id)

    def record_reports(self, *reports: AgentReport) -> None:
        with self._lock:
            for report in reports:
                known = self._reports.setdefault((report.job_id, report.node), report)
                if known.at_s <= report.at_s:
                    self._reports[report.job_id, report.node] = report

    def get_report(self, job_id: str, node: str) -> AgentReport | None:
        with self._lock:
            return self._reports.get((job_id, node))

    def list_reports(self) -> tuple[AgentReport, ...]:
        with self._lock:
            return tuple(self._reports[key] for key in sorted(self._reports))

    def delete_runs(self, job_id: str, *, up_to_generation: int, epoch: int) -> None:
        with self._lock:
            self._fence(epoch)
            for key in [key for key in self._begun if key[0] == job_id and key[1] <= up_to_generation]:
                del self._begun[key]
            for name, known in list(self._reports.items()):
                if known.job_id == job_id and known.generation <= up_to_generation:
                    del self._reports[name]

    def _fence(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise FencedError(f"the lease no longer has epoch {epoch}; nothing was written")
