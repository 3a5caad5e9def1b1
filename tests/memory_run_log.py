"""MemoryRunLog: a run log for tests that need no database. It keeps the contract that SqlRunLog keeps."""

from __future__ import annotations

import threading
from dataclasses import replace

from scheduler.domain.agent_report import AgentReport, BegunRun, Doom
from scheduler.domain.observation import Run
from scheduler.store.protocol import FencedError


class MemoryRunLog:
    """Its lease has the epoch that `lead` was last given."""

    def __init__(self, *, epoch: int = 1) -> None:
        self._lock = threading.Lock()
        self._epoch = epoch
        self._begun: dict[tuple[str, int], BegunRun] = {}
        self._reports: dict[tuple[str, str], AgentReport] = {}

    def lead(self, epoch: int) -> None:
        with self._lock:
            self._epoch = epoch

    def begin(self, run: BegunRun, *, epoch: int) -> bool:
        with self._lock:
            self._fence(epoch)
            key = (run.job_id, run.generation)
            return self._begun.setdefault(key, run) is run

    def doom(self, job_id: str, generation: int, doom: Doom, *, epoch: int) -> None:
        with self._lock:
            self._fence(epoch)
            if known := self._begun.get((job_id, generation)):
                self._begun[job_id, generation] = replace(known, doom=doom)

    def end(self, run: Run, *, epoch: int) -> None:
        with self._lock:
            self._fence(epoch)
            known = self._begun.get((run.job_id, run.generation))
            if known is not None and known.end is None:
                self._begun[run.job_id, run.generation] = replace(known, end=run)

    def begun(self) -> tuple[BegunRun, ...]:
        with self._lock:
            return tuple(self._begun[key] for key in sorted(self._begun))

    def begun_of(self, job_id: str) -> tuple[BegunRun, ...]:
        return tuple(run for run in self.begun() if run.job_id == job_id)

    def report(self, *reports: AgentReport) -> None:
        with self._lock:
            for report in reports:
                known = self._reports.setdefault((report.job_id, report.node), report)
                if known.at_s <= report.at_s:
                    self._reports[report.job_id, report.node] = report

    def report_of(self, job_id: str, node: str) -> AgentReport | None:
        with self._lock:
            return self._reports.get((job_id, node))

    def reports(self) -> tuple[AgentReport, ...]:
        with self._lock:
            return tuple(self._reports[key] for key in sorted(self._reports))

    def forget(self, job_id: str, *, up_to_generation: int, epoch: int) -> None:
        with self._lock:
            self._fence(epoch)
            for key in [key for key in self._begun if key[0] == job_id and key[1] <= up_to_generation]:
                del self._begun[key]
            for name, known in list(self._reports.items()):
                if known.job_id == job_id and known.generation <= up_to_generation:
                    del self._reports[name]

    def _fence(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise FencedError(f"epoch {epoch} no longer leads; nothing was written")
