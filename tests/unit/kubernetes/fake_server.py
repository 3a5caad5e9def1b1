"""An in-memory API server for writes: uids, generations, finalizers and the status subresource."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scheduler.domain.commands import Command
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.api_objects import ELASTIC_JOB, GPU_PROFILE, LOAN, NODE, POOL, QUEUE, ResourceKind
from scheduler.kubernetes.resource_writes import Create, Delete, Patch, Writes
from scheduler.kubernetes.spec_commands import ClusterResources
from scheduler.scheduling.commands import apply_command
from scheduler.scheduling.mutable_snapshot import MutableSnapshot

Key = tuple[str, str, str]
CREATED = "2026-11-22T06:00:00Z"
CREATED_S = 1795327200.0


@dataclass
class FakeServer:
    objects: dict[Key, dict[str, Any]] = field(default_factory=dict)
    write_count: int = 0

    def add(
        self, kind: ResourceKind, name: str, spec: object, *, namespace: str = "", **metadata: Any
    ) -> dict[str, Any]:
        """Create an object as a user would. Callers set `status` themselves."""
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": name, **({"namespace": namespace} if namespace else {}), **metadata},
            "spec": spec,
        }
        return self._create(kind, body)

    def get(self, kind: ResourceKind, name: str, namespace: str = "") -> dict[str, Any]:
        return self.objects[kind.name, namespace, name]

    def change(self, kind: ResourceKind, name: str, namespace: str = "", /, **spec: Any) -> None:
        """Patch the spec as a user would, without validation."""
        self.execute([(Patch(kind, namespace, name, {"spec": spec}),)])

    def delete(self, kind: ResourceKind, name: str, namespace: str = "") -> None:
        self._delete((kind.name, namespace, name))

    def execute(self, writes: Iterable[Writes]) -> None:
        for steps in writes:
            for step in steps:
                self.write_count += 1
                match step:
                    case Create(kind=kind, body=body):
                        self._create(kind, body)
                    case Patch() as patch:
                        self._patch(patch)
                    case Delete(kind=kind, namespace=namespace, name=name, uid=uid):
                        assert self.objects[kind.name, namespace, name]["metadata"]["uid"] == uid
                        self._delete((kind.name, namespace, name))

    def resources(self) -> ClusterResources:
        def of(kind: ResourceKind) -> tuple[dict[str, Any], ...]:
            return tuple(copy.deepcopy(item) for key, item in sorted(self.objects.items()) if key[0] == kind.name)

        return ClusterResources(of(ELASTIC_JOB), of(POOL), of(QUEUE), of(LOAN), of(NODE), of(GPU_PROFILE))

    def _create(self, kind: ResourceKind, body: dict[str, Any]) -> dict[str, Any]:
        metadata = {"creationTimestamp": CREATED, **body["metadata"]}
        key = (kind.name, metadata.get("namespace", ""), metadata["name"])
        assert key not in self.objects
        created: dict[str, Any] = json.loads(json.dumps({**body, "metadata": metadata}, allow_nan=False))
        created.pop("status", None)
        created["metadata"] |= {"uid": f"uid-{len(self.objects)}-{metadata['name']}", "generation": 1}
        created["metadata"]["resourceVersion"] = str(self.write_count)
        self.objects[key] = created
        return created

    def _patch(self, step: Patch) -> None:
        key = (step.kind.name, step.namespace, step.name)
        before = self.objects[key]
        assert step.resource_version in ("", before["metadata"]["resourceVersion"]), "a conflict"
        change = json.loads(json.dumps(step.change, allow_nan=False))
        assert step.status is ("status" in change)
        after = _merge(before, change)
        after["metadata"]["generation"] += after.get("spec") != before.get("spec")
        after["metadata"]["resourceVersion"] = str(int(before["metadata"]["resourceVersion"]) + 1)
        self.objects[key] = after
        self._reap(key)

    def _delete(self, key: Key) -> None:
        self.objects[key]["metadata"]["deletionTimestamp"] = CREATED
        self._reap(key)

    def _reap(self, key: Key) -> None:
        metadata = self.objects[key]["metadata"]
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
            del self.objects[key]


def apply_commands(snapshot: Snapshot, commands: Iterable[Command]) -> Snapshot:
    """Return the snapshot after a tick applied these commands. None may be refused."""
    intake = MutableSnapshot(snapshot)
    for command in commands:
        apply_command(intake, command)
    refused = [event.message for event in intake.events if event.code == "CommandRefused"]
    assert refused == []
    return intake.view()


def _merge(before: Any, change: dict[str, Any]) -> Any:
    after = dict(before) if isinstance(before, dict) else {}
    for name, value in change.items():
        if value is None:
            after.pop(name, None)
        else:
            after[name] = _merge(after.get(name), value) if isinstance(value, dict) else value
    return after
