"""The OpenAPI document. EBBTIDE_GOLDEN=write rewrites the committed copy, and the types of the Python client."""

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
from tools.client_views import TARGET, build_modules, write_modules

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return ApiService().app.openapi()


def test_the_committed_copy_is_current(document: dict[str, Any]) -> None:
    written = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        COPY.write_text(written, encoding="utf-8")
    assert written == COPY.read_text(encoding="utf-8"), "rewrite it with EBBTIDE_GOLDEN=write, and read the diff"


def test_the_types_of_the_client_are_current(document: dict[str, Any]) -> None:
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        write_modules(document)
    written = {path.name: path.read_text(encoding="utf-8") for path in TARGET.glob("*.py")}
    assert written == build_modules(document), "rewrite them with EBBTIDE_GOLDEN=write, and read the diff"


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
    validator = Draft202012Validator(_whole(document, "Problem"))
    for method, path, operation in iterate_operations(document):
        for status, response in operation["responses"].items():
            if not status.startswith(("2", "3")):
                [(media, content)] = response["content"].items()
                assert media == "application/problem+json", (method, path)
                assert content["schema"] == {"$ref": "#/components/schemas/Problem"}, (method, path)
                assert content["example"]["status"] == int(status)
                validator.validate(content["example"])


def test_every_schema_has_one_name_that_is_its_title(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert [name for name in schemas if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name)] == []
    assert [name for name, schema in schemas.items() if schema["title"] != name] == []
    assert {"JobPage", "EventPage", "TokenPage"} <= schemas.keys()


def test_every_default_is_accepted_by_its_schema(document: dict[str, Any]) -> None:
    checked = 0
    for method, path, operation in iterate_operations(document):
        for parameter in operation.get("parameters", ()):
            schema = parameter["schema"]
            if "default" in schema:
                assert Draft202012Validator(schema).is_valid(schema["default"]), (method, path, parameter["name"])
                checked += 1
    for name, schema in document["components"]["schemas"].items():
        for field, property_ in schema.get("properties", {}).items():
            if "default" in property_:
                whole = {**property_, "components": document["components"]}
                assert Draft202012Validator(whole).is_valid(property_["default"]), (name, field)
                checked += 1
    assert checked > 100


def test_the_document_names_its_server(document: dict[str, Any]) -> None:
    assert [server["url"] for server in document["servers"]] == ["/"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/pools", {"name": "more", "kind": "training"}),
        ("/v1/nodes", {"name": "t9", "pool": "training", "gpu": "cpu", "gpus": 2}),
        ("/v1/queues", {"name": "vision"}),
    ],
)
def test_a_repeated_creation_answers_200_as_documented(
    document: dict[str, Any], fleet: ApiService, path: str, body: dict[str, Any]
) -> None:
    first, again = fleet.post(path, body), fleet.post(path, body)
    assert (first.status_code, again.status_code) == (201, 200)
    responses = document["paths"][path]["post"]["responses"]
    assert responses["200"]["content"]["application/json"] == responses["201"]["content"]["application/json"]
    assert again.headers["etag"]
    assert "ETag" in responses["200"]["headers"]


def test_every_body_has_an_example(document: dict[str, Any]) -> None:
    for method, path, operation in iterate_operations(document):
        for content in _json_bodies(operation):
            assert "example" in content, (method, path)


def test_every_example_matches_its_schema(document: dict[str, Any]) -> None:
    names = load_examples().keys() & document["components"]["schemas"].keys()
    assert names >= {name for name in load_examples() if not name.endswith("Page")}
    for name in names:
        Draft202012Validator(_whole(document, name)).validate(load_examples()[name])


def test_problems_match_their_schema(document: dict[str, Any], service: ApiService, problem: Problem) -> None:
    answers = [
        problem(service.http.get("/v1/jobs/nobody"), 404),
        problem(service.http.put("/v1/jobs"), 405),
        problem(service.post("/v1/jobs", {"name": 5, "gpus": {}}), 422),
        problem(service.http.get("/readyz"), 503),
    ]
    for answer in answers:
        Draft202012Validator(_whole(document, "Problem")).validate(answer)


def _whole(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema `name` with all schemas that it may refer to."""
    return {"$ref": f"#/components/schemas/{name}", "components": document["components"]}


def _json_bodies(operation: dict[str, Any]) -> list[dict[str, Any]]:
    bodies = [operation.get("requestBody", {})]
    bodies += [response for status, response in operation["responses"].items() if status.startswith("2")]
    return [content for body in bodies for media, content in body.get("content", {}).items() if "json" in media]
