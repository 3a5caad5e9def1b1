"""Sight: what a principal may see of the record. Whoever reads all queues sees everything; of another's sight, jobs of
queues that it may not read are gone, and where a text names one, it says so without the name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from api.identity.principal import Principal, Role
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot

HIDDEN = "a job of another queue"
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]")


@dataclass(frozen=True, slots=True)
class Sight:
    """`ended_job` finds jobs that have left `snapshot`; what was found out is kept for as long as this lives."""

    principal: Principal
    snapshot: Snapshot
    ended_job: Callable[[str], Job | None]
    _hidden: dict[str, bool] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.principal.may(Role.VIEWER)

    def job(self, job: Job) -> bool:
        return self.principal.may(Role.VIEWER, job.spec.queue)

    def subject(self, name: str) -> bool:
        """Whether events and decisions about it may be seen: jobs of its queues, and what is there of the fleet."""
        if self.is_whole:
            return True
        if job := self._found(name):
            return self.job(job)
        snapshot = self.snapshot
        if name in snapshot.queues:
            return self.principal.may(Role.VIEWER, name)
        return name in snapshot.nodes or name in snapshot.pools

    def shown(self, job: Job) -> Job:
        """The job with what may be seen of its message."""
        return job if self.is_whole else replace(job, message=self.redacted(job.message))

    def redacted(self, value: Any) -> Any:
        """`value` (plain JSON) without the ids of jobs that may not be seen, in keys or in texts."""
        if self.is_whole:
            return value
        if isinstance(value, str):
            return _NAMES.sub(lambda found: HIDDEN if self._hides(found[0]) else found[0], value)
        if isinstance(value, list | tuple):
            return [self.redacted(each) for each in value]
        if isinstance(value, dict):
            return self._redacted_object(value)
        return value

    def _redacted_object(self, value: dict[str, Any]) -> dict[str, Any]:
        """Numbers of several hidden jobs add up: what they hold together is no secret."""
        shown: dict[str, Any] = {}
        for key, each in value.items():
            name, told = self.redacted(key), self.redacted(each)
            both_count = isinstance(told, int | float) and isinstance(shown.get(name), int | float)
            shown[name] = shown[name] + told if both_count else told
        return shown

    def _hides(self, name: str) -> bool:
        if name not in self._hidden:
            job = self._found(name)
            self._hidden[name] = job is not None and not self.job(job)
        return self._hidden[name]

    def _found(self, name: str) -> Job | None:
        job = self.snapshot.jobs.get(name)
        if job is None and "-" in name and name not in self.snapshot.nodes:
            job = self.ended_job(name)
        return job
