"""Errors of the API as problem documents (RFC 9457), and their description in the OpenAPI document.

A route declares the problems that depend on the state, with `responses=problem_responses(409)`. `api.openapi` adds the
problems that every route can return.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

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
    "not-found": "Not found",
    "method-not-allowed": "The resource does not support this method",
    "changed": "The resource has changed since it was read",
    "swept": "Deleted by retention",
    "conflict": "The current state does not allow this change",
    "invalid-input": "The request has invalid fields",
    "idempotency-key-reused": "The idempotency key was used for another request",
    "infeasible": "No plan is feasible",
    "unauthenticated": "Authentication required",
    "join-token-unknown": "The join token is unknown",
    "join-token-used": "The join token was used",
    "join-token-expired": "The join token has expired",
    "pool-missing": "The pool of the join token was deleted",
    "machine-name-taken": "Another machine has this name",
    "machine-revoked": "The machine was revoked",
    "agent-incompatible": "The agent and the service have different versions",
    "clock-skew": "The clocks of machine and service differ too much",
    "forbidden": "Permission denied",
    "malformed": "Malformed request",
    "misdirected": "Host or origin not allowed",
    "body-too-large": "The request body is too large",
    "rate-limited": "Too many requests",
    "issuer-unavailable": "The identity provider is unavailable",
    "busy": "The service is busy",
    "not-ready": "The service is not ready",
    "store-unavailable": "The database is unavailable",
    "logs-elsewhere": "The logs are stored elsewhere",
    "internal": "Internal error",
}
_PARAMETER = re.compile(r"{[^}]*}")
_SLUG_BY_STATUS = {
    404: "not-found",
    405: "method-not-allowed",
    409: "conflict",
    413: "body-too-large",
    422: "invalid-input",
}


@dataclass(eq=False)
class ProblemError(Exception):
    """Error that ends a request with a problem response. `slug` is a key of TITLES; its meaning never changes."""

    status: int
    slug: str
    detail: str
    errors: tuple[InvalidField, ...] = ()
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.detail


class AuthenticationFailedError(ProblemError):
    """The request's token is missing, unknown, or of another kind of caller. The access log has each one."""


def raise_not_found(noun: str, name: str, known: Iterable[str] = ()) -> NoReturn:
    """Raise a 404. `known` holds names to suggest; the caller must be allowed to see them."""
    raise ProblemError(404, "not-found", f"{noun} {to_printable(name)} does not exist{suggest(name, known)}")


def raise_conflict(detail: str, *refused_fields: InvalidField) -> NoReturn:
    raise ProblemError(409, "conflict", detail, refused_fields)


def raise_invalid_field(field: str, value: object, allowed: str) -> NoReturn:
    """Raise a 422 about one field of the request."""
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
        # FastAPI raises this for JSON that is nested too deeply or has numbers that are too long.
        return _handle_refused_fields(
            request,
            InvalidDocumentError(
                InvalidField("body", None, "JSON that Python can parse (nesting and numbers of reasonable size)")
            ),
        )
    slug = _SLUG_BY_STATUS.get(error.status_code, f"http-{error.status_code}")
    where = f"{request.method} {to_printable(request.url.path)}"
    reason = error.detail if error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else ""
    detail = f"{where}: {reason or HTTPStatus(error.status_code).phrase.lower()}"
    headers = error.headers
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"Allow": ", ".join(_list_allowed_methods(request))}
        detail = f"{detail}; allowed: {headers['Allow']}"
    return problem_response(request, ProblemError(error.status_code, slug, detail, headers=headers))


def _list_allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes with the request's path. Starlette names those of the first one only.

    A path such as `/v1/jobs/x:suspend` matches `/v1/jobs/{job_id}` too; the route with the most literal text counts.
    """
    matching = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    lengths = [len(_PARAMETER.sub("", route.path)) for route in matching]
    closest = [route for route, length in zip(matching, lengths, strict=True) if length == max(lengths)]
    return sorted({method for route in closest for method in route.methods or ()})


def unavailable_response(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s: the database is unavailable: %s", request.method, request.url.path, error)
    detail = "the database is unavailable. Retry, but first check whether a submitted job was accepted"
    return problem_response(request, ProblemError(503, "store-unavailable", detail, headers={"Retry-After": "5"}))


def _handle_internal_error(request: Request, error: Exception) -> JSONResponse:
    """Answer 500 without the error's text, which may contain file names, queries or secrets. The log has it."""
    logger.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
    return problem_response(
        request, ProblemError(500, "internal", "the request failed. See the service's log for the reason")
    )


def problem_response(request: Request, problem: ProblemError) -> JSONResponse:
    """Return the response for a problem.

    Code that runs outside the exception handlers, such as middleware, uses it too.
    """
    request.state.has_failed_authentication = isinstance(problem, AuthenticationFailedError)
    document: dict[str, Any] = {
        "type": TYPE_PREFIX + problem.slug,
        "title": TITLES.get(problem.slug, HTTPStatus(problem.status).phrase),
        "status": problem.status,
        "detail": problem.detail,
        "instance": request.url.path,
    }
    if problem.errors:
        document["errors"] = [{**asdict(field), "message": field.message} for field in problem.errors]
    headers = {**(problem.headers or {}), REQUEST_ID_HEADER: REQUEST_ID.get()}
    return JSONResponse(document, problem.status, headers=headers, media_type=PROBLEM_MEDIA_TYPE)


_DESCRIPTION_BY_STATUS = {
    400: "The path, query or a header is malformed.",
    401: "The request has no valid token.",
    403: "The token does not grant the required role.",
    404: "It does not exist, or the caller may not see it.",
    409: "The current state does not allow this change.",
    410: "Retention has deleted the items after the cursor. Start again without a cursor.",
    412: "The resource no longer has the ETag in `If-Match`.",
    413: "The request body is too large.",
    421: "The Host or Origin header is not allowed (only while authentication is off).",
    422: "The request has invalid fields. `errors` lists each with its value and the accepted values.",
    429: "Too many requests. Retry after `Retry-After` seconds.",
    500: "Internal error.",
    501: "This service does not store the data; the detail says where to find it.",
    503: "The database is unavailable, or there is no leader. Retry after `Retry-After` seconds.",
}
_RETRY_AFTER_HEADER = {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 0}}
PROBLEM_REFERENCE = {"$ref": "#/components/schemas/Problem"}

FIELD_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "FieldError",
    "description": "One invalid field of the request.",
    "required": ["field", "value", "allowed", "message"],
    "properties": {
        "field": {"type": "string", "description": "Path of the invalid value, such as `gpus.max`."},
        "value": {
            "type": ["string", "number", "boolean", "null"],
            "description": "What was given, shortened to 200 characters. Null: nothing.",
        },
        "allowed": {"type": "string", "description": "What is accepted instead, in words."},
        "message": {"type": "string", "description": "One sentence with the given and the accepted value."},
    },
}
PROBLEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "Problem",
    "description": "Why a request failed (RFC 9457).",
    "required": ["type", "title", "status", "detail", "instance"],
    "properties": {
        "type": {
            "type": "string",
            "enum": [TYPE_PREFIX + slug for slug in TITLES],
            "description": "Kind of failure, to compare in code. Its meaning never changes.",
        },
        "title": {"type": "string", "description": "Short text for the kind of failure."},
        "status": {
            "type": "integer",
            "minimum": 400,
            "maximum": 599,
            "description": "HTTP code of the response.",
        },
        "detail": {"type": "string", "description": "What went wrong, for people. The wording can change."},
        "instance": {"type": "string", "description": "The path of the request."},
        "errors": {
            "type": "array",
            "items": {"$ref": "#/components/schemas/FieldError"},
            "description": "Invalid fields of the request. Absent: the failure has another cause.",
        },
    },
}


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the value of a route's `responses=` that declares a problem for each of these statuses."""
    return {status: _openapi_response(status) for status in statuses}


_EXAMPLE_BY_STATUS = {
    400: ("malformed", "the path is not percent-encoded UTF-8"),
    401: ("unauthenticated", "this needs a token: Authorization: Bearer ebk_..."),
    403: ("forbidden", "this needs the role admin; you are ada with submitter"),
    404: ("not-found", "job train-x7k2qa4bcd does not exist"),
    409: ("conflict", "job train-x7k2qa4bcd is running and not suspended"),
    410: ("swept", "events up to number 4100 were deleted by retention. Start again without a cursor"),
    412: ("changed", 'If-Match: job train-x7k2qa4bcd has changed since "a1"; its ETag is now "b2"'),
    413: ("body-too-large", "the request body has more than 1048576 bytes, the maximum for this route"),
    421: ("misdirected", "Host: 'evil.example' is not allowed while authentication is off"),
    422: ("invalid-input", "gpus.max: got 1; allowed: a range with min <= max; this would be 2 to 1"),
    429: ("rate-limited", "too many requests; retry after 1 s"),
    500: ("internal", "the request failed. See the service's log for the reason"),
    501: ("logs-elsewhere", "job train-x7k2qa4bcd runs in pods; the cluster has their logs"),
    503: ("store-unavailable", "the database is unavailable"),
}


def _build_example(status: int) -> dict[str, Any]:
    slug, detail = _EXAMPLE_BY_STATUS[status]
    path = "/v1/jobs/train-x7k2qa4bcd"
    example: dict[str, Any] = {
        "type": TYPE_PREFIX + slug,
        "title": TITLES[slug],
        "status": status,
        "detail": detail,
        "instance": path,
    }
    if status == HTTPStatus.UNPROCESSABLE_ENTITY:
        allowed = "a range with min <= max; this would be 2 to 1"
        example["errors"] = [{"field": "gpus.max", "value": 1, "allowed": allowed, "message": detail}]
    return example


def _openapi_response(status: int) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": _DESCRIPTION_BY_STATUS[status],
        "content": {PROBLEM_MEDIA_TYPE: {"schema": PROBLEM_REFERENCE, "example": _build_example(status)}},
    }
    if status in (429, 503):
        response["headers"] = {"Retry-After": _RETRY_AFTER_HEADER}
    return response
