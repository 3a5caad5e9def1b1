"""The OpenAPI document. EBBTIDE_GOLDEN=write rewrites the committed copy."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator

from api.openapi import iterate_operations, load_examples
from tests.api.conftest import ApiService, Problem
from tests.api.response_validation import COPY

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return ApiService().app.openapi()


def test_the_committed_copy_is_current(document: dict[str, Any]) -> None:
    written = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        COPY.write_text(written, encoding="utf-8")
    assert written == COPY.read_text(encoding="utf-8"), "rewrite it with EBBTIDE_GOLDEN=write, and read the diff"


def test_the_service_serves_the_committed_copy(service: ApiService) -> None:
    assert service.get("/openapi.json") == json.loads(COPY.read_text(encoding="utf-8"))


def test_every_operation_has_a_unique_name_a_tag_and_a_description(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in iterate_operations(document)]
    assert len(names) == len(set(names))
    for method, path, operation in iterate_operations(document):
        assert re.fullmatch(r"[a-z]+(_[a-z]+)+", operation["operationId"]), (method, path)
        assert operation["tags"], (method, path)
        assert operation["description"], (method, path)


def test_every_declared_problem_has_the_problem_schema(document: dict[str, Any]) -> None:
    for method, path, operation in iterate_operations(document):
        for status, response in operation["responses"].items():
            if not status.startswith("2"):
                [(media, content)] = response["content"].items()
                assert media == "application/problem+json", (method, path)
                assert content["schema"] == {"$ref": "#/components/schemas/Problem"}, (method, path)


def test_every_body_has_an_example(document: dict[str, Any]) -> None:
    for method, path, operation in iterate_operations(document):
        for content in _json_bodies(operation):
            assert "example" in content, (method, path)


def test_every_example_matches_its_schema(document: dict[str, Any]) -> None:
    names = load_examples().keys() & document["components"]["schemas"].keys()
    assert names >= {name for name in load_examples() if not name.startswith("PageOf")}
    for name in names:
        whole = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        Draft202012Validator(whole).validate(load_examples()[name])


def test_problems_match_their_schema(document: dict[str, Any], service: ApiService, problem: Problem) -> None:
    whole = {"$ref": "#/components/schemas/Problem", "components": document["components"]}
    answers = [
        problem(service.http.get("/v1/jobs/nobody"), 404),
        problem(service.http.put("/v1/jobs"), 405),
        problem(service.post("/v1/jobs", {"name": 5, "gpus": {}}), 422),
        problem(service.http.get("/readyz"), 503),
    ]
    for answer in answers:
        Draft202012Validator(whole).validate(answer)


def _json_bodies(operation: dict[str, Any]) -> list[dict[str, Any]]:
    bodies = [operation.get("requestBody", {})]
    bodies += [response for status, response in operation["responses"].items() if status.startswith("2")]
    return [content for body in bodies for media, content in body.get("content", {}).items() if "json" in media]
