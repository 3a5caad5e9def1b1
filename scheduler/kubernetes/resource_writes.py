"""Steps: writes to custom resources and Events, as data. Whoever carries them out chooses nothing.

What the writers of custom resources share: the world they tell of, fencing, and when a status is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.domain.decisions import Reason
from scheduler.domain.fleet import Loan
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import EPOCH_ANNOTATION, ResourceKind
from scheduler.kubernetes.resources.meta import Metadata, Resource, get_mapping, parse_metadata, parse_time_s
from scheduler.kubernetes.spec_commands import ClusterResources, SpecCommands
from scheduler.store.protocol import FencedError


@dataclass(frozen=True, slots=True)
class Create:
    """An object that was not there. That one of its name is there by now is a failure like any other."""

    kind: ResourceKind
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Patch:
    """A JSON merge patch (RFC 7386) of an object, or of its status. A conflict where a `resource_version` is given and
    somebody else was first: it is decided anew."""

    kind: ResourceKind
    namespace: str
    name: str
    change: dict[str, Any]
    resource_version: str = ""
    status: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    kind: ResourceKind
    namespace: str
    name: str
    uid: str


Write = Create | Patch | Delete
Writes = tuple[Write, ...]
"""What concerns one object, in order: nothing of it is done after a step that fails."""


def build_patch(kind: ResourceKind, meta: Metadata, change: dict[str, Any]) -> Patch:
    """If it is still as it was when this was decided."""
    return Patch(kind, meta.namespace, meta.name, change, meta.resource_version)


def build_status_patch(kind: ResourceKind, meta: Metadata, status: dict[str, Any]) -> Patch:
    return Patch(kind, meta.namespace, meta.name, {"status": status}, status=True)


def compute_merge_patch(before: object, after: dict[str, Any]) -> dict[str, Any]:
    """The smallest merge patch that makes `before` into `after`. Neither null nor an empty object stands in `after`
    where a value is meant."""
    if not isinstance(before, dict):
        return after
    patch: dict[str, Any] = {name: None for name in before if name not in after and before[name] is not None}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := compute_merge_patch(old, value):
                patch[name] = inner
        elif old != value:
            patch[name] = value
    return patch


STATUS_REFRESH_S = 60.0
"""What changes all the time, such as progress, is written at most so often for each resource."""
_VOLATILE_FIELDS = ("asOf", "message", "progress", "demandGpus")


@dataclass(frozen=True, slots=True)
class Retention:
    """How long what has ended stays to be seen: ElasticJobs of jobs from HTTP, and Loans."""

    jobs_s: float = 86_400.0
    loans_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class PublishState:
    """All that is told of. `taken` was made of no later snapshot than `snapshot`.

    `waiting` is that of the tick which made the snapshot. `ended_jobs` and `ended_loans`, by id, have left it.
    `settled` are ids of commands that went into it, `podded` jobs that still have pods, by namespace and id.
    ElasticJobs of jobs without a namespace of their own are made in `job_namespace`.
    """

    snapshot: Snapshot
    spec_commands: SpecCommands
    now_s: float
    epoch: int
    job_namespace: str
    waiting_reasons: Mapping[str, Reason] = field(default_factory=dict)
    ended_jobs: Mapping[str, Job] = field(default_factory=dict)
    ended_loans: Mapping[str, Loan] = field(default_factory=dict)
    applied_command_ids: Collection[str] = ()
    jobs_with_pods: Collection[tuple[str, str]] = ()
    retention: Retention = Retention()

    @property
    def resources(self) -> ClusterResources:
        """Those that were taken in, and none that have come since: nobody has judged them yet."""
        return self.spec_commands.resources

    def read_metadata(self, resource: Resource) -> Metadata:
        """Its metadata, if it is ours to write.

        Raises:
            FencedError: a later leader has written it.
        """
        meta = parse_metadata(resource)
        if meta.epoch > self.epoch:
            raise FencedError(f"{meta.name} was written in epoch {meta.epoch}, this leader's is {self.epoch}")
        return meta

    @property
    def epoch_annotations(self) -> dict[str, str]:
        """Annotations of all that we write."""
        return {EPOCH_ANNOTATION: str(self.epoch)}

    def is_older_than(self, text: object, age_s: float) -> bool:
        """Whether a time in a resource has passed for so long; one that is no time has not."""
        at_s = parse_time_s(text)
        return at_s is not None and self.now_s - at_s >= age_s


def add_finalizer(
    kind: ResourceKind, meta: Metadata, finalizer: str, annotations: Mapping[str, str], **more: Any
) -> Writes:
    """Have the finalizer on it, and `more` metadata, so that we see it deleted."""
    if meta.is_deleting or finalizer in meta.finalizers:
        return ()
    return _patch_finalizers(kind, meta, [*meta.finalizers, finalizer], {"annotations": dict(annotations), **more})


def remove_finalizer(kind: ResourceKind, meta: Metadata, finalizer: str) -> Writes:
    rest = [name for name in meta.finalizers if name != finalizer]
    return () if len(rest) == len(meta.finalizers) else _patch_finalizers(kind, meta, rest, {})


def _patch_finalizers(kind: ResourceKind, meta: Metadata, finalizers: list[str], more: Mapping[str, Any]) -> Writes:
    return (build_patch(kind, meta, {"metadata": {"finalizers": finalizers, **more}}),)


def build_status_writes(kind: ResourceKind, resource: Resource, status: dict[str, Any], state: PublishState) -> Writes:
    """Write the status, if it says anything new: at once if it is more than what changes all the time."""
    before = get_mapping(resource, "status")
    change = compute_merge_patch(before, status)
    if change.keys() <= {"asOf"}:
        return ()
    is_urgent = compute_merge_patch(_without_volatile_fields(before), _without_volatile_fields(status)) != {}
    if (
        not is_urgent
        and parse_time_s(before.get("asOf")) is not None
        and not state.is_older_than(before.get("asOf"), STATUS_REFRESH_S)
    ):
        return ()
    return (build_status_patch(kind, parse_metadata(resource), change),)


def _without_volatile_fields(status: Mapping[str, Any]) -> dict[str, Any]:
    """The status without what changes all the time, messages of conditions among it."""
    rest = {name: value for name, value in status.items() if name not in _VOLATILE_FIELDS}
    found = rest.get("conditions")
    if isinstance(found, list):
        keys = ("type", "status", "reason", "observedGeneration")
        rest["conditions"] = [[each.get(key) for key in keys] for each in found if isinstance(each, Mapping)]
    return rest
