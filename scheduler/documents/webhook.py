"""Documents of webhooks: their URL and the events that they receive."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from scheduler.documents.document import Document, Label, Text, invalid_field
from scheduler.domain.events import EventCode
from scheduler.domain.suggestions import suggest

URL_LENGTH_MAX = 2000
URL_FORM = "an http:// or https:// URL with a host, without user and fragment"
_EVENT_CODES = [code.value for code in EventCode]


def _check_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and not parts.fragment and "@" not in parts.netloc
    except ValueError:
        good = False
    if not good or not text.isascii() or any(mark.isspace() or not mark.isprintable() for mark in text):
        raise PydanticCustomError("url", "{form}", {"form": URL_FORM})
    return text


def _check_event_code(text: str) -> str:
    if text not in _EVENT_CODES:
        raise PydanticCustomError(
            "code", "{form}", {"form": f"one of {', '.join(_EVENT_CODES)}{suggest(text, _EVENT_CODES)}"}
        )
    return text


Url = Annotated[
    str, Field(max_length=URL_LENGTH_MAX, examples=["https://ci.example/hooks"]), AfterValidator(_check_url)
]
Codes = Annotated[list[Annotated[str, AfterValidator(_check_event_code)]], Field(max_length=len(_EVENT_CODES))]


class WebhookDocument(Document):
    """A webhook to create."""

    url: Url = Field(description=f"Address to which messages are posted: {URL_FORM}.")
    codes: Codes = Field(default=[], description="Event types to send, such as JobStarted. Empty: all.")
    queue: Label | None = Field(default=None, description="Send only events of this queue and its jobs. Null: all.")
    subject: Annotated[Text, Field(min_length=1, max_length=253)] | None = Field(
        default=None, description="Send only events of this job id, node, pool or queue. Null: all."
    )


class WebhookChange(Document):
    """Changes of a webhook. Omitted fields keep their value."""

    url: Url | None = Field(default=None, description="Address to which messages are posted. Null: unchanged.")
    codes: Codes | None = Field(
        default=None, description="Event types to send, such as JobStarted. Empty: all. Null: unchanged."
    )
    subject: Annotated[Text, Field(max_length=253)] | None = Field(
        default=None, description="Send only events of this job id, node, pool or queue. Empty: all. Null: unchanged."
    )
    enabled: Annotated[bool, Field(strict=True)] | None = Field(
        default=None,
        description="Whether to send messages. True also sends what was missed while disabled. Null: unchanged.",
    )

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if not self.model_fields_set:
            raise invalid_field("document", "nothing", "at least one of url, codes, subject and enabled")
        return self
