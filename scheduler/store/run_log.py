"""What an executor whose ranks report over the network has to remember."""

from __future__ import annotations

from typing import Protocol

from scheduler.domain.agent_report import AgentReport, BegunRun, Doom
from scheduler.domain.observation import Run


class RunLog(Protocol):
    """Begun runs by job and generation, and the newest report of each agent. Small: ended runs are forgotten.
    Everything may raise UnavailableError."""

    def begin(self, run: BegunRun, *, epoch: int) -> bool:
        """From now on the ranks of this generation may be started. False where that was said before.

        Raises:
            FencedError: the lease has another epoch; nothing was written.
        """

    def doom(self, job_id: str, generation: int, doom: Doom, *, epoch: int) -> None:
        """From now on this stands for the run's doom, in place of an earlier one. Nothing where it is not known.

        Raises:
            FencedError: as `begin`.
        """

    def end(self, run: Run, *, epoch: int) -> None:
        """Keep how a begun run ended, once for all: what is said later changes nothing. Nothing where it is not known.

        Raises:
            FencedError: as `begin`.
        """

    def begun(self) -> tuple[BegunRun, ...]:
        """All runs that were begun and not forgotten, by job and generation."""

    def begun_of(self, job_id: str) -> tuple[BegunRun, ...]:
        """Those of one job, by generation."""

    def report(self, *reports: AgentReport) -> None:
        """Each takes the place of its agent's report before; one that is older than that says nothing."""

    def report_of(self, job_id: str, node: str) -> AgentReport | None:
        """The newest report of the job's agent on that node."""

    def reports(self) -> tuple[AgentReport, ...]:
        """The newest report of each agent, by job and node."""

    def forget(self, job_id: str, *, up_to_generation: int, epoch: int) -> None:
        """Drop the begun runs of these generations, and the reports of agents that have nothing newer to tell.

        Raises:
            FencedError: as `begin`. Who led once does not know of the runs that others have begun since.
        """
