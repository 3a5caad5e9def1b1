"""Base class, field types and validation errors of all documents that come from outside."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from scheduler.domain.suggestions import suggest

_VALUE_LENGTH_MAX = 200
_PLAIN_MESSAGES = {
    "missing": "a value; the field is required",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


@dataclass(frozen=True, slots=True)
class InvalidField:
    """An invalid field of a document, the given value and the allowed values.

    `value` is shortened and can always be written as JSON. None means that the field is missing.
    """

    field: str
    value: str | int | float | bool | None
    allowed: str

    @property
    def message(self) -> str:
        got = "nothing" if self.value is None else json.dumps(self.value, ensure_ascii=False)
        return f"{self.field}: got {got}; allowed: {self.allowed}"


class UnknownField(InvalidField):
    """A field that the document does not have, most often a misspelled one. `allowed` names those that it has."""

    @property
    def message(self) -> str:
        return f"{self.field}: there is no such field; allowed: {self.allowed}"


class InvalidDocumentError(ValueError):
    """A document has invalid fields. The message names all of them."""

    def __init__(self, *invalid_fields: InvalidField) -> None:
        super().__init__("; ".join(each.message for each in invalid_fields))
        self.invalid_fields = invalid_fields


def to_invalid_fields(errors: Iterable[Mapping[str, Any]], *, strip: int = 0) -> tuple[InvalidField, ...]:
    """Convert pydantic's errors. The first `strip` parts of each location are omitted from the field name."""
    return tuple(_to_invalid_field(error, strip) for error in errors)


def invalid_field(field: str, value: object, allowed: str) -> PydanticCustomError:
    """Create the error that a validator of a whole document raises about one of its fields."""
    return PydanticCustomError(
        "refused_field", "{allowed}", {"field": field, "value": to_printable(value), "allowed": allowed}
    )


def _unknown_field(name: str, value: object, known: Iterable[str]) -> PydanticCustomError:
    names = list(known)
    allowed = f"one of the fields {', '.join(names)}{suggest(name, names)}"
    context = {"field": name, "value": to_printable(value), "allowed": allowed}
    return PydanticCustomError("unknown_field", "{allowed}", context)


def to_printable(value: object) -> str | int | float | bool | None:
    """Return the value in a form that JSON and a terminal can always show."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if abs(value) < 2**53:
            return value
        return f"{value:.6e}" if abs(value) < 10**300 else "a number of over 300 digits"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = value if isinstance(value, str) else repr(value)
    return text[:_VALUE_LENGTH_MAX].encode("utf-8", "backslashreplace").decode()


def _to_invalid_field(error: Mapping[str, Any], strip: int) -> InvalidField:
    location = [str(part) for part in error["loc"][strip:]]
    if error["type"] in ("refused_field", "unknown_field"):
        context = error["ctx"]
        kind = UnknownField if error["type"] == "unknown_field" else InvalidField
        return kind(str(to_printable(".".join([*location, context["field"]]))), context["value"], context["allowed"])
    field = str(to_printable(".".join(location))) or "document"
    allowed = _PLAIN_MESSAGES.get(error["type"]) or error["msg"].removeprefix("Input should be ")
    value = None if error["type"] == "missing" else error["input"]
    if error["type"] in ("enum", "literal_error") and isinstance(value, str):
        allowed += suggest(value, re.findall(r"'([^']*)'", error["ctx"]["expected"]))
    return InvalidField(field, to_printable(value), allowed)


CAMEL_CASE = ConfigDict(alias_generator=to_camel)
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?", re.ASCII)
LABEL_FORM = "1 to 52 characters of a-z, 0-9 and '-', starting and ending with a letter or digit"


def _check_dns_label(name: str) -> str:
    if not _DNS_LABEL.fullmatch(name):
        raise PydanticCustomError("name", "Input should be {form}", {"form": LABEL_FORM})
    return name


def require_form(pattern: str, form: str) -> AfterValidator:
    """Return a validator of text whose error describes the accepted form in words. The schema needs the pattern too."""
    compiled = re.compile(pattern, re.ASCII)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise PydanticCustomError("form", "Input should be {form}", {"form": form})
        return text

    return AfterValidator(check)


def _reject_nul(text: str) -> str:
    if "\0" in text:
        raise PydanticCustomError("text", "Input should be text without the NUL character")
    return text


Text = Annotated[str, Field(max_length=4096), AfterValidator(_reject_nul)]
Label = Annotated[str, Field(description=LABEL_FORM), AfterValidator(_check_dns_label)]


D = TypeVar("D", bound="Document")


class Document(BaseModel):
    """Base of all documents. Unknown fields and infinite numbers are rejected, and parsed documents are immutable."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_fields(cls, document: Any) -> Any:
        if isinstance(document, Mapping):
            known = [info.alias or name for name, info in cls.model_fields.items()]
            for name, value in document.items():
                if name not in known:
                    raise _unknown_field(str(name), value, known)
        return document


def parse_document(model: type[D], document: object) -> D:
    """Parse plain JSON or YAML values.

    Raises:
        InvalidDocumentError: one or more fields are invalid.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise InvalidDocumentError(*to_invalid_fields(error.errors())) from None
