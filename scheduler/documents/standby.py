"""Documents of the standby replicas of a pool: those of the REST API, and those of a Pool resource."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scheduler.documents.demand_source import Labels
from scheduler.documents.document import CAMEL_CASE, Document, Text, parse_document
from scheduler.documents.units import Duration, PositiveDuration, SizeOrZero
from scheduler.domain.standby import LEVELS, PORT_MAX, TIMEOUT_S, TIMEOUT_S_MAX, Standby

_PORT = 8000
_LEVEL = 1
Port = Annotated[int, Field(strict=True, ge=1, le=PORT_MAX)]
Level = Annotated[int, Field(strict=True, ge=LEVELS[0], le=LEVELS[-1])]
Namespace = Annotated[Text, Field(min_length=1, max_length=63)]
Timeout = Annotated[PositiveDuration, Field(le=TIMEOUT_S_MAX)]


class StandbyDocument(Document):
    """Replicas that sleep on a node while it is lent: pods with an engine that has vLLM's sleep mode."""

    namespace: Namespace = Field(description="Kubernetes namespace in which their pods run.")
    selector: Labels = Field(description="Labels of the replicas, all of them. They request no GPUs from Kubernetes.")
    port: Port = Field(default=_PORT, description="Port of the engine's HTTP API, on the addresses of the pods.")
    level: Level = Field(
        default=_LEVEL,
        description="Sleep level. 1 moves the weights to host memory, 2 drops them and loads them again.",
    )
    gpu_memory_bytes: SizeOrZero = Field(
        default=0, description="Memory of each GPU that sleeping replicas keep, in bytes or with units. Plans avoid it."
    )
    host_memory_bytes: SizeOrZero = Field(
        default=0, description="Memory of the node that sleeping replicas keep in total, in bytes or with units."
    )
    wake_s: Duration | None = Field(
        default=None,
        description="Expected seconds from the return of a node until its replicas serve, until it has been measured. "
        "Null: `cold_start_s`.",
    )
    timeout_s: Timeout = Field(
        default=TIMEOUT_S, description="Seconds within which a replica must fall asleep, or wake, at most 3600."
    )


class StandbySpec(Document):
    """Replicas of a Pool that sleep on a node while it is lent."""

    model_config = CAMEL_CASE
    namespace: Namespace
    selector: Labels
    port: Port = _PORT
    level: Level = _LEVEL
    gpu_memory: SizeOrZero = 0
    host_memory: SizeOrZero = 0
    wake: Duration | None = None
    timeout: Timeout = TIMEOUT_S

    def to_document(self) -> dict[str, object]:
        """Return the document of the REST API."""
        return {
            "namespace": self.namespace,
            "selector": self.selector,
            "port": self.port,
            "level": self.level,
            "gpu_memory_bytes": self.gpu_memory,
            "host_memory_bytes": self.host_memory,
            "wake_s": self.wake,
            "timeout_s": self.timeout,
        }


def to_standby(document: StandbyDocument | None) -> Standby | None:
    return None if document is None else Standby(**document.model_dump())


def standby_from_spec(spec: StandbySpec | None) -> Standby | None:
    """Convert the spec of a Pool resource.

    Raises:
        InvalidDocumentError: a value is invalid.
    """
    return None if spec is None else to_standby(parse_document(StandbyDocument, spec.to_document()))
