"""Views of what shortens the way back of nodes: standby replicas, and prefetches of images and weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from scheduler.documents.prefetch import PrefetchDocument, WeightsDocument
from scheduler.documents.standby import StandbyDocument
from scheduler.domain.prefetch import PrefetchPurpose
from scheduler.domain.standby import StandbyMode, StandbyPhase

_STANDBY = {name: info.description for name, info in StandbyDocument.model_fields.items()}
_WEIGHTS = {name: info.description for name, info in WeightsDocument.model_fields.items()}
_PREFETCH = {name: info.description for name, info in PrefetchDocument.model_fields.items()}


class StandbyView(TypedDict):
    """Replicas that stay on a node while it is lent, asleep or without requests."""

    namespace: Annotated[str, Field(description=_STANDBY["namespace"])]
    selector: Annotated[dict[str, str], Field(description=_STANDBY["selector"])]
    mode: Annotated[StandbyMode, Field(description=_STANDBY["mode"])]
    url: Annotated[str, Field(description=_STANDBY["url"])]
    gpus: Annotated[list[int], Field(description=_STANDBY["gpus"])]
    port: Annotated[int, Field(description=_STANDBY["port"])]
    level: Annotated[int, Field(description=_STANDBY["level"])]
    gpu_memory_bytes: Annotated[
        int, Field(description="Memory that idle replicas keep on each of their GPUs, in bytes.")
    ]
    host_memory_bytes: Annotated[int, Field(description="Memory of the node that they keep in total, in bytes.")]
    wake_s: Annotated[float | None, Field(description=_STANDBY["wake_s"])]
    timeout_s: Annotated[float, Field(description=_STANDBY["timeout_s"])]
    drain_s: Annotated[float, Field(description=_STANDBY["drain_s"])]


class StandbyStateView(TypedDict):
    """State of the standby replicas on a node."""

    phase: Annotated[
        StandbyPhase,
        Field(
            description="`awake`; `asleep`, or warm without requests; `absent` if the node has no standby replica. "
            "`sleep_failed`, `wake_failed`: a replica did not become idle, or did not serve again."
        ),
    ]
    since_s: Annotated[float, Field(description="When the phase was first observed, in seconds since 1970 (UTC).")]
    detail: Annotated[str, Field(description="Why the replicas are absent or have failed. Empty: they have not.")]
    failure: Annotated[str, Field(description="Why they last did not become idle. Empty: they did.")]
    retry_at_s: Annotated[
        float, Field(description="Time before which the node is not lent, in seconds since 1970 (UTC).")
    ]


class WeightsView(TypedDict):
    """The PodTemplate whose pod loads weights onto a node that is recalled."""

    namespace: Annotated[str, Field(description=_WEIGHTS["namespace"])]
    pod_template: Annotated[str, Field(description=_WEIGHTS["pod_template"])]


class PrefetchPolicyView(TypedDict):
    """Loads onto the nodes of a pool before they are lent and before they are returned."""

    images: Annotated[bool, Field(description=_PREFETCH["images"])]
    weights: Annotated[WeightsView | None, Field(description=_PREFETCH["weights"])]
    timeout_s: Annotated[float, Field(description=_PREFETCH["timeout_s"])]


class PrefetchResultView(TypedDict):
    """The end of a prefetch on a node, until its pod is removed."""

    id: Annotated[str, Field(description="Uid of its pod, or the name of a pod that was rejected.")]
    purpose: Annotated[
        PrefetchPurpose,
        Field(description="`training`: images of jobs. `serving`: images of inference pods. `weights`: a PodTemplate."),
    ]
    at_s: Annotated[float, Field(description="When its end was observed, in seconds since 1970 (UTC).")]
    seconds: Annotated[float, Field(description="Time from the creation of its pod to its end.")]
    error: Annotated[str, Field(description="Why it failed. Empty: all was loaded.")]
