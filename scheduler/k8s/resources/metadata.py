"""What any object at the API server says of itself, and the parts of it that anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from scheduler.k8s.kinds import EPOCH_ANNOTATION

_DIGITS_MAX = 18

Resource = Mapping[str, Any]
"""An object as the API server gives it. Its metadata has the right form; spec and status may be any JSON."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """`created_at` is the server's text, which sorts by time."""

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
        """The epoch of who wrote it last; 0 where that was none of us."""
        text = self.annotations.get(EPOCH_ANNOTATION, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else 0


def metadata(resource: Resource) -> Metadata:
    given = resource["metadata"]
    return Metadata(
        name=given["name"],
        namespace=given.get("namespace", ""),
        uid=given.get("uid", ""),
        generation=given.get("generation", 0),
        resource_version=given.get("resourceVersion", ""),
        created_at=given.get("creationTimestamp") or "",
        is_deleting=bool(given.get("deletionTimestamp")),
        labels=given.get("labels") or {},
        annotations=given.get("annotations") or {},
        finalizers=tuple(given.get("finalizers") or ()),
    )


def part(document: object, name: str) -> Mapping[str, Any]:
    """The object under `name`; an empty one where there is anything else."""
    found = document.get(name) if isinstance(document, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def observed_generation(resource: Resource) -> int:
    """The generation of its spec that was taken in; -1 before the first."""
    observed = part(resource, "status").get("observedGeneration")
    return observed if isinstance(observed, int) and not isinstance(observed, bool) else -1


def time_text(at_s: float) -> str:
    """Seconds since 1970 as the API server writes times: whole seconds, UTC."""
    return datetime.fromtimestamp(int(at_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_s(text: object) -> float | None:
    """The inverse; None where it is no time."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) and text.endswith("Z") else None
    except (ValueError, OverflowError):
        return None
