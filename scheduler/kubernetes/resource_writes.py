"""Writes to custom resources and Events as data, and the rules for finalizers, fencing and status updates."""

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
    """Create an object. An existing object of the same name is a failure."""

    kind: ResourceKind
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Patch:
    """A JSON merge patch (RFC 7386) of an object or its status. `resource_version` is a precondition."""

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
"""The writes of one object, in order. A failure cancels the remaining ones."""


def build_patch(kind: ResourceKind, meta: Metadata, change: dict[str, Any]) -> Patch:
    """Return a patch that requires the object to be unchanged since it was read."""
    return Patch(kind, meta.namespace, meta.name, change, meta.resource_version)


def build_status_patch(kind: ResourceKind, meta: Metadata, status: dict[str, Any]) -> Patch:
    return Patch(kind, meta.namespace, meta.name, {"status": status}, status=True)


def compute_merge_patch(current: object, after: dict[str, Any]) -> dict[str, Any]:
    """Return the smallest merge patch from `current` to `after`.

    `after` contains no null and no empty object as a value.
    """
    if not isinstance(current, dict):
        return after
    patch: dict[str, Any] = {name: None for name in current if name not in after and current[name] is not None}
    for name, value in after.items():
        old = current.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := compute_merge_patch(old, value):
                patch[name] = inner
        elif old != value:
            patch[name] = value
    return patch


STATUS_REFRESH_S = 60.0
"""Minimum interval between status updates that change only volatile fields, such as progress."""
_VOLATILE_FIELDS = ("asOf", "message", "progress", "demandGpus")


@dataclass(frozen=True, slots=True)
class Retention:
    """How long ended objects are kept: ElasticJobs of jobs submitted over HTTP, and Loans."""

    jobs_s: float = 86_400.0
    loans_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class PublishState:
    """Everything that the resources report. `spec_commands` were computed from the same or an earlier snapshot.

    `waiting_reasons` are those of the tick that made the snapshot. `ended_jobs` and `ended_loans`, by id, have left it.
    `applied_command_ids` went into it. `jobs_with_pods` are (namespace, job id). `job_namespace` is the default
    namespace.
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
        """The resources that `spec_commands` was computed from. Newer ones have not been validated."""
        return self.spec_commands.resources

    def read_metadata(self, resource: Resource) -> Metadata:
        """Return the metadata, if this leader may write the resource.

        Raises:
            FencedError: a newer leader has written it.
        """
        meta = parse_metadata(resource)
        if meta.epoch > self.epoch:
            raise FencedError(f"{meta.name} was written in epoch {meta.epoch}; this leader has epoch {self.epoch}")
        return meta

    @property
    def epoch_annotations(self) -> dict[str, str]:
        """Annotations of everything that this leader writes."""
        return {EPOCH_ANNOTATION: str(self.epoch)}

    def is_older_than(self, text: object, age_s: float) -> bool:
        """Return whether `text` is a time at least `age_s` ago."""
        at_s = parse_time_s(text)
        return at_s is not None and self.now_s - at_s >= age_s


def add_finalizer(
    kind: ResourceKind, meta: Metadata, finalizer: str, annotations: Mapping[str, str], **more: Any
) -> Writes:
    """Return a write that adds the finalizer and the `more` metadata, if missing."""
    if meta.is_deleting or finalizer in meta.finalizers:
        return ()
    return _patch_finalizers(kind, meta, [*meta.finalizers, finalizer], {"annotations": dict(annotations), **more})


def remove_finalizer(kind: ResourceKind, meta: Metadata, finalizer: str) -> Writes:
    stable = [name for name in meta.finalizers if name != finalizer]
    return () if len(stable) == len(meta.finalizers) else _patch_finalizers(kind, meta, stable, {})


def _patch_finalizers(kind: ResourceKind, meta: Metadata, finalizers: list[str], more: Mapping[str, Any]) -> Writes:
    return (build_patch(kind, meta, {"metadata": {"finalizers": finalizers, **more}}),)


def build_status_writes(kind: ResourceKind, resource: Resource, status: dict[str, Any], state: PublishState) -> Writes:
    """Return the status update, if something changed. Updates of volatile fields alone are delayed."""
    current = get_mapping(resource, "status")
    change = compute_merge_patch(current, status)
    if change.keys() <= {"asOf"}:
        return ()
    is_urgent = compute_merge_patch(_without_volatile_fields(current), _without_volatile_fields(status)) != {}
    if (
        not is_urgent
        and parse_time_s(current.get("asOf")) is not None
        and not state.is_older_than(current.get("asOf"), STATUS_REFRESH_S)
    ):
        return ()
    return (build_status_patch(kind, parse_metadata(resource), change),)


def _without_volatile_fields(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status without volatile fields and without condition messages."""
    stable = {name: value for name, value in status.items() if name not in _VOLATILE_FIELDS}
    conditions = stable.get("conditions")
    if isinstance(conditions, list):
        keys = ("type", "status", "reason", "observedGeneration")
        stable["conditions"] = [[each.get(key) for key in keys] for each in conditions if isinstance(each, Mapping)]
    return stable
