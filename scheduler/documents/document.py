"""Document: the base of every outside form. Nothing unknown, nothing infinite, frozen once read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from scheduler.documents.refusal import RefusedError, refusals, refused_field
from scheduler.domain.spelling import meant

D = TypeVar("D", bound="Document")


class Document(BaseModel):
    """An unknown field is refused together with the names of the fields that exist."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_known_fields_only(cls, document: Any) -> Any:
        if isinstance(document, Mapping):
            known = [info.alias or name for name, info in cls.model_fields.items()]
            for name, value in document.items():
                if name not in known:
                    raise refused_field(
                        str(name), value, f"one of the fields {', '.join(known)}{meant(str(name), known)}"
                    )
        return document


def read(form: type[D], document: object) -> D:
    """`document` (plain JSON or YAML values) in the given form.

    Raises:
        RefusedError: one or more fields are refused.
    """
    try:
        return form.model_validate(document)
    except ValidationError as wrong:
        raise RefusedError(*refusals(wrong.errors())) from None
