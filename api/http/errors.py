"""Every error of the API as a problem (RFC 9457): one form, stable types, the refused fields by name.

What the OpenAPI document says of problems (RFC 9457): their form, their types, and which of them a route may answer.

A route names what follows from the state that it meets (`responses=problems(409)`). What follows from its form is put
in for all of them in `api.openapi`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from api.identity.audit import record_forbidden_request
from scheduler.documents.document import InvalidDocumentError, InvalidField, to_invalid_fields, to_printable
from scheduler.domain.suggestions import suggest
from scheduler.store.protocol import UnavailableError
from scheduler.telemetry.logs import REQUEST_ID

logger = logging.getLogger(__name__)

PROBLEM_MEDIA_TYPE = "application/problem+json"
REQUEST_ID_HEADER = "X-Request-Id"
TYPE_PREFIX = "urn:ebbtide:problem:"
TITLES = {
    "not-found": "There is no such thing",
    "method-not-allowed": "This resource does not know the method",
    "changed": "It has changed since it was read",
    "swept": "It is kept no more",
    "conflict": "The present state does not permit it",
    "invalid-input": "The request has fields that are refused",
    "idempotency-key-reused": "The key belongs to another request",
    "infeasible": "No plan fits",
    "unauthenticated": "A token is needed",
    "forbidden": "The token does not permit this",
    "malformed": "The request cannot be read",
    "misdirected": "The request names another host",
    "body-too-large": "The body is too large",
    "rate-limited": "Too many requests",
    "issuer-unavailable": "The identity provider does not answer",
    "busy": "The service is busy",
    "not-ready": "The service is not ready",
    "store-unavailable": "The database does not answer",
    "logs-elsewhere": "The logs are not here",
    "internal": "The service made a mistake",
}
_SLUG_BY_STATUS = {
    404: "not-found",
    405: "method-not-allowed",
    409: "conflict",
    413: "body-too-large",
    422: "invalid-input",
}


@dataclass(eq=False)
class ProblemError(Exception):
    """What a request ends with when it cannot be done. `slug` is a key of TITLES and never changes its meaning."""

    status: int
    slug: str
    detail: str
    errors: tuple[InvalidField, ...] = ()
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.detail


def raise_not_found(noun: str, name: str, known: Iterable[str] = ()) -> NoReturn:
    """`known`: names of which one may be meant; whoever asks has to be allowed to see them."""
    raise ProblemError(404, "not-found", f"there is no {noun} {to_printable(name)}{suggest(name, known)}")


def raise_conflict(detail: str, *refused_fields: InvalidField) -> NoReturn:
    raise ProblemError(409, "conflict", detail, refused_fields)


def raise_invalid_field(field: str, value: object, allowed: str) -> NoReturn:
    """Refuse one field of the request."""
    raise InvalidDocumentError(InvalidField(field, to_printable(value), allowed))


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ProblemError, _handle_problem)
    app.add_exception_handler(InvalidDocumentError, _handle_refused_fields)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(UnavailableError, unavailable_response)
    app.add_exception_handler(Exception, _handle_internal_error)


def _handle_problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ProblemError)
    record_forbidden_request(request, error.status)
    return problem_response(request, error)


def _handle_refused_fields(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, InvalidDocumentError)
    return problem_response(request, ProblemError(422, "invalid-input", str(error), error.invalid_fields))


def _handle_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if found and found[0]["type"] == "json_invalid":
        return _handle_refused_fields(
            request, InvalidDocumentError(InvalidField("body", None, f"valid JSON ({found[0]['ctx']['error']})"))
        )
    return _handle_refused_fields(request, InvalidDocumentError(*to_invalid_fields(found, strip=1)))


def _handle_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.BAD_REQUEST:
        # FastAPI says this of a body that is too deep, or has numbers too long, to be read as JSON.
        return _handle_refused_fields(
            request, InvalidDocumentError(InvalidField("body", None, "JSON that can be read"))
        )
    slug = _SLUG_BY_STATUS.get(error.status_code, f"http-{error.status_code}")
    where = f"{request.method} {to_printable(request.url.path)}"
    said = error.detail if error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else ""
    detail = f"{where}: {said or HTTPStatus(error.status_code).phrase.lower()}"
    return problem_response(request, ProblemError(error.status_code, slug, detail, headers=error.headers))


def unavailable_response(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s: the database does not answer: %s", request.method, request.url.path, error)
    detail = "the database does not answer now: ask again; a job that was sent may have been taken, so look first"
    return problem_response(request, ProblemError(503, "store-unavailable", detail, headers={"Retry-After": "5"}))


def _handle_internal_error(request: Request, error: Exception) -> JSONResponse:
    """Nothing of the error itself is told: it may name files, queries or secrets. The log has it."""
    logger.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
    return problem_response(request, ProblemError(500, "internal", "the request failed; the service's log says why"))


def problem_response(request: Request, problem: ProblemError) -> JSONResponse:
    """For those who answer outside of the handlers above as well."""
    document: dict[str, Any] = {
        "type": TYPE_PREFIX + problem.slug,
        "title": TITLES.get(problem.slug, HTTPStatus(problem.status).phrase),
        "status": problem.status,
        "detail": problem.detail,
        "instance": request.url.path,
    }
    if problem.errors:
        document["errors"] = [{**asdict(refusal), "message": refusal.message} for refusal in problem.errors]
    headers = {**(problem.headers or {}), REQUEST_ID_HEADER: REQUEST_ID.get()}
    return JSONResponse(document, problem.status, headers=headers, media_type=PROBLEM_MEDIA_TYPE)


_DESCRIPTION_BY_STATUS = {
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
_RETRY_AFTER_HEADER = {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 0}}
PROBLEM_REFERENCE = {"$ref": "#/components/schemas/Problem"}

FIELD_ERROR_SCHEMA: dict[str, Any] = {
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
PROBLEM_SCHEMA: dict[str, Any] = {
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


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses=`: it may answer a problem of each of these statuses."""
    return {status: _openapi_response(status) for status in statuses}


def _openapi_response(status: int) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": _DESCRIPTION_BY_STATUS[status],
        "content": {PROBLEM_MEDIA_TYPE: {"schema": PROBLEM_REFERENCE}},
    }
    if status in (429, 503):
        response["headers"] = {"Retry-After": _RETRY_AFTER_HEADER}
    return response
