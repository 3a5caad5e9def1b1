"""The OpenAPI document: FastAPI's, plus the problems, headers, authentication and examples that all routes share.

Generators of clients read it, so every schema has one name, which is its title too: pages of `JobView` are `JobPage`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from api.http.deprecation import HEADERS as DEPRECATION_HEADERS
from api.http.deprecation import find_deprecation
from api.http.errors import FIELD_ERROR_SCHEMA, PROBLEM_SCHEMA, problem_responses

PUBLIC_TAG = "service"
"""Operations with this tag need no token."""
_COMMON_STATUSES = (400, 401, 403, 421, 429, 500, 503)
_PUBLIC_STATUSES = (400, 421, 429, 500, 503)
_WRITE_METHODS = ("post", "put", "patch")
_TAG_DESCRIPTIONS = {
    "jobs": "Training jobs: submit, follow, change.",
    "fleet": "Pools and nodes, and the demand of inference.",
    "machines": "Machines with an agent: join tokens, joining, inventories, revocation.",
    "queues": "Queues of jobs with their guarantees, limits and weights.",
    "secrets": "Encrypted secrets of queues, which jobs name and their ranks receive.",
    "lending": "Loans of inference nodes to training.",
    "record": "Events, decisions and snapshots.",
    "usage": "GPU-seconds by queue, owner, GPU model and time.",
    "webhooks": "Events sent to a URL.",
    "simulations": "Simulations of job traces in the background, under one or more policy sets.",
    "identity": "The caller's identity, API tokens, service accounts, the audit log and the settings.",
    "hardware": "GPU profiles, and networks of pools, that plans are computed from.",
    "plans": "Parallel plans for any model on any GPUs.",
    PUBLIC_TAG: "Health and metrics of the service.",
}
_BEARER_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API token, an OpenID Connect token, or the token of a worker or agent.",
}
_REQUEST_ID_HEADER = {
    "description": "Identifies the request in the log and in the audit log.",
    "schema": {"type": "string"},
}
_ETAG_HEADER = {"description": "The resource's ETag, to send as `If-Match`.", "schema": {"type": "string"}}
_ETAG_SCHEMAS = ("JobView", "PoolView", "NodeView", "QueueView", "GpuProfileDetailsView")
"""Schemas of responses that carry an ETag."""
_SERVERS = [{"url": "/", "description": "The service that serves this document."}]
_PAGE_NAME = re.compile(r"PageOf_(\w+?)(?:View)?_")
_LOCATION_HEADER = {"description": "Path of the created resource.", "schema": {"type": "string"}}


class OpenApiApp(FastAPI):
    """An application that builds its complete OpenAPI document once, on first use."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _build_document(self)
        return self.openapi_schema


def _build_document(app: FastAPI) -> dict[str, Any]:
    tags = [{"name": name, "description": text} for name, text in _TAG_DESCRIPTIONS.items()]
    document = _name_pages(
        get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            tags=tags,
            servers=_SERVERS,
        )
    )
    schemas = document["components"]["schemas"]
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    schemas |= {"Problem": PROBLEM_SCHEMA, "FieldError": FIELD_ERROR_SCHEMA}
    for name, schema in schemas.items():
        schema["title"] = name
        for field in schema.get("properties", {}).values() if name.endswith("View") else ():
            field |= {"anyOf": [_to_enum(choice) for choice in field["anyOf"]]} if "anyOf" in field else {}
    document["components"]["securitySchemes"] = {"bearer": _BEARER_SCHEME}
    document["security"] = [{"bearer": []}]
    for method, path, operation in iterate_operations(document):
        _add_problem_responses(operation, method, path)
        _add_headers(operation, method)
        _drop_invalid_defaults(operation)
        _add_examples(operation)
        if PUBLIC_TAG in operation.get("tags", ()):
            operation["security"] = []
    _mark_deprecated(document, app)
    return document


def _name_pages(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with `PageOf_JobView_` renamed to `JobPage`, in schemas and in references to them."""
    renamed: dict[str, Any] = json.loads(_PAGE_NAME.sub(r"\1Page", json.dumps(document)))
    return renamed


def _to_enum(choice: dict[str, Any]) -> dict[str, Any]:
    """Return one choice of a union with `enum` for `const`, which openapi-python-client cannot read in responses."""
    others = {key: value for key, value in choice.items() if key != "const"}
    return {**others, "enum": [choice["const"]]} if "const" in choice else choice


def iterate_operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each operation with its method and path."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def _add_problem_responses(operation: dict[str, Any], method: str, path: str) -> None:
    """Add the problems that follow from the operation's parameters, body and method."""
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
    """Add response headers. A deleted resource has no ETag; a cancelled job still exists and has one."""
    tagged = _ETAG_SCHEMAS if method != "delete" else _ETAG_SCHEMAS[:1]
    for status, response in operation["responses"].items():
        headers = response.setdefault("headers", {})
        headers["X-Request-Id"] = _REQUEST_ID_HEADER
        if status == "201":
            headers["Location"] = _LOCATION_HEADER
        if any(_schema_name(content) in tagged for content in response.get("content", {}).values()):
            headers["ETag"] = _ETAG_HEADER


def _drop_invalid_defaults(operation: dict[str, Any]) -> None:
    """Remove each default that its own pattern rejects: it stands for an absent parameter and must not be sent."""
    for parameter in operation.get("parameters", ()):
        schema = parameter["schema"]
        if isinstance(schema.get("default"), str) and not re.search(schema.get("pattern", ""), schema["default"]):
            del schema["default"]


def _mark_deprecated(document: dict[str, Any], app: FastAPI) -> None:
    for route in app.routes:
        if not isinstance(route, APIRoute) or find_deprecation(route) is None:
            continue
        for method in route.methods or ():
            operation = document["paths"][route.path][method.lower()]
            operation["deprecated"] = True
            for response in operation["responses"].values():
                response["headers"] |= DEPRECATION_HEADERS


def _add_examples(operation: dict[str, Any]) -> None:
    """Add examples by schema name, so that a noun looks the same in every request and response."""
    bodies = [operation.get("requestBody", {})]
    bodies += [response for status, response in operation["responses"].items() if status.startswith("2")]
    for body in bodies:
        for content in body.get("content", {}).values():
            name = _schema_name(content)
            if name in load_examples():
                content["example"] = load_examples()[name]


def _schema_name(content: dict[str, Any]) -> str:
    """Return the name of the schema that a body refers to; empty if it has an inline schema."""
    name: str = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return name


@cache
def load_examples() -> dict[str, Any]:
    """Return example documents by schema name."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))
    pages = {
        f"{name.removesuffix('View')}Page": {"items": [document], "next": None} for name, document in found.items()
    }
    return {**pages, **found}
