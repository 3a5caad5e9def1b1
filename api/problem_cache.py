"""The problems of the newest state, found once for all clients that poll for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from api.explanations import CPU_SHARE_MAX
from api.http.dependencies import Service
from scheduler.domain.problems import Problem
from scheduler.domain.snapshot import Snapshot
from scheduler.runtime.problem_evidence import EvidenceReader
from scheduler.scheduling.problems.detection import find_problems

REFRESH_S = 5.0
"""Age at which problems are found again although no tick was committed: demand grows old, or the leader is gone."""


@dataclass(frozen=True, slots=True)
class FoundProblems:
    """Problems in the state of a generation, as of `at_s`."""

    generation: int = -1
    at_s: float = float("-inf")
    problems: tuple[Problem, ...] = ()

    def is_current(self, generation: int, now_s: float) -> bool:
        return self.generation == generation and now_s - self.at_s < REFRESH_S


@dataclass(slots=True)
class ProblemCache:
    """Cache of the problems that all clients share. Thread-safe.

    `clock_s` measures the cost of a refresh: all of them together use at most CPU_SHARE_MAX of one core.
    """

    clock_s: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _latest: FoundProblems = FoundProblems()
    _next_refresh_at_s: float = 0.0
    _evidence: EvidenceReader = field(default_factory=EvidenceReader)

    def read(self, service: Service, committed: Snapshot, now_s: float) -> FoundProblems:
        """Return the problems in the newest committed state, or slightly older ones while they are found again."""
        if self._latest.is_current(committed.generation, now_s):
            return self._latest
        if not self._lock.acquire(blocking=self._latest.generation < 0):
            return self._latest
        try:
            started_s = self.clock_s()
            is_due = started_s >= self._next_refresh_at_s and not self._latest.is_current(committed.generation, now_s)
            if is_due:
                evidence = self._evidence.read(
                    service.store, service.policies, committed, now_s, has_leader=service.has_leader
                )
                self._latest = FoundProblems(committed.generation, now_s, find_problems(committed, evidence))
                ended_s = self.clock_s()
                self._next_refresh_at_s = ended_s + (ended_s - started_s) / CPU_SHARE_MAX
        finally:
            self._lock.release()
        return self._latest
