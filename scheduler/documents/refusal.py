"""Refusal: what is wrong with an outside document, as field, value and what is allowed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

from scheduler.domain.spelling import meant

_SHOWN_CHARACTERS = 200
_PLAINER = {"missing": "a value; it is required", "model_type": "an object", "model_attributes_type": "an object"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused field. `value` is what was given, shortened and always writable as JSON; None where it is missing."""

    field: str
    value: str | int | float | bool | None
    allowed: str

    @property
    def message(self) -> str:
        got = "nothing" if self.value is None else json.dumps(self.value, ensure_ascii=False)
        return f"{self.field}: got {got}; allowed: {self.allowed}"


class RefusedError(ValueError):
    """A document that is not what it should be; the message names every refused field."""

    def __init__(self, *refusals: Refusal) -> None:
        super().__init__("; ".join(refusal.message for refusal in refusals))
        self.refusals = refusals


def refusals(errors: Iterable[Mapping[str, Any]], *, strip: int = 0) -> tuple[Refusal, ...]:
    """pydantic's errors as refusals. `strip` leading parts of each location are left out of the field's name."""
    return tuple(_refusal(error, strip) for error in errors)


def refused_field(field: str, value: object, allowed: str) -> PydanticCustomError:
    """The error for a validator of a whole document to raise about one field in it."""
    return PydanticCustomError(
        "refused_field", "{allowed}", {"field": field, "value": shown(value), "allowed": allowed}
    )


def shown(value: object) -> str | int | float | bool | None:
    """`value` in a form that JSON and a terminal can always show."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return (
            value if abs(value) < 2**53 else f"{value:.6e}" if abs(value) < 10**300 else "a number of over 300 digits"
        )
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = value if isinstance(value, str) else repr(value)
    return text[:_SHOWN_CHARACTERS].encode("utf-8", "backslashreplace").decode()


def _refusal(error: Mapping[str, Any], strip: int) -> Refusal:
    location = [str(part) for part in error["loc"][strip:]]
    if error["type"] == "refused_field":
        context = error["ctx"]
        return Refusal(str(shown(".".join([*location, context["field"]]))), context["value"], context["allowed"])
    field = str(shown(".".join(location))) or "document"
    allowed = _PLAINER.get(error["type"]) or error["msg"].removeprefix("Input should be ")
    value = None if error["type"] == "missing" else error["input"]
    if error["type"] in ("enum", "literal_error") and isinstance(value, str):
        allowed += meant(value, re.findall(r"'([^']*)'", error["ctx"]["expected"]))
    return Refusal(field, shown(value), allowed)
