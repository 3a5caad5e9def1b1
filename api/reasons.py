"""Reasons: why jobs wait, for pages that ask again and again. One rehearsal is shared by all who ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from api.rehearsal import rehearse
from scheduler.core.explain import Explanation, explain
from scheduler.domain.reason import Reason
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.policy_set import PolicySet

SHARE = 0.05
"""Of one core, that is the most that rehearsals for those who look may take."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the next tick would say in the state `snapshot`: `reasons` by job id."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    _explained: dict[str, Explanation] = field(default_factory=dict)

    def explained(self, job_id: str) -> Explanation:
        """Kept, because each looks at every job. Raises KeyError where the snapshot has no such job."""
        if job_id not in self._explained:
            self._explained[job_id] = explain(self.snapshot, self.reasons, job_id)
        return self._explained[job_id]


class Reasons:
    """Safe to use from several threads."""

    def __init__(self, policies: PolicySet, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._policies = policies
        self._clock_s = clock_s
        self._turn = threading.Lock()
        self._told = Waiting()
        self._next_at_s = 0.0

    def look(self, committed: Snapshot) -> Waiting:
        """The reasons in the newest committed state; in one shortly before, where a rehearsal is dear (it takes as long
        as a tick, and runs at most for `SHARE` of the time) or another thread is at it."""
        if not self._turn.acquire(blocking=not self._told.snapshot.generation):
            return self._told
        try:
            begun_s = self._clock_s()
            if committed.generation != self._told.snapshot.generation and begun_s >= self._next_at_s:
                self._told = Waiting(committed, rehearse(committed, self._policies).report.waiting)
                ended_s = self._clock_s()
                self._next_at_s = ended_s + (ended_s - begun_s) / SHARE
        finally:
            self._turn.release()
        return self._told
