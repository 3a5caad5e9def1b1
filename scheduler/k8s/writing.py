"""What the writers of custom resources share: the world they tell of, fencing, and when a status is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.domain.job import Job
from scheduler.domain.loan import Loan
from scheduler.domain.reason import Reason
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.intake import Resources, Taken
from scheduler.k8s.kinds import EPOCH_ANNOTATION, Kind
from scheduler.k8s.resources.metadata import Metadata, Resource, metadata, part, time_s
from scheduler.k8s.steps import Steps, merge_patch, patched, status_patched
from scheduler.store.protocol import FencedError

SLOW_S = 60.0
"""What changes all the time, such as progress, is written at most so often for each resource."""
_SLOW = ("asOf", "message", "progress", "demandGpus")


@dataclass(frozen=True, slots=True)
class Retention:
    """How long what has ended stays to be seen: ElasticJobs of jobs from HTTP, and Loans."""

    jobs_s: float = 86_400.0
    loans_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class World:
    """All that is told of. `taken` was made of no later snapshot than `snapshot`.

    `waiting` is that of the tick which made the snapshot. `ended_jobs` and `ended_loans`, by id, have left it.
    `settled` are ids of commands that went into it, `podded` jobs that still have pods, by namespace and id.
    ElasticJobs of jobs without a namespace of their own are made in `job_namespace`.
    """

    snapshot: Snapshot
    taken: Taken
    now_s: float
    epoch: int
    job_namespace: str
    waiting: Mapping[str, Reason] = field(default_factory=dict)
    ended_jobs: Mapping[str, Job] = field(default_factory=dict)
    ended_loans: Mapping[str, Loan] = field(default_factory=dict)
    settled: Collection[str] = ()
    podded: Collection[tuple[str, str]] = ()
    retention: Retention = Retention()

    @property
    def resources(self) -> Resources:
        """Those that were taken in, and none that have come since: nobody has judged them yet."""
        return self.taken.resources

    def meta(self, resource: Resource) -> Metadata:
        """Its metadata, if it is ours to write.

        Raises:
            FencedError: a later leader has written it.
        """
        meta = metadata(resource)
        if meta.epoch > self.epoch:
            raise FencedError(f"{meta.name} was written in epoch {meta.epoch}, this leader's is {self.epoch}")
        return meta

    @property
    def stamp(self) -> dict[str, str]:
        """Annotations of all that we write."""
        return {EPOCH_ANNOTATION: str(self.epoch)}

    def is_older(self, text: object, than_s: float) -> bool:
        """Whether a time in a resource has passed for so long; one that is no time has not."""
        at_s = time_s(text)
        return at_s is not None and self.now_s - at_s >= than_s


def keep(kind: Kind, meta: Metadata, finalizer: str, stamp: Mapping[str, str], **more: Any) -> Steps:
    """Have the finalizer on it, and `more` metadata, so that we see it deleted."""
    if meta.is_deleting or finalizer in meta.finalizers:
        return ()
    return _finalize(kind, meta, [*meta.finalizers, finalizer], {"annotations": dict(stamp), **more})


def let_go(kind: Kind, meta: Metadata, finalizer: str) -> Steps:
    rest = [name for name in meta.finalizers if name != finalizer]
    return () if len(rest) == len(meta.finalizers) else _finalize(kind, meta, rest, {})


def _finalize(kind: Kind, meta: Metadata, finalizers: list[str], more: Mapping[str, Any]) -> Steps:
    return (patched(kind, meta, {"metadata": {"finalizers": finalizers, **more}}),)


def status_steps(kind: Kind, resource: Resource, status: dict[str, Any], world: World) -> Steps:
    """Write the status, if it says anything new: at once if it is more than what changes all the time."""
    before = part(resource, "status")
    change = merge_patch(before, status)
    if change.keys() <= {"asOf"}:
        return ()
    is_urgent = merge_patch(_apart(before), _apart(status)) != {}
    if not is_urgent and time_s(before.get("asOf")) is not None and not world.is_older(before.get("asOf"), SLOW_S):
        return ()
    return (status_patched(kind, metadata(resource), change),)


def _apart(status: Mapping[str, Any]) -> dict[str, Any]:
    """The status without what changes all the time, messages of conditions among it."""
    rest = {name: value for name, value in status.items() if name not in _SLOW}
    found = rest.get("conditions")
    if isinstance(found, list):
        keys = ("type", "status", "reason", "observedGeneration")
        rest["conditions"] = [[each.get(key) for key in keys] for each in found if isinstance(each, Mapping)]
    return rest
