"""Store interfaces of submitted simulations, and of the daily comparisons that some of them compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from scheduler.domain.savings_comparison import DailyComparison
from scheduler.domain.simulation_task import SimulationFiles, SimulationTask

if TYPE_CHECKING:
    from scheduler.store.api_protocol import AuditEntry, IdempotencyKey


class SimulationStore(Protocol):
    """Submitted simulations with their input files and reports. Every method may raise UnavailableError.

    A runner claims a simulation and renews the claim while it runs. After the claim expires, another runner may start
    it again. Writes of a runner that has lost its claim are ignored. `audit` is written in the transaction of the
    change, unless nothing changes.
    """

    def create(
        self,
        task: SimulationTask,
        files: SimulationFiles,
        key: IdempotencyKey | None = None,
        *,
        audit: AuditEntry | None = None,
    ) -> None:
        """Store a queued simulation. Raises IdempotencyKeyUsedError."""

    def get_task(self, task_id: str) -> SimulationTask | None: ...

    def list_tasks(self, *, limit: int, before: int | None = None, owner_id: str = "") -> tuple[SimulationTask, ...]:
        """Return simulations with a number below `before`, newest first, of one owner or of all."""

    def count_live_tasks(self, owner_id: str) -> int:
        """Return how many of the owner's simulations have not ended."""

    def get_files(self, task_id: str) -> SimulationFiles | None: ...

    def get_report(self, task_id: str) -> dict[str, Any] | None: ...

    def cancel(self, task_id: str, *, now_s: float, audit: AuditEntry | None = None) -> SimulationTask | None:
        """Cancel the simulation unless it has ended. Its runner notices when it renews its claim."""

    def claim(self, holder: str, *, now_s: float, until_s: float) -> SimulationTask | None:
        """Claim the oldest simulation that is queued or whose claim has expired; None if there is none."""

    def renew_claim(self, task_id: str, holder: str, *, until_s: float, playing: str, jobs_done: int) -> bool:
        """Extend the claim and record the progress. False if `holder` no longer has the claim."""

    def requeue(self, task_id: str, holder: str, *, reason: str, counts_as_try: bool) -> None:
        """Put the simulation back in the queue."""

    def fail(self, task_id: str, holder: str, *, now_s: float, reason: str, tries: int) -> None: ...

    def finish(self, task_id: str, holder: str, report: Mapping[str, Any], *, now_s: float) -> None: ...

    def delete_ended(self, *, before_s: float) -> None:
        """Delete simulations that ended before that time."""


class DailyComparisonStore(Protocol):
    """The leader's comparisons, one a day. Every method may raise UnavailableError."""

    def get(self, day_s: int) -> DailyComparison | None: ...

    def list_days(self, *, from_s: float, to_s: float) -> tuple[DailyComparison, ...]:
        """Return the comparisons of days that begin in the time span, in order."""

    def list_running(self) -> tuple[DailyComparison, ...]:
        """Return the comparisons that have not ended, in order."""

    def put(self, comparison: DailyComparison, *, epoch: int) -> None:
        """Store the comparison of its day. Raises FencedError if the lease has another epoch."""
