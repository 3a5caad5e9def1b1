"""What the OpenAPI document says of problems (RFC 9457): their form, their types, and which of them a route may answer.

A route names what follows from the state that it meets (`responses=problems(409)`). What follows from its form is put
in for all of them in `api.openapi`.
"""

from __future__ import annotations

from typing import Any

from api.errors import MEDIA_TYPE, TITLES, TYPE_PREFIX

_MEANING = {
    400: "The request cannot be read.",
    401: "No valid token came with the request.",
    403: "The token does not permit this.",
    404: "There is no such thing, or the token does not permit to see it.",
    409: "The present state does not permit it.",
    410: "What the cursor points into is kept no more; the detail says where to go on.",
    412: "It has changed since the ETag was read that `If-Match` names.",
    413: "The body is too large.",
    421: "The request names another host (only while nobody has to say who asks).",
    422: "Fields are refused; `errors` names each with its value and what is allowed.",
    429: "Too many requests: ask again after `Retry-After` seconds.",
    500: "The service made a mistake.",
    501: "The service cannot do this here; the detail says where it can be done.",
    503: "The database does not answer, or nobody leads: ask again after `Retry-After` seconds.",
}
_RETRY_AFTER = {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 0}}
REFERENCE = {"$ref": "#/components/schemas/Problem"}

FIELD_ERROR: dict[str, Any] = {
    "type": "object",
    "title": "FieldError",
    "description": "One refused field: what was given, shortened, and what is allowed; `message` is both in words.",
    "required": ["field", "value", "allowed", "message"],
    "properties": {
        "field": {"type": "string"},
        "value": {"type": ["string", "number", "boolean", "null"]},
        "allowed": {"type": "string"},
        "message": {"type": "string"},
    },
}
PROBLEM: dict[str, Any] = {
    "type": "object",
    "title": "Problem",
    "description": "Why a request was not done (RFC 9457). `type` never changes its meaning; `detail` is for people.",
    "required": ["type", "title", "status", "detail", "instance"],
    "properties": {
        "type": {"type": "string", "enum": [TYPE_PREFIX + slug for slug in TITLES]},
        "title": {"type": "string"},
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "detail": {"type": "string"},
        "instance": {"type": "string", "description": "The path that was asked."},
        "errors": {"type": "array", "items": {"$ref": "#/components/schemas/FieldError"}},
    },
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses=`: it may answer a problem of each of these statuses."""
    return {status: _response(status) for status in statuses}


def _response(status: int) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": _MEANING[status],
        "content": {MEDIA_TYPE: {"schema": REFERENCE}},
    }
    if status in (429, 503):
        response["headers"] = {"Retry-After": _RETRY_AFTER}
    return response
