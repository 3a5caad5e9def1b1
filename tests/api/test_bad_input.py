"""Invalid input over HTTP: a problem with field, value and what is accepted, and no command in the inbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.api.conftest import JOB

if TYPE_CHECKING:
    from tests.api.conftest import ApiService, Problem

NODE: dict[str, Any] = {"name": "n0", "pool": "training", "gpu": "cpu", "gpus": 2}
MODEL: dict[str, Any] = {"model": "gpt2", "globalBatch": 8}

BAD_JOBS: list[tuple[str, dict[str, Any], str]] = [
    ("gpus.max", {"gpus": {"min": 4, "max": 2}}, "at least gpus.min, which is 4"),
    ("gpus.min", {"gpus": {"min": 0, "max": 2}}, "greater than or equal to 1"),
    ("gpus.min", {"gpus": {"min": -1, "max": 2}}, "greater than or equal to 1"),
    ("gpus.max", {"gpus": {"min": 1, "max": 10**400}}, "less than or equal to"),
    ("gpus.min", {"gpus": {"min": True, "max": 2}}, "a valid integer"),
    ("gpus.min", {"gpus": {"min": 1.5, "max": 2}}, "a valid integer"),
    ("gpus.least", {"gpus": {"min": 1, "max": 2, "least": 1}}, "min, max"),
    ("gpus", {"gpus": 4}, "an object"),
    ("name", {"name": ""}, "a-z"),
    ("name", {"name": "Up"}, "a-z"),
    ("name", {"name": "../../etc"}, "a-z"),
    ("name", {"name": None}, "a valid string"),
    ("model", {"model": "gpt-9", "globalBatch": 8}, "gpt2"),
    ("gpu", {"gpu": "abacus"}, "cpu"),
    ("globalBatch", {"model": "gpt2"}, "at least 1"),
    ("profile", {**MODEL, "profile": {}}, "not both"),
    ("profile", {"profile": {"layers": 3}, "globalBatch": 8}, ""),
    ("steps", {"steps": 0}, "greater than or equal to 1"),
    ("steps", {"steps": "many"}, "a valid integer"),
    ("durationEstimate", {"durationEstimate": -5}, "a finite duration of at least 0"),
    ("maxRunTime", {"maxRunTime": "-5m"}, "a finite duration of at least 0"),
    ("maxRunTime", {"maxRunTime": "5 parsecs"}, "90s, 5m, 1h30m"),
    ("deadline", {"deadline": 0}, "above 0 seconds"),
    ("retries", {"retries": -1}, "greater than or equal to 0"),
    ("priority", {"priority": 10**9}, "less than or equal to 1000"),
    ("command", {"command": "python train.py"}, "a valid list"),
    ("command.1", {"command": ["python", "a\0b"]}, "NUL"),
    ("env.RANK.[key]", {"env": {"RANK": "3"}}, "EBBTIDE_*"),
    ("env.A=B.[key]", {"env": {"A=B": "3"}}, "letters, digits and _"),
    ("checkpoint.interval", {"checkpoint": {"interval": 0}}, "above 0 seconds"),
    ("checkpoint.keep", {"checkpoint": {"keep": 0}}, "greater than or equal to 1"),
    ("globalbatch", {"globalbatch": 8}, "globalBatch"),
]


@pytest.mark.parametrize(
    ("field", "change", "allowed"), BAD_JOBS, ids=[f"{f}-{i}" for i, (f, _, _) in enumerate(BAD_JOBS)]
)
def test_a_malformed_job_is_refused_with_field_value_and_accepted_values(
    service: ApiService, field: str, change: dict[str, Any], allowed: str
) -> None:
    refusal = service.refused("POST", "/v1/jobs", JOB | change)
    error = refusal["errors"][0]
    assert error["field"] == field
    assert allowed in error["allowed"]
    assert field in refusal["detail"]
    service.refused("POST", "/v1/jobs:dry-run", JOB | change)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/jobs", '{"name": "a", "gpus": {"min": 1, "max": 2}, "durationEstimate": NUMBER}', "durationEstimate"),
        ("/v1/jobs", '{"name": "a", "gpus": {"min": NUMBER, "max": 2}}', "gpus.min"),
        (
            "/v1/jobs",
            '{"name": "a", "gpus": {"min": 1, "max": 2}, "globalBatch": 1, "profile": {"a": NUMBER}}',
            "profile",
        ),
        ("/v1/pools/inference/demand", '{"gpus": NUMBER}', "gpus"),
        ("/v1/pools/inference/demand", '{"gpus": 1, "at": NUMBER}', "at"),
        ("/v1/pools", '{"name": "p", "kind": "inference", "lending": {"headroom": NUMBER}}', "lending.headroom"),
        ("/v1/nodes", '{"name": "n", "pool": "training", "gpu": "cpu", "gpus": 1, "memory": NUMBER}', "memory"),
    ],
)
def test_nan_and_infinity_are_refused_everywhere(
    fleet: ApiService, problem: Problem, number: str, path: str, body: str, field: str
) -> None:
    waiting = fleet.store.count_pending_commands()
    answer = send(fleet, path, body.replace("NUMBER", number).encode())
    assert field in [error["field"] for error in problem(answer, 422)["errors"]]
    assert fleet.store.count_pending_commands() == waiting


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"name": 1' + b"0" * 5000 + b"}",
        b'{"a":"\\ud800"}',
    ],
    ids=["empty", "cut-off", "list", "text", "null", "not-utf8", "deep", "long-number", "half-a-character"],
)
def test_a_body_that_is_not_a_job_is_a_422(service: ApiService, problem: Problem, body: bytes) -> None:
    assert problem(send(service, "/v1/jobs", body), 422)["errors"]
    assert service.store.count_pending_commands() == 0


@pytest.mark.parametrize(
    ("field", "pool"),
    [
        ("kind", {"name": "p", "kind": "lunch"}),
        ("kind", {"name": "p"}),
        ("name", {"name": "P!", "kind": "training"}),
        ("lending", {"name": "p", "kind": "training", "lending": {}}),
        ("lending.quantile", {"name": "p", "kind": "inference", "lending": {"quantile": 1}}),
        ("lending.headroom", {"name": "p", "kind": "inference", "lending": {"headroom": -0.1}}),
        ("lending.return_deadline_s", {"name": "p", "kind": "inference", "lending": {"return_deadline_s": -1}}),
        ("lending.loan_s_min", {"name": "p", "kind": "inference", "lending": {"loan_s_min": "8d"}}),
        ("lending.kept_nodes_min", {"name": "p", "kind": "inference", "lending": {"kept_nodes_min": -1}}),
        ("lending.deadline", {"name": "p", "kind": "inference", "lending": {"deadline": 1}}),
        (
            "lending.blackouts.0.end_s",
            {"name": "p", "kind": "inference", "lending": {"blackouts": [{"start_s": 0, "end_s": "25h"}]}},
        ),
    ],
)
def test_a_malformed_pool_is_refused(service: ApiService, field: str, pool: dict[str, Any]) -> None:
    assert service.refused("POST", "/v1/pools", pool)["errors"][0]["field"] == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("gpus", {"gpus": 0}),
        ("gpus", {"gpus": -8}),
        ("gpu", {"gpu": "abacus"}),
        ("pool", {"pool": "nowhere"}),
        ("memory", {"memory": "80 zettabytes"}),
        ("memory", {"memory": 0}),
        ("name", {"name": "a/b"}),
        ("name", {"name": "n:cordon"}),
        ("rack", {"rack": 3}),
    ],
)
def test_a_malformed_node_is_refused(fleet: ApiService, field: str, change: dict[str, Any]) -> None:
    assert fleet.refused("POST", "/v1/nodes", NODE | change)["errors"][0]["field"] == field


@pytest.mark.parametrize("gpus", [-1, -0.5, "1", None, True, 1e12])
def test_malformed_demand_is_refused(fleet: ApiService, gpus: object) -> None:
    refusal = fleet.refused("POST", "/v1/pools/inference/demand", {"gpus": gpus})
    assert refusal["errors"][0]["field"] == "gpus"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("gpus", {}),
        ("gpus.max", {"gpus": {"max": 0}}),
        ("gpus.min", {"gpus": {"min": 3}}),
        ("gpus.max", {"gpus": {"min": 4, "max": 3}}),
        ("priority", {"gpus": {"max": 4}, "priority": 3000}),
    ],
)
def test_a_malformed_change_of_a_job_is_refused(service: ApiService, field: str, change: dict[str, Any]) -> None:
    job_id = service.submit()
    assert service.refused("PATCH", f"/v1/jobs/{job_id}", change)["errors"][0]["field"] == field


@pytest.mark.parametrize(
    ("field", "query"),
    [
        ("limit", "limit=0"),
        ("limit", "limit=100000"),
        ("limit", "limit=many"),
        ("cursor", "cursor=@@@"),
        ("cursor", "cursor=bGl2ZQ"),
        ("state", "state=lunch"),
    ],
)
def test_a_malformed_query_is_refused(service: ApiService, field: str, query: str) -> None:
    assert service.refused("GET", f"/v1/jobs?{query}")["errors"][0]["field"] == field


@pytest.mark.parametrize(
    "path", ["/v1/events?cursor=x", "/v1/decisions?cursor=-1", "/v1/events?after=-1", "/v1/loans?state=x"]
)
def test_a_malformed_query_of_events_or_decisions_is_refused(service: ApiService, path: str) -> None:
    service.refused("GET", path)


def test_the_value_of_a_refused_field_is_shortened(service: ApiService) -> None:
    [error] = service.refused("POST", "/v1/jobs", JOB | {"gpu": "x" * 1000})["errors"]
    assert error["value"] == "x" * 200
    [error] = service.refused("POST", "/v1/jobs", JOB | {"steps": -7})["errors"]
    assert error["value"] == -7
    assert error["message"] == "steps: got -7; allowed: greater than or equal to 1"


def send(service: ApiService, path: str, body: bytes) -> httpx.Response:
    return service.http.post(path, content=body, headers={"Content-Type": "application/json"})
