"""The memory and cores of a job: `resources` of a job document."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from scheduler.documents.document import CAMEL_CASE, Document, invalid_field
from scheduler.documents.units import parse_bytes
from scheduler.domain.job_resources import MEMORY, NO_RESOURCES, JobResources
from scheduler.domain.quantities import CPU, parse_quantity

_MEMORY_MIN, _MEMORY_MAX = 2**20, 2**53
_MEMORY_FORM = "an amount of memory from 1Mi, such as 64Gi or 64GiB"
_CPUS_MIN, _CPUS_MAX = Fraction(1, 1000), 10_000
_CPU_FORM = "a number of cores from 1m to 10000, such as 8, 1.5 or 500m"


def _validate_memory(value: Any) -> int:
    amount = parse_quantity(value)
    if amount is None:
        try:
            amount = Fraction(parse_bytes(value))
        except ValueError:
            amount = Fraction(0)
    if not _MEMORY_MIN <= amount <= _MEMORY_MAX:
        raise PydanticCustomError("memory", "Input should be {form}", {"form": _MEMORY_FORM})
    return int(amount)


def _validate_cpus(value: Any) -> float:
    amount = parse_quantity(value)
    if amount is None or not _CPUS_MIN <= amount <= _CPUS_MAX:
        raise PydanticCustomError("cpu", "Input should be {form}", {"form": _CPU_FORM})
    return float(amount)


def _json_schema(number: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": number, "minimum": 0}, {"type": "string"}], "examples": [example]})


class JobResourcesDocument(Document):
    """Memory and cores that a job may use on each node, or for each GPU."""

    model_config = CAMEL_CASE
    memory: Annotated[int, BeforeValidator(_validate_memory), _json_schema("integer", "64Gi")] | None = Field(
        default=None,
        description="Main memory, such as 64Gi. A run that needs more ends. Shared memory counts. Default: what "
        "`--memory-limit` of the node's agent gives; on Kubernetes, what `template` says.",
    )
    cpu: Annotated[float, BeforeValidator(_validate_cpus), _json_schema("number", "8")] | None = Field(
        default=None,
        description="Cores, such as 8 or 500m. A run that needs more is slowed down. Default: all cores that other "
        "jobs leave idle; on Kubernetes, what `template` says.",
    )


def to_job_resources(document: JobResourcesDocument | None) -> JobResources:
    return NO_RESOURCES if document is None else JobResources(document.memory, document.cpu)


def to_resources_document(resources: JobResources) -> dict[str, Any] | None:
    """Return the document of the resources in plain JSON values, None for a job that states none."""
    stated = {MEMORY: resources.memory_bytes, CPU: resources.cpus}
    return {name: amount for name, amount in stated.items() if amount is not None} or None


def check_resources(document: JobResourcesDocument | None, template: Mapping[str, Any] | None) -> None:
    """Check that `resources` and the first container of the template do not state the same resource.

    Raises:
        InvalidFieldError: both state it.
    """
    stated = to_resources_document(to_job_resources(document)) or {}
    container = {} if template is None else template["spec"]["containers"][0].get("resources") or {}
    for name, amount in stated.items():
        if any(name in (container.get(kind) or {}) for kind in ("requests", "limits")):
            raise invalid_field(f"resources.{name}", amount, "nothing; the first container of `template` states it")
