"""Steps: writes to custom resources and Events, as data. Whoever carries them out chooses nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scheduler.k8s.kinds import Kind
from scheduler.k8s.resources.metadata import Metadata


@dataclass(frozen=True, slots=True)
class Create:
    """An object that was not there. That one of its name is there by now is a failure like any other."""

    kind: Kind
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Patch:
    """A JSON merge patch (RFC 7386) of an object, or of its status. A conflict where a `resource_version` is given and
    somebody else was first: it is decided anew."""

    kind: Kind
    namespace: str
    name: str
    change: dict[str, Any]
    resource_version: str = ""
    status: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    kind: Kind
    namespace: str
    name: str
    uid: str


Step = Create | Patch | Delete
Steps = tuple[Step, ...]
"""What concerns one object, in order: nothing of it is done after a step that fails."""


def patched(kind: Kind, meta: Metadata, change: dict[str, Any]) -> Patch:
    """If it is still as it was when this was decided."""
    return Patch(kind, meta.namespace, meta.name, change, meta.resource_version)


def status_patched(kind: Kind, meta: Metadata, status: dict[str, Any]) -> Patch:
    return Patch(kind, meta.namespace, meta.name, {"status": status}, status=True)


def merge_patch(before: object, after: dict[str, Any]) -> dict[str, Any]:
    """The smallest merge patch that makes `before` into `after`. Neither null nor an empty object stands in `after`
    where a value is meant."""
    if not isinstance(before, dict):
        return after
    patch: dict[str, Any] = {name: None for name in before if name not in after and before[name] is not None}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := merge_patch(old, value):
                patch[name] = inner
        elif old != value:
            patch[name] = value
    return patch
