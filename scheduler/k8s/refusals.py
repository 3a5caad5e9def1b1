"""Refusals: what the API server would not take of a job, so that it hears of it instead of waiting for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from random import Random

from scheduler.domain.job import Job
from scheduler.k8s.api_error import ApiError
from scheduler.k8s.pace import backoff_s

_NOT_THE_JOBS = ("exceeded quota", "cannot create resource", "cannot get resource", "cannot patch resource")
"""How the API server says that a namespace is full, or that the operator lacks a right. It has no codes for either."""

PAUSE_BASE_S, PAUSE_CAP_S = 2.0, 30.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Of the job's objects in one generation. `is_final`: the same object is refused again, whoever asks, whenever;
    others may be taken later. `is_fault`: the job is wrong, not its surroundings. `times`: so often in a row; it is
    left alone until `until_s`, on the monotonic clock."""

    generation: int
    why: str
    is_final: bool
    is_fault: bool
    times: int = 1
    until_s: float = 0.0


def refusal_of(generation: int, error: ApiError) -> Refusal | None:
    """None where the call may as well succeed the next time."""
    if not error.is_standing:
        return None
    is_fault = not (error.is_unadmitted or any(words in error.message for words in _NOT_THE_JOBS))
    return Refusal(generation, f"the API server refuses what it needs: {error.message}", error.is_invalid, is_fault)


class Refusals:
    """The last one of each job, as its objects were asked for. Used by several threads. A new leader knows none, and
    hears of them anew. What was refused is left alone for a while that grows, so that jobs which cannot run leave the
    pace of requests to those that can."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._rng = Random()
        self._lock = threading.Lock()
        self._known: dict[str, Refusal] = {}

    def note(self, job: Job, refusal: Refusal | None) -> None:
        """What became of asking for the job's objects; None where they were taken, or may be the next time."""
        before = self.of(job)
        with self._lock:
            if refusal is None:
                self._known.pop(job.id, None)
                return
            times = 1 if before is None else before.times + 1
            until_s = self._monotonic_s() + backoff_s(times, base_s=PAUSE_BASE_S, cap_s=PAUSE_CAP_S, rng=self._rng)
            self._known[job.id] = replace(refusal, times=times, until_s=until_s)

    def of(self, job: Job) -> Refusal | None:
        """What was refused of the present generation."""
        with self._lock:
            known = self._known.get(job.id)
        return known if known is not None and known.generation == job.allocation.generation else None

    def is_left_alone(self, job: Job) -> bool:
        refusal = self.of(job)
        return refusal is not None and self._monotonic_s() < refusal.until_s

    def keep(self, jobs: Container[str]) -> None:
        """Forget all others."""
        with self._lock:
            self._known = {job_id: known for job_id, known in self._known.items() if job_id in jobs}
