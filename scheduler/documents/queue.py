"""Queue documents: the REST documents and the spec of a Queue custom resource.

The quota fields of all of them are generated from their declarations in `scheduler.domain.job_queue`.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, create_model, model_validator

from scheduler.documents.document import LABEL_FORM, Document, Label, invalid_field, parse_document
from scheduler.domain.job_queue import QUOTA_FIELDS, JobQueue, QuotaField


class _Quota(Document):
    @model_validator(mode="after")
    def _check_limit(self) -> Self:
        quota = self.model_dump()
        guaranteed, limit = quota["guaranteed_gpus"], quota["limit_gpus"]
        if limit is not None and limit < guaranteed:
            names = {name: info.alias or name for name, info in type(self).model_fields.items()}
            allowed = f"null, or at least {names['guaranteed_gpus']}, which is {guaranteed}"
            raise invalid_field(names["limit_gpus"], limit, allowed)
        return self


def _model_field(declared: QuotaField, *, alias: str | None = None) -> Any:
    """Return the type and the default of a declared field, as `create_model` expects them."""
    field = Field(
        default=declared.default,
        alias=alias,
        description=declared.description,
        strict=True,
        ge=declared.minimum if declared.includes_minimum else None,
        gt=None if declared.includes_minimum else declared.minimum,
        le=declared.maximum,
    )
    return (declared.type | None if declared.is_optional else declared.type), field


class QuotaDocument(
    create_model(  # type: ignore[misc]  # the fields are declared once, in the domain
        "QuotaDocument", __base__=_Quota, **{name: _model_field(each) for name, each in QUOTA_FIELDS.items()}
    )
):
    """GPU quota of a queue. GPUs of all models count alike. In a change, omitted fields keep their value."""


class QueueDocument(QuotaDocument):
    name: Label = Field(description=f"Unique label that jobs refer to: {LABEL_FORM}.")


QueueSpec: type[Document] = create_model(
    "QueueSpec",
    __base__=_Quota,
    **{name: _model_field(each, alias=each.spec_name) for name, each in QUOTA_FIELDS.items() if each.spec_name},
)
"""Spec of a Queue custom resource."""


def to_job_queue(document: QueueDocument) -> JobQueue:
    return JobQueue(**document.model_dump())


def apply_queue_change(queue: JobQueue, change: QuotaDocument) -> JobQueue:
    """Return the queue with the fields that are set in `change`.

    Raises:
        InvalidDocumentError: the resulting limit is below the guarantee.
    """
    quota = queue.quota | change.model_dump(exclude_unset=True)
    return to_job_queue(parse_document(QueueDocument, {"name": queue.name, **quota}))


def queue_from_spec(name: str, spec: object) -> JobQueue:
    """Parse the `spec` of a Queue custom resource.

    Raises:
        InvalidDocumentError: the name or a field is invalid.
    """
    quota = parse_document(QueueSpec, spec).model_dump()
    return to_job_queue(parse_document(QueueDocument, {"name": name, **quota}))


def build_queue_spec_properties() -> dict[str, dict[str, Any]]:
    """Build the `spec.properties` of the Queue CustomResourceDefinition (OpenAPI 3.0)."""
    properties = {}
    for declared in QUOTA_FIELDS.values():
        if declared.spec_name:
            properties[declared.spec_name] = {
                "description": declared.description,
                "type": "integer" if declared.type is int else "number",
                "minimum": declared.minimum,
                **({} if declared.includes_minimum else {"exclusiveMinimum": True}),
                "maximum": declared.maximum,
                **({} if declared.is_optional else {"default": declared.default}),
            }
    return properties
