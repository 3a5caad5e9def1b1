"""Validation of JSON responses against the OpenAPI document, applied to every response that an API test gets."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
from starlette.routing import compile_path

COPY = Path(__file__).resolve().parents[2] / "api" / "openapi.json"


def validate_response(method: str, path: str, status: int, document: object) -> None:
    """Raise jsonschema_rs.ValidationError if a response does not match the schema of its operation."""
    operation = next((each for pattern, each in _operations(method.lower()) if pattern.fullmatch(path)), None)
    validator = _validator(*operation, str(status)) if operation else None
    if validator is not None:
        validator.validate(document)


@cache
def _document() -> dict[str, Any]:
    """Return the committed document with all object schemas closed to unknown fields."""
    document: dict[str, Any] = json.loads(COPY.read_text(encoding="utf-8"))
    for schema in document["components"]["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return document


@cache
def _operations(method: str) -> list[tuple[re.Pattern[str], tuple[str, str]]]:
    paths = _document()["paths"]
    return [(compile_path(path)[0], (path, method)) for path in paths if method in paths[path]]


@cache
def _validator(path: str, method: str, status: str) -> Any:
    answer = _document()["paths"][path][method]["responses"].get(status, {})
    schema = answer.get("content", {}).get("application/json", {}).get("schema")
    return schema and jsonschema_rs.validator_for({**schema, "components": _document()["components"]})
