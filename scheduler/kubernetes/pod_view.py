"""PodView: the fields of a pod that Ebbtide uses. Caches store it instead of the whole object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.domain.node_selection import NodeTerms, Toleration, matches_terms, parse_terms, parse_tolerations
from scheduler.domain.observation import ReplicaStart
from scheduler.domain.pod_requirements import compute_pod_requests
from scheduler.domain.quantities import Resources
from scheduler.kubernetes.api_objects import (
    GENERATION_LABEL,
    GPU_RESOURCE,
    JOB_LABEL,
    MANAGED_BY_LABEL,
    NODE_LABEL,
    SCHEDULER_NAME,
    parse_count,
)
from scheduler.kubernetes.node_view import NodeView, find_untolerated_taints
from scheduler.kubernetes.prefetch_pods import ImageSet, PrefetchState, list_images, parse_prefetch
from scheduler.kubernetes.resources.meta import parse_time_s

_ENDED_PHASES = ("Succeeded", "Failed")
_USUAL_REASONS = ("ContainerCreating", "PodInitializing", "Completed")
_REASONS_AFTER_ADMISSION = ("DeadlineExceeded", "Evicted", "NodeLost", "Preempting", "Shutdown", "Terminated")
"""Reasons of failed pods that their node had admitted, unless the message says otherwise."""
_REJECTION = "Pod was rejected"
"""Start of kubelet's message about a pod that it did not admit, whatever the reason: `Evicted` under disk pressure."""


@dataclass(frozen=True, slots=True)
class NodeSelection:
    """The nodes on which the spec of a pod permits it to run."""

    selector: Mapping[str, str] = field(default_factory=dict)
    terms: NodeTerms = ()
    tolerations: tuple[Toleration, ...] = ()

    def matches(self, node: NodeView) -> bool:
        """Return whether labels and taints of the node, our own taint excepted, admit the pod."""
        if find_untolerated_taints(node.taints, self.tolerations):
            return False
        has_labels = all(node.labels.get(name) == value for name, value in self.selector.items())
        return has_labels and matches_terms(self.terms, node.name, node.labels)


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod.

    `node` is empty until it is bound; `gpus` are the requested GPUs. `job_id`, `target_node` and `generation` (of its
    creation) are set on Ebbtide's own pods only. `error` is the reason that keeps it from running; `exit_code` is that
    of the first container. `requests` are those besides GPUs. `is_rejected`: its node did not admit it. `is_prepared`:
    its volumes and network are ready, or it has no node yet. `replica_start` is how long a pod that is not Ebbtide's
    took from its node to readiness; None before it is ready, and once a container has restarted. `address`, `is_ready`
    and `labels` are those of pods that are not Ebbtide's; the address is empty unless the pod runs. `images` are those
    of other pods that request GPUs. `prefetch` is set on pods that Ebbtide created for a prefetch. `unschedulable` is
    set if the Kubernetes scheduler has found no node for a pod that is not Ebbtide's and requests GPUs.
    """

    namespace: str
    name: str
    uid: str
    node: str
    gpus: int
    phase: str
    is_deleting: bool
    job_id: str = ""
    target_node: str = ""
    generation: int = 0
    error: str = ""
    exit_code: int | None = None
    reason: str = ""
    requests: Resources = ()
    is_rejected: bool = False
    is_prepared: bool = True
    replica_start: ReplicaStart | None = None
    address: str = ""
    is_ready: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    images: ImageSet | None = None
    prefetch: PrefetchState | None = None
    unschedulable: NodeSelection | None = None

    @property
    def is_ours(self) -> bool:
        return bool(self.job_id)

    @property
    def has_ended(self) -> bool:
        return self.phase in _ENDED_PHASES

    @property
    def holds_gpus(self) -> bool:
        """Whether it occupies GPUs of its node: bound and not ended. Terminating pods do."""
        return bool(self.node) and not self.has_ended

    def to_object_reference(self) -> dict[str, Any]:
        """Return the minimal object that identifies this pod in API calls."""
        return {"metadata": {"namespace": self.namespace, "name": self.name, "uid": self.uid}}


def parse_pod_view(pod: Mapping[str, Any]) -> PodView:
    """Parse a pod. Pods with our labels belong to Ebbtide only if they also name our scheduler."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    is_ours = labels.get(MANAGED_BY_LABEL) == SCHEDULER_NAME and spec.get("schedulerName") == SCHEDULER_NAME
    first = _first_container(status)
    ended = (first.get("state") or {}).get("terminated") or {}
    gpus = count_requested_gpus(spec)
    return PodView(
        namespace=meta.get("namespace", ""),
        name=meta["name"],
        uid=meta.get("uid", ""),
        node=spec.get("nodeName") or "",
        gpus=gpus,
        phase=status.get("phase") or "Pending",
        is_deleting="deletionTimestamp" in meta,
        job_id=labels.get(JOB_LABEL, "") if is_ours else "",
        target_node=annotations.get(NODE_LABEL, "") if is_ours else "",
        generation=parse_count(labels.get(GENERATION_LABEL)) if is_ours else 0,
        error=_describe_error(first, status),
        exit_code=ended.get("exitCode"),
        reason=status.get("reason") or "",
        requests=tuple(each for each in compute_pod_requests(spec) if each[0] != GPU_RESOURCE),
        is_rejected=_is_rejected(status),
        is_prepared=_is_prepared(status),
        replica_start=None if is_ours else _find_replica_start(status),
        address="" if is_ours or status.get("phase") != "Running" else status.get("podIP") or "",
        is_ready=not is_ours and is_pod_ready(status),
        labels={} if is_ours else labels,
        images=list_images(meta.get("namespace", ""), spec) if gpus and not is_ours else None,
        prefetch=None if is_ours else parse_prefetch(pod),
        unschedulable=None if is_ours or "deletionTimestamp" in meta else _find_unschedulable(spec, status),
    )


def _find_unschedulable(spec: Mapping[str, Any], status: Mapping[str, Any]) -> NodeSelection | None:
    """Return the nodes that a pod with GPUs accepts if the Kubernetes scheduler has found none with room."""
    if spec.get("nodeName") or not count_requested_gpus(spec) or spec.get("schedulerName") == SCHEDULER_NAME:
        return None
    conditions = (each for each in status.get("conditions") or () if each.get("type") == "PodScheduled")
    if not any(each.get("status") == "False" and each.get("reason") == "Unschedulable" for each in conditions):
        return None
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    return NodeSelection(
        spec.get("nodeSelector") or {},
        () if affinity is None else parse_terms(affinity),
        parse_tolerations(spec.get("tolerations")),
    )


def _is_rejected(status: Mapping[str, Any]) -> bool:
    """Return whether kubelet did not admit the pod: it failed with a reason before any of its containers existed."""
    has_containers = status.get("containerStatuses") or status.get("initContainerStatuses")
    is_failed = status.get("phase") == "Failed" and bool(status.get("reason"))
    is_after_admission = status.get("reason") in _REASONS_AFTER_ADMISSION
    is_after_admission = is_after_admission and not str(status.get("message") or "").startswith(_REJECTION)
    return is_failed and not has_containers and not is_after_admission


def _find_replica_start(status: Mapping[str, Any]) -> ReplicaStart | None:
    """Return when a pod became ready after its binding. Containers that restarted hide when it first did."""
    times_s = {
        each.get("type"): parse_time_s(each.get("lastTransitionTime"))
        for each in status.get("conditions") or ()
        if each.get("status") == "True"
    }
    bound_s, ready_s = times_s.get("PodScheduled"), times_s.get("Ready")
    has_restarted = any(each.get("restartCount") for each in status.get("containerStatuses") or ())
    if bound_s is None or ready_s is None or has_restarted:
        return None
    return ReplicaStart(ready_s, max(0.0, ready_s - bound_s))


def is_pod_ready(status: Mapping[str, Any]) -> bool:
    """Return whether the readiness probes of a pod with this status succeed."""
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in status.get("conditions") or ())


def _is_prepared(status: Mapping[str, Any]) -> bool:
    conditions = {each.get("type"): each.get("status") for each in status.get("conditions") or ()}
    return conditions.get("PodReadyToStartContainers") != "False"


def count_requested_gpus(spec: Mapping[str, Any]) -> int:
    """Return the GPUs that a pod with this spec occupies, as the Kubernetes scheduler counts them.

    That is the sum of its containers and sidecars (init containers that restart always), or the largest init container.
    """
    steady = sum(_count_container_gpus(container) for container in spec.get("containers") or ())
    peak = 0
    for container in spec.get("initContainers") or ():
        requested = _count_container_gpus(container)
        if container.get("restartPolicy") == "Always":
            steady += requested
        else:
            peak = max(peak, requested)
    return max(steady, peak)


def _count_container_gpus(container: Mapping[str, Any]) -> int:
    resources = container.get("resources") or {}
    requested = (resources.get("limits") or {}).get(GPU_RESOURCE, (resources.get("requests") or {}).get(GPU_RESOURCE))
    return parse_count(requested)


def _first_container(status: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = status.get("containerStatuses") or ()
    return containers[0] if containers else {}


def _describe_error(first: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Return reason and message of what keeps the pod from running or has ended it, else an empty text."""
    for container in status.get("initContainerStatuses") or ():
        if parts := _list_error_parts(container):
            return ": ".join((parts[0], f"init container {container.get('name', '')}", *parts[1:]))
    return ": ".join(_list_error_parts(first) or _list_reason_parts(status))


def _list_error_parts(container: Mapping[str, Any]) -> tuple[str, ...]:
    """Return reason and message of a container that waits or has ended."""
    state = container.get("state") or {}
    return _list_reason_parts(state.get("waiting") or {}) or _list_reason_parts(state.get("terminated") or {})


def _list_reason_parts(source: Mapping[str, Any]) -> tuple[str, ...]:
    if not source.get("reason") or source["reason"] in _USUAL_REASONS:
        return ()
    return (str(source["reason"]), *([str(source["message"])[:300]] if source.get("message") else []))
