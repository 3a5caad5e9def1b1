"""Conditions of the usual form: what holds of a resource, why, and since when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.k8s.resources.metadata import time_s, time_text

ACCEPTED = "Accepted"
SCHEDULED = "Scheduled"
SUSPENDED = "Suspended"
COMPLETE = "Complete"
FAILED = "Failed"
CONFLICT = "Conflict"
MATCHED = "Matched"
NODES_USABLE = "NodesUsable"
DEMAND_KNOWN = "DemandKnown"
CHECKPOINTS_SHARED = "CheckpointsShared"
MESSAGE_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Claim:
    """A condition before it is known since when it holds; None: nobody can tell. `reason` is one word, `message` a
    sentence."""

    type: str
    holds: bool | None
    reason: str
    message: str = ""


def conditions(claims: Iterable[Claim], previous: object, *, now_s: float, generation: int) -> list[dict[str, Any]]:
    """The claims as conditions. The time of the last transition stays while the status does.

    `previous` is what the resource has under `status.conditions`, which may be anything.
    """
    before = by_type(previous)
    made = []
    for claim in claims:
        status, old = "Unknown" if claim.holds is None else str(claim.holds), before.get(claim.type, {})
        since = old.get("lastTransitionTime")
        stays = old.get("status") == status and time_s(since) is not None
        made.append(
            {
                "type": claim.type,
                "status": status,
                "reason": claim.reason,
                "message": claim.message[:MESSAGE_CHARACTERS],
                "observedGeneration": generation,
                "lastTransitionTime": since if stays else time_text(now_s),
            }
        )
    return made


def by_type(conditions: object) -> dict[str, Mapping[str, Any]]:
    """The conditions of a status by their type; what is no condition is left out."""
    found = conditions if isinstance(conditions, list) else []
    return {each["type"]: each for each in found if isinstance(each, Mapping) and isinstance(each.get("type"), str)}


def claimed_before(previous: object, kind: str) -> tuple[Claim, ...]:
    """What was claimed of this type when the resource's spec was last read; empty where nothing was."""
    old = by_type(previous).get(kind)
    if old is None or old.get("status") not in ("True", "False"):
        return ()
    reason, message = old.get("reason"), old.get("message")
    if not isinstance(reason, str) or not isinstance(message, str):
        return ()
    return (Claim(kind, old["status"] == "True", reason, message),)
