"""Documents of what is loaded onto the nodes of a pool before they change hands: those of REST and of a Pool."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from scheduler.documents.document import CAMEL_CASE, Document, Text, invalid_field
from scheduler.documents.units import Duration
from scheduler.domain.prefetch import TIMEOUT_S, TIMEOUT_S_MAX, TIMEOUT_S_MIN, PrefetchPolicy, WeightsTemplate

Images = Annotated[bool, Field(strict=True)]
Namespace = Annotated[Text, Field(min_length=1, max_length=63)]
TemplateName = Annotated[Text, Field(min_length=1, max_length=253)]
Timeout = Annotated[Duration, Field(ge=TIMEOUT_S_MIN, le=TIMEOUT_S_MAX)]


class WeightsDocument(Document):
    """The PodTemplate whose pod loads weights onto a node that is recalled."""

    namespace: Namespace = Field(description="Kubernetes namespace of the PodTemplate, and of its pods.")
    pod_template: TemplateName = Field(description="Name of the PodTemplate (v1). Its pod requests no GPUs, and ends.")


class PrefetchDocument(Document):
    """Loads onto the nodes of a pool before they are lent and before they are returned, on Kubernetes."""

    images: Images = Field(
        default=True,
        description="Whether images are pulled: those of jobs while a node is offered, and those of the pool's "
        "inference pods while it is recalled.",
    )
    weights: WeightsDocument | None = Field(
        default=None, description="PodTemplate whose pod runs on a node while it is recalled. Null: none."
    )
    timeout_s: Timeout = Field(
        default=TIMEOUT_S, description="Seconds after which a prefetch is stopped, 10 to 7200. It delays no loan."
    )

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        check_prefetch_content(images=self.images, has_weights=self.weights is not None)
        return self


def check_prefetch_content(*, images: bool, has_weights: bool) -> None:
    """Check that a policy loads something.

    Raises:
        PydanticCustomError: it loads neither images nor weights.
    """
    if not images and not has_weights:
        raise invalid_field("images", images, "true, or weights; else leave out prefetch")


class WeightsSpec(Document):
    """The PodTemplate of a Pool whose pod loads weights onto a node that is recalled."""

    model_config = CAMEL_CASE
    namespace: Namespace
    pod_template: TemplateName


class PrefetchSpec(Document):
    """Loads onto the nodes of a Pool before they are lent and before they are returned."""

    model_config = CAMEL_CASE
    images: Images = True
    weights: WeightsSpec | None = None
    timeout: Timeout = TIMEOUT_S

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        check_prefetch_content(images=self.images, has_weights=self.weights is not None)
        return self

    def to_document(self) -> dict[str, object]:
        """Return the document of the REST API."""
        weights = None if self.weights is None else self.weights.model_dump()
        return {"images": self.images, "weights": weights, "timeout_s": self.timeout}


def to_prefetch(document: PrefetchDocument | None) -> PrefetchPolicy | None:
    if document is None:
        return None
    weights = None if document.weights is None else WeightsTemplate(**document.weights.model_dump())
    return PrefetchPolicy(document.images, weights, document.timeout_s)
