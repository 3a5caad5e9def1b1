"""What an executor whose ranks report over the network has to remember. Two implementations, one contract."""

from __future__ import annotations

import threading
from typing import Protocol

from scheduler.domain.agent_report import AgentReport, BegunRun
from scheduler.store.protocol import FencedError


class RunLog(Protocol):
    """Begun runs by job and generation, and the newest report of each agent. Small: ended runs are forgotten."""

    def begin(self, run: BegunRun, *, epoch: int) -> bool:
        """From now on the ranks of this generation may be started. False where that was said before.

        Raises:
            FencedError: the lease has another epoch; nothing was written.
        """

    def begun(self) -> tuple[BegunRun, ...]:
        """All runs that were begun and not forgotten, by job and generation."""

    def begun_of(self, job_id: str) -> tuple[BegunRun, ...]:
        """Those of one job, by generation."""

    def report(self, report: AgentReport) -> None:
        """Take the place of the agent's report before; one that is older than that says nothing."""

    def reports(self) -> tuple[AgentReport, ...]:
        """The newest report of each agent, by job and node."""

    def forget(self, job_id: str, *, up_to_generation: int) -> None:
        """Drop the begun runs of these generations, and the reports of agents that have nothing newer to tell."""


class MemoryRunLog:
    """For tests. Its lease has the epoch that `lead` was last given."""

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
            if epoch != self._epoch:
                raise FencedError(f"epoch {epoch} no longer leads; nothing was written")
            key = (run.job_id, run.generation)
            return self._begun.setdefault(key, run) is run

    def begun(self) -> tuple[BegunRun, ...]:
        with self._lock:
            return tuple(self._begun[key] for key in sorted(self._begun))

    def begun_of(self, job_id: str) -> tuple[BegunRun, ...]:
        return tuple(run for run in self.begun() if run.job_id == job_id)

    def report(self, report: AgentReport) -> None:
        with self._lock:
            key = (report.job_id, report.node)
            known = self._reports.get(key)
            if known is None or known.at_s <= report.at_s:
                self._reports[key] = report

    def reports(self) -> tuple[AgentReport, ...]:
        with self._lock:
            return tuple(self._reports[key] for key in sorted(self._reports))

    def forget(self, job_id: str, *, up_to_generation: int) -> None:
        with self._lock:
            for key in [key for key in self._begun if key[0] == job_id and key[1] <= up_to_generation]:
                del self._begun[key]
            for name, known in list(self._reports.items()):
                if known.job_id == job_id and known.generation <= up_to_generation:
                    del self._reports[name]
