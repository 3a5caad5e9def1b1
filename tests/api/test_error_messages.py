"""Problem details name the field, the value and the next step, and suggest similar names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.api.conftest import JOB

if TYPE_CHECKING:
    from tests.api.conftest import ApiService

WORDS: list[tuple[str, str, dict[str, object] | None, str]] = [
    ("POST", "/v1/jobs", {**JOB, "gpu": "h100-80gb"}, "did you mean 'h100-80g'?"),
    ("POST", "/v1/jobs", {**JOB, "model": "lama-2-7b", "globalBatch": 8}, "did you mean 'llama-2-7b'?"),
    ("POST", "/v1/jobs", {**JOB, "priorty": 3}, "priorty: there is no such field; allowed: one of"),
    ("POST", "/v1/jobs", {**JOB, "priorty": 3}, "did you mean 'priority'?"),
    ("POST", "/v1/jobs", {"name": "a", "gpus": {"min": 4, "max": 2}}, "gpus.max: got 2; allowed: at least gpus.min"),
    ("POST", "/v1/jobs", {**JOB, "model": "gpt2"}, "globalBatch: got nothing; allowed: at least 1: a job with a model"),
    ("POST", "/v1/jobs", {**JOB, "deadline": "soon"}, 'deadline: got "soon"'),
    ("PATCH", "/v1/jobs/{job}", {"gpus": {"max": 0}}, "gpus.max: got 0; allowed: greater than or equal to 1"),
    ("PATCH", "/v1/jobs/{job}", {}, "at least one of gpus, queue, priority and labels"),
    ("GET", "/v1/jobs?state=runing", None, 'state: got "runing"; allowed: one or more of submitted, planning,'),
    ("GET", "/v1/jobs?state=runing", None, "did you mean 'running'?"),
    ("GET", "/v1/loans?state=recaled", None, "did you mean 'recalled'?"),
    ("GET", "/v1/jobs?limit=100000", None, "limit: got \"100000\"; allowed: less than or equal to 1000"),
    ("GET", "/v1/jobs?cursor=x", None, "the value of `next` in an earlier list of jobs"),
    ("POST", "/v1/pools", {"name": "more", "kind": "inferense"}, "or 'inference'; did you mean 'inference'?"),
    ("POST", "/v1/nodes", {"name": "n", "pool": "trainig", "gpu": "cpu", "gpus": 1}, "did you mean 'training'?"),
    ("GET", "/v1/pools/inferense", None, "pool inferense does not exist; did you mean 'inference'?"),
    ("POST", "/v1/nodes/t00:drain", None, "node t00 does not exist; did you mean 't0'?"),
    ("PATCH", "/v1/queues/resarch", {"weight": 2.0}, "declared queue resarch does not exist; did you mean 'research'?"),
    ("GET", "/v1/queues/resarch", None, "queue resarch does not exist; did you mean 'research'?"),
    ("DELETE", "/v1/pools/training", None, "pool training still has 1 node: t0"),
    ("POST", "/v1/jobs/{job}:resume", None, "is submitted and not suspended"),
]  # fmt: skip


def test_details_name_field_value_and_suggestion(fleet: ApiService) -> None:
    fleet.made("/v1/queues", {"name": "research"})
    job_id = fleet.submit()
    for method, path, document, words in WORDS:
        answer = fleet.http.request(method, path.format(job=job_id), json=document)
        assert answer.status_code in (404, 409, 422), (method, path, answer.text)
        assert words in answer.json()["detail"], (method, path)


@pytest.mark.parametrize("name", ["nothing-like-it", "x"])
def test_no_suggestion_without_a_similar_name(fleet: ApiService, name: str) -> None:
    assert fleet.http.get(f"/v1/pools/{name}").json()["detail"] == f"pool {name} does not exist"
