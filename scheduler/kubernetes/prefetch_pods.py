"""Pods that load images or weights onto one node: their manifests, and what their status says of the load. Pure.

An image is pulled by a container with a command that no image has. The kubelet pulls the image before it creates the
container, so the container fails to start with the image in place, whatever the image contains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

from scheduler.domain.prefetch import PrefetchPurpose, WeightsTemplate
from scheduler.kubernetes.api_objects import (
    GPU_RESOURCE,
    LABEL_MAX_LENGTH,
    LOAN_LABEL,
    LOANED_TAINT,
    MANAGED_BY_LABEL,
    NODE_LABEL,
    PREFETCH_LABEL,
    SCHEDULER_NAME,
    Object,
    truncate_name,
)
from scheduler.kubernetes.node_view import GPU_TOLERATION, NodeView, Toleration
from scheduler.kubernetes.resources.meta import parse_time_s

MISSING_COMMAND = "/ebbtide-prefetch/command-that-no-image-has"
IMAGES_MAX = 16
"""Images of one pod. Those beyond it are pulled when they are needed."""
_NOBODY = 65_534
_NAME_DIGITS = 12
_TEXT_MAX = 300
_REASONS_AFTER_PULL = ("RunContainerError", "CreateContainerError", "CreateContainerConfigError")
_NEVER_CREATED = "ContainerStatusUnknown"
"""Reason of terminated containers that may never have existed, as the kubelet sets it at the end of a pod."""
_USUAL_REASONS = ("ContainerCreating", "PodInitializing", "Completed", _NEVER_CREATED)
_PURPOSES = {each.value: each for each in PrefetchPurpose}


@dataclass(frozen=True, slots=True)
class ImageSet:
    """Images that pods of one namespace need, and the Secrets with which they are pulled there."""

    namespace: str
    images: tuple[str, ...]
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A load that a node needs now: the images of `images`, or the pod of `template`."""

    node: str
    loan: str
    purpose: PrefetchPurpose
    timeout_s: float
    images: ImageSet | None = None
    template: WeightsTemplate | None = None

    @property
    def namespace(self) -> str:
        source = self.images or self.template
        assert source is not None, "a prefetch loads images or weights"
        return source.namespace

    @property
    def name(self) -> str:
        """Name of its pod, the same for the same load in the same loan."""
        content = repr((self.loan, self.purpose.value, self.images, self.template))
        return f"ebbtide-prefetch-{self.purpose}-{sha256(content.encode()).hexdigest()[:_NAME_DIGITS]}"


@dataclass(frozen=True, slots=True)
class PrefetchState:
    """A pod of a prefetch as last observed. `is_complete`: all is loaded. `error` is what failed, or delays it now."""

    node: str
    loan: str
    purpose: PrefetchPurpose
    created_at_s: float
    timeout_s: float
    has_ended: bool
    is_complete: bool
    error: str = ""


def list_images(namespace: str, spec: Mapping[str, Any]) -> ImageSet:
    """Return the images of a pod with this spec: those of containers and of image volumes."""
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    volumes = [(volume.get("image") or {}).get("reference") for volume in spec.get("volumes") or ()]
    images = [str(image) for image in (*(each.get("image") for each in containers), *volumes) if image]
    secrets = [str(each["name"]) for each in spec.get("imagePullSecrets") or () if each.get("name")]
    return _intern_images(namespace, tuple(dict.fromkeys(images))[:IMAGES_MAX], tuple(secrets))


@lru_cache(maxsize=4096)
def _intern_images(namespace: str, images: tuple[str, ...], pull_secrets: tuple[str, ...]) -> ImageSet:
    """Return one object for equal values: the replicas of a model share it."""
    return ImageSet(namespace, images, pull_secrets)


def build_image_pod(prefetch: Prefetch, node: NodeView, tolerations: Sequence[Toleration]) -> Object:
    """Return the pod that pulls images. It requests nothing, so that it takes no room from other pods of the node.

    It meets the restricted Pod Security Standard, so that any namespace admits it.
    """
    assert prefetch.images is not None, "a prefetch of images names them"
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    containers = [
        {
            "name": f"image-{number}",
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            "command": [MISSING_COMMAND],
            "securityContext": security,
        }
        for number, image in enumerate(prefetch.images.images)
    ]
    spec = {
        "nodeName": node.name,
        "containers": containers,
        "imagePullSecrets": [{"name": name} for name in prefetch.images.pull_secrets],
        "tolerations": _build_tolerations(tolerations),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _NOBODY,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": 0,
    }
    return _build_pod(prefetch, node, {}, spec)


def build_weights_pod(
    prefetch: Prefetch, node: NodeView, tolerations: Sequence[Toleration], template: Object
) -> Object:
    """Return the pod of a PodTemplate on the node. The Kubernetes scheduler binds it, so that its volumes are bound.

    Raises:
        ValueError: it requests GPUs, which a job or a replica needs.
    """
    pod = template.get("template") or {}
    spec = dict(pod.get("spec") or {})
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        resources = container.get("resources") or {}
        if any(GPU_RESOURCE in (resources.get(kind) or {}) for kind in ("limits", "requests")):
            raise ValueError(f"its container {container.get('name')} requests GPUs. Remove {GPU_RESOURCE} from it")
    spec["affinity"] = pin_to_node(spec.get("affinity") or {}, node.name)
    spec["tolerations"] = [*(spec.get("tolerations") or ()), *_build_tolerations(tolerations)]
    return _build_pod(prefetch, node, pod.get("metadata") or {}, spec)


def pin_to_node(affinity: Mapping[str, Any], node: str) -> dict[str, Any]:
    """Return the affinity with the node in each term. Terms are alternatives, so each needs it."""
    own = affinity.get("nodeAffinity") or {}
    required = own.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    pin = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = [
        {**term, "matchFields": [*term.get("matchFields", ()), pin]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    node_affinity = {**own, "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {**affinity, "nodeAffinity": node_affinity}


def _build_pod(prefetch: Prefetch, node: NodeView, meta: Mapping[str, Any], spec: Mapping[str, Any]) -> Object:
    """Return the pod, which ends with its node or at its deadline."""
    labels = {
        MANAGED_BY_LABEL: SCHEDULER_NAME,
        PREFETCH_LABEL: prefetch.purpose.value,
        LOAN_LABEL: truncate_name(prefetch.loan, LABEL_MAX_LENGTH),
    }
    owner = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid}
    metadata = {
        "name": prefetch.name,
        "namespace": prefetch.namespace,
        "labels": {**(meta.get("labels") or {}), **labels},
        "annotations": {**(meta.get("annotations") or {}), NODE_LABEL: node.name},
        "ownerReferences": [owner],
    }
    defaults = {"enableServiceLinks": False, "automountServiceAccountToken": False}
    ends = {"restartPolicy": "Never", "activeDeadlineSeconds": int(prefetch.timeout_s)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**defaults, **spec, **ends}}


def _build_tolerations(pool_tolerations: Sequence[Toleration]) -> list[dict[str, str]]:
    return [
        {**LOANED_TAINT, "operator": "Equal"},
        *(each.to_manifest() for each in (GPU_TOLERATION, *pool_tolerations)),
    ]


def parse_prefetch(pod: Mapping[str, Any]) -> PrefetchState | None:
    """Return the state of a pod that we created for a prefetch. None for any other pod."""
    meta, status, spec = pod["metadata"], pod.get("status") or {}, pod.get("spec") or {}
    labels = meta.get("labels") or {}
    purpose = _PURPOSES.get(labels.get(PREFETCH_LABEL, ""))
    if purpose is None or labels.get(MANAGED_BY_LABEL) != SCHEDULER_NAME:
        return None
    is_complete = _is_complete(purpose, spec, status)
    return PrefetchState(
        node=(meta.get("annotations") or {}).get(NODE_LABEL, ""),
        loan=labels.get(LOAN_LABEL, ""),
        purpose=purpose,
        created_at_s=parse_time_s(meta.get("creationTimestamp")) or 0.0,
        timeout_s=float(spec.get("activeDeadlineSeconds") or 0),
        is_complete=is_complete,
        has_ended=is_complete or status.get("phase") in ("Succeeded", "Failed"),
        error="" if is_complete else _describe_problem(purpose, status),
    )


def _is_complete(purpose: PrefetchPurpose, spec: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    if purpose is PrefetchPurpose.WEIGHTS:
        return status.get("phase") == "Succeeded"
    statuses = status.get("containerStatuses") or ()
    return len(statuses) == len(spec.get("containers") or ()) and all(map(_has_image, statuses))


def _has_image(container: Mapping[str, Any]) -> bool:
    """Return whether the image of the container is on the node: the kubelet has tried to create the container."""
    state = container.get("state") or {}
    if "terminated" in state:
        return (state["terminated"] or {}).get("reason") != _NEVER_CREATED
    return "running" in state or (state.get("waiting") or {}).get("reason") in _REASONS_AFTER_PULL


def _describe_problem(purpose: PrefetchPurpose, status: Mapping[str, Any]) -> str:
    """Return reason and message of the first container that has failed, else those of the pod."""
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state = container.get("state") or {}
        problem = state.get("waiting") or state.get("terminated") or {}
        is_done = purpose is not PrefetchPurpose.WEIGHTS and _has_image(container)
        if problem.get("reason") and problem["reason"] not in _USUAL_REASONS and not is_done:
            return _join_reason(problem, str(container.get("image", "")))
    return _join_reason(status, "") if status.get("reason") else ""


def _join_reason(source: Mapping[str, Any], image: str) -> str:
    parts = (str(source["reason"]), image, str(source.get("message") or "")[:_TEXT_MAX])
    return ": ".join(part for part in parts if part)
