"""The OpenAPI document: FastAPI's, with the problems, headers, tokens and examples that all routes share put in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.http.errors import FIELD_ERROR_SCHEMA, PROBLEM_SCHEMA, problem_responses

PUBLIC_TAG = "service"
"""What tells how the service itself fares asks for no token."""
_COMMON_STATUSES = (400, 401, 403, 421, 429, 500, 503)
_PUBLIC_STATUSES = (400, 421, 429, 500, 503)
_WRITE_METHODS = ("post", "put", "patch")
_TAG_DESCRIPTIONS = {
    "jobs": "Training jobs: submit, follow, change.",
    "fleet": "Pools and nodes, and the demand of inference.",
    "queues": "Who pays for jobs, and how many GPUs that buys.",
    "lending": "Inference nodes in training use.",
    "record": "What happened and what was decided.",
    "usage": "Who held how many GPU-seconds.",
    "webhooks": "Events sent to a URL.",
    "simulations": "Traces played in the background, under one or more policy sets.",
    "identity": "Who asks: tokens, and the log of what was asked for.",
    "plans": "The solver, for any model on any GPUs.",
    PUBLIC_TAG: "How the service itself fares.",
}
_BEARER_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API token, an OpenID Connect token, or the token that a worker or agent was started with.",
}
_REQUEST_ID_HEADER = {"description": "Names the request in the log and in the audit log.", "schema": {"type": "string"}}
_ETAG_HEADER = {"description": "Of what was asked for; goes into `If-Match`.", "schema": {"type": "string"}}
_ETAG_SCHEMAS = ("JobView", "PoolView", "NodeView", "QueueView")
"""Answers that come with an ETag."""
_LOCATION_HEADER = {"description": "Path of what was made.", "schema": {"type": "string"}}


class OpenApiApp(FastAPI):
    """An application whose /openapi.json is the whole document; it is made once."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _build_document(self)
        return self.openapi_schema


def _build_document(app: FastAPI) -> dict[str, Any]:
    tags = [{"name": name, "description": text} for name, text in _TAG_DESCRIPTIONS.items()]
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, tags=tags
    )
    schemas = document["components"]["schemas"]
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    schemas |= {"Problem": PROBLEM_SCHEMA, "FieldError": FIELD_ERROR_SCHEMA}
    document["components"]["securitySchemes"] = {"bearer": _BEARER_SCHEME}
    document["security"] = [{"bearer": []}]
    for method, path, operation in iterate_operations(document):
        _add_problem_responses(operation, method, path)
        _add_headers(operation, method)
        _add_examples(operation)
        if PUBLIC_TAG in operation.get("tags", ()):
            operation["security"] = []
    return document


def iterate_operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each operation with its method and path."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def _add_problem_responses(operation: dict[str, Any], method: str, path: str) -> None:
    """Those that follow from the operation's form."""
    statuses = list(_PUBLIC_STATUSES if PUBLIC_TAG in operation.get("tags", ()) else _COMMON_STATUSES)
    if "{" in path:
        statuses.append(404)
    if operation.get("parameters") or "requestBody" in operation:
        statuses.append(422)
    if method in _WRITE_METHODS:
        statuses.append(413)
    if any(parameter["name"] == "If-Match" for parameter in operation.get("parameters", ())):
        statuses.append(412)
    responses = operation["responses"]
    responses |= {str(status): response for status, response in problem_responses(*statuses).items()}
    operation["responses"] = dict(sorted(responses.items()))


def _add_headers(operation: dict[str, Any], method: str) -> None:
    """What is gone once it is deleted has no tag any more; a job that is cancelled stays."""
    tagged = _ETAG_SCHEMAS if method != "delete" else _ETAG_SCHEMAS[:1]
    for status, response in operation["responses"].items():
        headers = response.setdefault("headers", {})
        headers["X-Request-Id"] = _REQUEST_ID_HEADER
        if status == "201":
            headers["Location"] = _LOCATION_HEADER
        if any(_schema_name(content) in tagged for content in response.get("content", {}).values()):
            headers["ETag"] = _ETAG_HEADER


def _add_examples(operation: dict[str, Any]) -> None:
    """By the name of the schema: what a noun looks like is the same wherever it is told or asked for."""
    bodies = [operation.get("requestBody", {})]
    bodies += [response for status, response in operation["responses"].items() if status.startswith("2")]
    for body in bodies:
        for content in body.get("content", {}).values():
            name = _schema_name(content)
            if name in load_examples():
                content["example"] = load_examples()[name]


def _schema_name(content: dict[str, Any]) -> str:
    """The name of the schema that a body keeps to; empty where it has none of its own."""
    name: str = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return name


@cache
def load_examples() -> dict[str, Any]:
    """Documents by the name of their schema."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))
    pages = {f"PageOf_{name}_": {"items": [document], "next": None} for name, document in found.items()}
    return {**pages, **found}
