"""Documents of the standby replicas of a pool: those of the REST API, and those of a Pool resource."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from scheduler.documents.demand_source import Labels
from scheduler.documents.document import CAMEL_CASE, Document, Text, invalid_field, parse_document
from scheduler.documents.units import Duration, PositiveDuration, SizeOrZero
from scheduler.domain.standby import (
    DRAIN_S,
    GPU_INDEX_MAX,
    LEVELS,
    PORT_MAX,
    SELECTOR_LABELS_MAX,
    TIMEOUT_S,
    TIMEOUT_S_MAX,
    URL_FORM,
    URL_LENGTH_MAX,
    Standby,
    StandbyMode,
    is_engine_url,
)

_PORT = 8000
_LEVEL = 1
Port = Annotated[int, Field(strict=True, ge=1, le=PORT_MAX)]
Level = Annotated[int, Field(strict=True, ge=LEVELS[0], le=LEVELS[-1])]
Namespace = Annotated[Text, Field(min_length=1, max_length=63)]
Timeout = Annotated[PositiveDuration, Field(le=TIMEOUT_S_MAX)]


Drain = Annotated[Duration, Field(le=TIMEOUT_S_MAX)]
GpuIndex = Annotated[int, Field(strict=True, ge=0, le=GPU_INDEX_MAX)]


class StandbyDocument(Document):
    """Replicas that stay on a node while it is lent, asleep or idle: pods with labels, or engines at URLs."""

    namespace: Annotated[Text, Field(max_length=63)] = Field(
        default="", description="Kubernetes namespace in which their pods run. Empty with `url`."
    )
    selector: Annotated[dict[Text, Text], Field(max_length=SELECTOR_LABELS_MAX)] = Field(
        default_factory=dict,
        description="Labels of their pods, all of them. They request no GPUs from Kubernetes. Empty with `url`.",
    )
    mode: StandbyMode = Field(
        default=StandbyMode.SLEEP,
        description="sleep: the engine sleeps and releases GPU memory. warm: the replica gets no requests and keeps "
        "its memory, on Kubernetes only.",
    )
    url: Annotated[Text, Field(max_length=URL_LENGTH_MAX)] = Field(
        default="",
        description="Base URL of the engine on each node, with `{node}` for the name of the node, for nodes that are "
        "machines. Empty: replicas are pods.",
    )
    gpus: list[GpuIndex] = Field(
        default_factory=list,
        description="Ascending indexes of the GPUs that the engine at `url` uses. Empty: all GPUs of the node.",
    )
    port: Port = Field(default=_PORT, description="Port of the engine's HTTP API, on the addresses of the pods.")
    level: Level = Field(
        default=_LEVEL,
        description="Sleep level. 1 moves the weights to host memory, 2 drops them and loads them again.",
    )
    gpu_memory_bytes: SizeOrZero = Field(
        default=0,
        description="Memory that idle replicas keep on each of their GPUs, in bytes or with units. Plans avoid it. "
        "Above 0 with mode warm.",
    )
    host_memory_bytes: SizeOrZero = Field(
        default=0, description="Memory of the node that idle replicas keep in total, in bytes or with units."
    )
    wake_s: Duration | None = Field(
        default=None,
        description="Expected seconds from the return of a node until its replicas serve, until it has been measured. "
        "Null: `cold_start_s`.",
    )
    timeout_s: Timeout = Field(
        default=TIMEOUT_S, description="Seconds within which a replica must be idle, or serve again, at most 3600."
    )
    drain_s: Drain = Field(
        default=DRAIN_S,
        description="Seconds in which a warm replica completes its requests after it gets no new ones, at most 3600.",
    )

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.url:
            if not is_engine_url(self.url):
                raise invalid_field("url", self.url, URL_FORM)
            for field in ("namespace", "selector"):
                if getattr(self, field):
                    raise invalid_field("url", self.url, f"nothing with {field}; set one of them")
            return self
        if not self.namespace:
            raise invalid_field("namespace", self.namespace, "the namespace of the replicas, unless url is set")
        if not self.selector:
            raise invalid_field("selector", None, "labels of the replicas, unless url is set")
        if self.gpus:
            raise invalid_field("gpus", None, "nothing without url; the kubelet chooses the GPUs of pods")
        return self

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.gpus != sorted(set(self.gpus)):
            raise invalid_field("gpus", None, "ascending indexes, each of them once")
        if self.mode is StandbyMode.WARM:
            check_warm_memory(self.gpu_memory_bytes, field="gpu_memory_bytes")
            if self.url:
                raise invalid_field("mode", self.mode, "sleep with url")
        return self


def check_warm_memory(kept_bytes: int, *, field: str) -> None:
    """Check the memory that a warm replica keeps.

    Raises:
        PydanticCustomError: it is 0, which no replica that serves at once can keep.
    """
    if not kept_bytes:
        raise invalid_field(field, kept_bytes, "the memory that a replica keeps on each GPU, above 0, with mode warm")


class StandbySpec(Document):
    """Replicas of a Pool that stay on a node while it is lent, asleep or idle."""

    model_config = CAMEL_CASE
    namespace: Namespace
    selector: Labels
    mode: StandbyMode = StandbyMode.SLEEP
    port: Port = _PORT
    level: Level = _LEVEL
    gpu_memory: SizeOrZero = 0
    host_memory: SizeOrZero = 0
    wake: Duration | None = None
    timeout: Timeout = TIMEOUT_S
    drain: Drain = DRAIN_S

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.mode is StandbyMode.WARM:
            check_warm_memory(self.gpu_memory, field="gpuMemory")
        return self

    def to_document(self) -> dict[str, object]:
        """Return the document of the REST API."""
        return {
            "namespace": self.namespace,
            "selector": self.selector,
            "mode": self.mode,
            "port": self.port,
            "level": self.level,
            "gpu_memory_bytes": self.gpu_memory,
            "host_memory_bytes": self.host_memory,
            "wake_s": self.wake,
            "timeout_s": self.timeout,
            "drain_s": self.drain,
        }


def to_standby(document: StandbyDocument | None) -> Standby | None:
    return None if document is None else Standby(**{**document.model_dump(), "gpus": tuple(document.gpus)})


def standby_from_spec(spec: StandbySpec | None) -> Standby | None:
    """Convert the spec of a Pool resource.

    Raises:
        InvalidDocumentError: a value is invalid.
    """
    return None if spec is None else to_standby(parse_document(StandbyDocument, spec.to_document()))
