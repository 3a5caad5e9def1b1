"""What Ebbtide has to know of a pod, read once when it comes in: mirrors keep this instead of the whole object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.k8s.kinds import (
    GENERATION_LABEL,
    GPU_RESOURCE,
    JOB_LABEL,
    MANAGED_BY_LABEL,
    NODE_LABEL,
    SCHEDULER_NAME,
)
from scheduler.k8s.objects import number_of

_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class PodFacts:
    """`node` is where it is bound, empty before; `gpus` what its containers ask for. `job_id` and `wanted_node` are set
    on our own pods alone, `generation` is that of the job when the pod was made. `fault`: why it cannot run, where a
    container says so; `exit_code` of a first container that has ended."""

    namespace: str
    name: str
    uid: str
    node: str
    gpus: int
    phase: str
    is_deleting: bool
    job_id: str = ""
    wanted_node: str = ""
    generation: int = 0
    fault: str = ""
    exit_code: int | None = None
    reason: str = ""

    @property
    def is_ours(self) -> bool:
        return bool(self.job_id)

    @property
    def has_ended(self) -> bool:
        return self.phase in _ENDED

    @property
    def holds_gpus(self) -> bool:
        """It keeps its node's GPUs from others: bound and not ended, being deleted or not."""
        return bool(self.node) and not self.has_ended

    def as_object(self) -> dict[str, Any]:
        """As much of the pod as calls about this very pod need."""
        return {"metadata": {"namespace": self.namespace, "name": self.name, "uid": self.uid}}


def pod_facts(pod: Mapping[str, Any]) -> PodFacts:
    """The facts of a pod as the API server gives it. Labels of ours that somebody else set make it none of ours: that
    takes our scheduler's name too."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels, notes = meta.get("labels") or {}, meta.get("annotations") or {}
    ours = labels.get(MANAGED_BY_LABEL) == SCHEDULER_NAME and spec.get("schedulerName") == SCHEDULER_NAME
    first = _first_container(status)
    ended = (first.get("state") or {}).get("terminated") or {}
    return PodFacts(
        namespace=meta.get("namespace", ""),
        name=meta["name"],
        uid=meta.get("uid", ""),
        node=spec.get("nodeName") or "",
        gpus=gpus_asked(spec),
        phase=status.get("phase") or "Pending",
        is_deleting="deletionTimestamp" in meta,
        job_id=labels.get(JOB_LABEL, "") if ours else "",
        wanted_node=notes.get(NODE_LABEL, "") if ours else "",
        generation=number_of(labels.get(GENERATION_LABEL)) if ours else 0,
        fault=_fault(first, status),
        exit_code=ended.get("exitCode"),
        reason=status.get("reason") or "",
    )


def gpus_asked(spec: Mapping[str, Any]) -> int:
    """GPUs that a pod of this spec takes: those of its containers together, or of one init container that asks for
    more; an init container that keeps running counts with the containers, as the scheduler of Kubernetes counts."""
    steady = sum(_gpus_of(container) for container in spec.get("containers") or ())
    peak = 0
    for container in spec.get("initContainers") or ():
        asked = _gpus_of(container)
        if container.get("restartPolicy") == "Always":
            steady += asked
        else:
            peak = max(peak, asked)
    return max(steady, peak)


def _gpus_of(container: Mapping[str, Any]) -> int:
    resources = container.get("resources") or {}
    asked = (resources.get("limits") or {}).get(GPU_RESOURCE, (resources.get("requests") or {}).get(GPU_RESOURCE))
    return number_of(asked)


def _first_container(status: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = status.get("containerStatuses") or ()
    return containers[0] if containers else {}


def _fault(first: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    return ": ".join(_fault_words(first, status))


def _fault_words(first: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[str]:
    """A container that waits for what it cannot get, or ended; else what the pod itself says."""
    state = first.get("state") or {}
    for said in (state.get("waiting") or {}, state.get("terminated") or {}, status):
        if said.get("reason") and said["reason"] not in ("ContainerCreating", "PodInitializing", "Completed"):
            yield str(said["reason"])
            if said.get("message"):
                yield str(said["message"])[:300]
            return
