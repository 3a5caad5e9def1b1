"""How the node agent gets into agent pods, whatever their image contains. Pure.

The agent, its interpreter and its libraries are one folder, the bundle (`tools.agent_bundle`), in an image of their
own. An init container copies it into a volume of the pod, or the image itself is the volume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from scheduler.domain.agent_bundle import BUNDLE_DIR, BUNDLE_PYTHON

AGENT_COMMAND = (BUNDLE_PYTHON, "-I", "-m", "scheduler.agent.pod")
"""Starts the agent. -I: neither variables nor packages of the image reach its interpreter."""
AGENT_CONTAINER = "ebbtide-agent"
"""Name of the init container, and of the volume with the bundle."""
_COPY_DIR = "/bundle"
_COPIED_RESOURCES = ("cpu", "memory", "ephemeral-storage")


class AgentDelivery(StrEnum):
    """How the bundle gets into pods. Image volumes need Kubernetes 1.33 and a runtime that mounts them executable."""

    INIT_CONTAINER = "init-container"
    IMAGE_VOLUME = "image-volume"


@dataclass(frozen=True, slots=True)
class AgentImage:
    """The image with the bundle, and how it gets into pods."""

    reference: str
    delivery: AgentDelivery = AgentDelivery.INIT_CONTAINER


def build_agent_volume(agent: AgentImage) -> dict[str, Any]:
    """Return the volume with the bundle."""
    if agent.delivery is AgentDelivery.IMAGE_VOLUME:
        return {"name": AGENT_CONTAINER, "image": {"reference": agent.reference}}
    return {"name": AGENT_CONTAINER, "emptyDir": {}}


def build_agent_mount() -> dict[str, Any]:
    return {"name": AGENT_CONTAINER, "mountPath": BUNDLE_DIR, "readOnly": True}


def build_init_containers(agent: AgentImage, spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the init containers of a pod: the copying one, if there is one, before those of the template.

    It gets the CPU and memory of the first container of `spec`, never more. So the requests of the pod, its quality of
    service and the fit of its quota do not depend on it.
    """
    own = list(spec.get("initContainers") or ())
    if agent.delivery is AgentDelivery.IMAGE_VOLUME:
        return own
    copy = {
        "name": AGENT_CONTAINER,
        "image": agent.reference,
        "command": [BUNDLE_PYTHON, "-I", "-m", "scheduler.agent.bundle_copy", _COPY_DIR],
        "volumeMounts": [{"name": AGENT_CONTAINER, "mountPath": _COPY_DIR}],
        "resources": _copy_resources(spec["containers"][0].get("resources") or {}),
        "securityContext": _build_security_context(spec.get("securityContext") or {}),
    }
    return [copy, *own]


def _copy_resources(resources: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {kind: resources.get(kind) or {} for kind in ("requests", "limits")}
    return {
        kind: {name: amount for name, amount in amounts.items() if name in _COPIED_RESOURCES}
        for kind, amounts in kinds.items()
    }


def _build_security_context(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return a security context that meets the restricted standard, unless the template runs the whole pod as root."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": pod.get("runAsUser") != 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
