"""Shrinks a failing fault case to a small one that fails in the same way (delta debugging, Zeller, TSE 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from scheduler.simulator.campaign.case import FaultCase
from scheduler.simulator.campaign.checks import CaseViolation

T = TypeVar("T")
RUNS_MAX = 300


class CaseShrinker:
    """Removes parts of a case as long as it still violates the same invariant. Stops after `runs_max` runs."""

    def __init__(self, find_violations: Callable[[FaultCase], Sequence[CaseViolation]], *, runs_max: int = RUNS_MAX):
        self._find_violations = find_violations
        self._runs_left = runs_max

    def shrink(self, case: FaultCase, violation: CaseViolation) -> FaultCase:
        """Return a case without events, jobs, demand, queues and SQL store that the violation does not need."""
        in_memory = replace(case, uses_sql=False)
        if case.uses_sql and self._fails(in_memory, violation.code):
            case = in_memory
        if not violation.is_eventual:
            early = replace(case, events=tuple(event for event in case.events if event.at_s <= violation.at_s))
            early = replace(early, jobs=tuple(job for job in early.jobs if job.at_s <= violation.at_s))
            case = early if self._fails(early, violation.code) else case
        size = None
        while size != (size := _count_parts(case)):
            case = self._shrink_once(case, violation)
        return case

    def _shrink_once(self, case: FaultCase, violation: CaseViolation) -> FaultCase:
        code = violation.code
        kept_events = self._reduce(case.events, lambda kept: self._fails(replace(case, events=kept), code))
        case = replace(case, events=kept_events)
        kept_jobs = self._reduce(case.jobs, lambda kept: self._fails(replace(case, jobs=kept), code))
        case = replace(case, jobs=kept_jobs)
        kept_demand = self._reduce(case.demand, lambda kept: self._fails(replace(case, demand=kept), code))
        case = replace(case, demand=kept_demand)
        kept_queues = self._reduce(case.queues, lambda kept: self._fails(replace(case, queues=kept), code))
        return replace(case, queues=kept_queues)

    def _fails(self, case: FaultCase, code: str) -> bool:
        if self._runs_left <= 0:
            return False
        self._runs_left -= 1
        return any(violation.code == code for violation in self._find_violations(case))

    def _reduce(self, parts: tuple[T, ...], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
        """Return a subset that still fails and that fails no more without any one of its parts."""
        chunk = len(parts)
        while chunk and parts:
            for start in range(0, len(parts), chunk):
                kept = parts[:start] + parts[start + chunk :]
                if fails(kept):
                    parts = kept
                    break
            else:
                chunk //= 2
        return parts


def _count_parts(case: FaultCase) -> int:
    return len(case.events) + len(case.jobs) + len(case.demand) + len(case.queues)
