"""Types of fields that many documents have."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

CAMEL = ConfigDict(alias_generator=to_camel)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?", re.ASCII)
LABEL_FORM = "1 to 52 of a-z, 0-9 and '-', neither beginning nor ending with '-'"


def _dns_label(name: str) -> str:
    if not _LABEL.fullmatch(name):
        raise PydanticCustomError("name", "Input should be {form}", {"form": LABEL_FORM})
    return name


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise PydanticCustomError("text", "Input should be text without the NUL character")
    return text


Text = Annotated[str, Field(max_length=4096), AfterValidator(_without_nul)]
Label = Annotated[str, Field(description=LABEL_FORM), AfterValidator(_dns_label)]
