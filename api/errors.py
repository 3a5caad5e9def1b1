"""Every error of the API as a problem (RFC 9457): one form, stable types, the refused fields by name."""

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

from api.audit import note_refusal
from scheduler.documents.refusal import Refusal, RefusedError, refusals, shown
from scheduler.domain.spelling import meant
from scheduler.store.protocol import UnavailableError
from scheduler.telemetry.logs import REQUEST_ID

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
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
_SLUGS = {404: "not-found", 405: "method-not-allowed", 409: "conflict", 413: "body-too-large", 422: "invalid-input"}


@dataclass(eq=False)
class ProblemError(Exception):
    """What a request ends with when it cannot be done. `slug` is a key of TITLES and never changes its meaning."""

    status: int
    slug: str
    detail: str
    errors: tuple[Refusal, ...] = ()
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.detail


def not_found(what: str, name: str, known: Iterable[str] = ()) -> NoReturn:
    """`known`: names of which one may be meant; whoever asks has to be allowed to see them."""
    raise ProblemError(404, "not-found", f"there is no {what} {shown(name)}{meant(name, known)}")


def conflict(detail: str, *refused: Refusal) -> NoReturn:
    raise ProblemError(409, "conflict", detail, refused)


def refuse(field: str, value: object, allowed: str) -> NoReturn:
    """Refuse one field of the request."""
    raise RefusedError(Refusal(field, shown(value), allowed))


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ProblemError, _problem)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(UnavailableError, unavailable_answer)
    app.add_exception_handler(Exception, _internal)


def _problem(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ProblemError)
    note_refusal(request, error.status)
    return problem_answer(request, error)


def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusedError)
    return problem_answer(request, ProblemError(422, "invalid-input", str(error), error.refusals))


def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if found and found[0]["type"] == "json_invalid":
        return _refused(request, RefusedError(Refusal("body", None, f"valid JSON ({found[0]['ctx']['error']})")))
    return _refused(request, RefusedError(*refusals(found, strip=1)))


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.BAD_REQUEST:
        # FastAPI says this of a body that is too deep, or has numbers too long, to be read as JSON.
        return _refused(request, RefusedError(Refusal("body", None, "JSON that can be read")))
    slug = _SLUGS.get(error.status_code, f"http-{error.status_code}")
    where = f"{request.method} {shown(request.url.path)}"
    said = error.detail if error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else ""
    detail = f"{where}: {said or HTTPStatus(error.status_code).phrase.lower()}"
    return problem_answer(request, ProblemError(error.status_code, slug, detail, headers=error.headers))


def unavailable_answer(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s: the database does not answer: %s", request.method, request.url.path, error)
    detail = "the database does not answer now: ask again; a job that was sent may have been taken, so look first"
    return problem_answer(request, ProblemError(503, "store-unavailable", detail, headers={"Retry-After": "5"}))


def _internal(request: Request, error: Exception) -> JSONResponse:
    """Nothing of the error itself is told: it may name files, queries or secrets. The log has it."""
    logger.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
    return problem_answer(request, ProblemError(500, "internal", "the request failed; the service's log says why"))


def problem_answer(request: Request, problem: ProblemError) -> JSONResponse:
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
    return JSONResponse(document, problem.status, headers=headers, media_type=MEDIA_TYPE)
