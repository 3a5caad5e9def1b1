"""Metadata and conditions of resources (metav1.ObjectMeta and metav1.Condition), robust against arbitrary content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from scheduler.kubernetes.api_objects import EPOCH_ANNOTATION

_DIGITS_MAX = 18

Resource = Mapping[str, Any]
"""An object from the API server. Its metadata is well-formed; spec and status can be any JSON."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """Object metadata. `created_at` is the server's timestamp, which sorts by time."""

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    created_at: str = ""
    is_deleting: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    finalizers: tuple[str, ...] = ()

    @property
    def epoch(self) -> int:
        """The epoch of the leader that last wrote the resource, 0 if none did."""
        text = self.annotations.get(EPOCH_ANNOTATION, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else 0


def parse_metadata(resource: Resource) -> Metadata:
    fields = resource["metadata"]
    return Metadata(
        name=fields["name"],
        namespace=fields.get("namespace", ""),
        uid=fields.get("uid", ""),
        generation=fields.get("generation", 0),
        resource_version=fields.get("resourceVersion", ""),
        created_at=fields.get("creationTimestamp") or "",
        is_deleting=bool(fields.get("deletionTimestamp")),
        labels=fields.get("labels") or {},
        annotations=fields.get("annotations") or {},
        finalizers=tuple(fields.get("finalizers") or ()),
    )


def get_mapping(document: object, name: str) -> Mapping[str, Any]:
    """Return the object at `name`, or an empty one if there is anything else."""
    value = document.get(name) if isinstance(document, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def get_observed_generation(resource: Resource) -> int:
    """Return status.observedGeneration, -1 without one."""
    observed = get_mapping(resource, "status").get("observedGeneration")
    return observed if isinstance(observed, int) and not isinstance(observed, bool) else -1


def format_time(at_s: float) -> str:
    """Format seconds since 1970 as the API server does: whole seconds, UTC."""
    return datetime.fromtimestamp(int(at_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time_s(text: object) -> float | None:
    """Parse a timestamp into seconds since 1970. None if it is invalid."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) and text.endswith("Z") else None
    except (ValueError, OverflowError):
        return None


ACCEPTED = "Accepted"
SCHEDULED = "Scheduled"
SUSPENDED = "Suspended"
COMPLETE = "Complete"
FAILED = "Failed"
CONFLICT = "Conflict"
MATCHED = "Matched"
NODES_USABLE = "NodesUsable"
DEMAND_KNOWN = "DemandKnown"
NODES_ADMIT_PODS = "NodesAdmitPods"
PODS_STARTED = "PodsStarted"
VOLUMES_READY = "VolumesReady"
CHECKPOINTS_SHARED = "CheckpointsShared"
REPLICAS_SET = "ReplicasSet"
MESSAGE_MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition without its transition time. `holds` is None for Unknown; `reason` is one CamelCase word."""

    type: str
    holds: bool | None
    reason: str
    message: str = ""


def build_status_conditions(
    conditions: Iterable[Condition], previous: object, *, now_s: float, generation: int
) -> list[dict[str, Any]]:
    """Return the conditions for a status. lastTransitionTime is kept while the status stays the same.

    `previous` is the current `status.conditions`, which may hold anything.
    """
    previous_by_type = index_by_type(previous)
    result = []
    for condition in conditions:
        status, previous_condition = (
            "Unknown" if condition.holds is None else str(condition.holds),
            previous_by_type.get(condition.type, {}),
        )
        since = previous_condition.get("lastTransitionTime")
        is_unchanged = previous_condition.get("status") == status and parse_time_s(since) is not None
        result.append(
            {
                "type": condition.type,
                "status": status,
                "reason": condition.reason,
                "message": condition.message[:MESSAGE_MAX_LENGTH],
                "observedGeneration": generation,
                "lastTransitionTime": since if is_unchanged else format_time(now_s),
            }
        )
    return result


def index_by_type(conditions: object) -> dict[str, Mapping[str, Any]]:
    """Return the conditions by type. Invalid entries are left out."""
    value = conditions if isinstance(conditions, list) else []
    return {each["type"]: each for each in value if isinstance(each, Mapping) and isinstance(each.get("type"), str)}


def find_previous_condition(previous: object, condition_type: str) -> tuple[Condition, ...]:
    """Return the condition of this type from the last status, as a tuple of one, or empty without one."""
    previous_condition = index_by_type(previous).get(condition_type)
    if previous_condition is None or previous_condition.get("status") not in ("True", "False"):
        return ()
    reason, message = previous_condition.get("reason"), previous_condition.get("message")
    if not isinstance(reason, str) or not isinstance(message, str):
        return ()
    return (Condition(condition_type, previous_condition["status"] == "True", reason, message),)
