"""Answers of the service: JSON objects with their ETags, and the errors that the client raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FieldError:
    """One field of a request that the service rejected."""

    field: str
    message: str


@dataclass(eq=False)
class ProblemError(Exception):
    """The service answered with a problem (RFC 9457). `status` is the HTTP status."""

    status: int
    type: str
    title: str
    detail: str = ""
    errors: tuple[FieldError, ...] = ()

    def __str__(self) -> str:
        return self.detail or self.title or f"HTTP {self.status}"


class UnreachableError(Exception):
    """No usable response: connection refused or broken, timeout, or a server that is not an Ebbtide service.

    `advice` is the end of the message: what is wrong with the URL, if that is known.
    """

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message + advice)
        self.advice = advice


class _TaggedObject(JsonObject):
    """A JSON object with the ETag of its response."""

    def __init__(self, document: JsonObject, etag: str) -> None:
        super().__init__(document)
        self.etag = etag


def etag_of(view: Mapping[str, object]) -> str:
    """Return the ETag of a job, pool, node, queue or GPU profile that the client returned. Pass it as `if_match`.

    Raises:
        ValueError: `view` has no ETag, for example because it is a copy.
    """
    if not isinstance(view, _TaggedObject) or not view.etag:
        known = "a job, pool, node, queue or GPU profile"
        raise ValueError(f"view: it has no ETag. Pass {known} exactly as the client returned it")
    return view.etag


def read_answer(response: httpx.Response) -> JsonObject:
    """Return the JSON object of the response; an empty one if the response has no body.

    Raises:
        ProblemError: the service rejected the request.
        UnreachableError: the server is not an Ebbtide service.
    """
    if response.is_error:
        raise to_problem_error(response)
    url = response.request.url.copy_with(query=None)
    if response.is_redirect:
        raise UnreachableError(f"{url} redirects to {response.headers['Location']}. Use that server's URL")
    if not response.content:
        return {}
    document = read_json(response)
    if not isinstance(document, dict):
        raise UnreachableError(f"{url} did not answer with a JSON object: is this an Ebbtide service?")
    return _TaggedObject(document, response.headers.get("ETag", ""))


def read_json(response: httpx.Response) -> Any:
    """Return the body as JSON, or None if it is something else."""
    try:
        return response.json()
    except ValueError:
        return None


def to_problem_error(response: httpx.Response) -> ProblemError:
    """Return the problem of a response whose body has been read."""
    document = read_json(response)
    if not isinstance(document, dict):
        document = {}
    return ProblemError(
        status=response.status_code,
        type=str(document.get("type", "about:blank")),
        title=str(document.get("title", response.reason_phrase)),
        detail=str(document.get("detail", "")),
        errors=tuple(_to_field_error(item) for item in document.get("errors", ())),
    )


def _to_field_error(item: Any) -> FieldError:
    if not isinstance(item, dict):
        return FieldError("", str(item))
    return FieldError(str(item.get("field", "")), str(item.get("message", "")))
