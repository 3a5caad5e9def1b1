"""Authentication and authorization: tokens, roles by queue, the audit log, rate limits, request ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from api.identity.authentication import TOKEN_CACHE_S
from api.identity.authorization import HIDDEN_JOB
from api.identity.principals import Grant, Role
from scheduler.domain.worker_token import issue_agent_token, issue_worker_token
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import JOB, SECRET, Problem


@pytest.fixture
def guarded() -> Iterator[AuthenticatedService]:
    made = AuthenticatedService().with_fleet()
    yield made
    made.http.close()


def items(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


def test_a_secret_is_shown_once_and_stored_as_a_digest(guarded: AuthenticatedService) -> None:
    answer = guarded.request("POST", "/v1/tokens", guarded.root, {"name": "ci", "grants": ["submitter:research"]})
    made = answer.json()
    assert answer.status_code == 201
    assert re.fullmatch(r"ebk_[A-Za-z0-9_-]{43}", made["secret"])
    assert made["secret"].startswith(made["prefix"])
    assert made["created_by"] == "root"
    responses = (
        guarded.request("GET", "/v1/tokens", guarded.root).text + guarded.request("GET", "/v1/audit", guarded.root).text
    )
    assert made["secret"] not in responses
    kept = guarded.store.tokens.find_by_id(made["id"])
    assert kept is not None
    assert made["secret"] not in repr(kept)
    assert guarded.request("GET", "/v1/whoami", made["secret"]).json() == {
        "name": "ci", "owner_id": f"token:{made['id']}", "grants": ["submitter:research"], "token_id": made["id"],
    }  # fmt: skip


def test_a_retried_creation_returns_the_same_token_without_its_secret(
    guarded: AuthenticatedService, problem: Problem
) -> None:
    headers = {"Authorization": f"Bearer {guarded.root}", "Idempotency-Key": "k"}
    document = {"name": "ci", "grants": ["viewer"]}
    first, repeated = (guarded.http.post("/v1/tokens", json=document, headers=headers) for _ in range(2))
    assert (first.status_code, repeated.status_code) == (201, 200)
    assert first.json()["id"] == repeated.json()["id"]
    assert ("secret" in first.json(), "secret" in repeated.json()) == (True, False)
    assert len(items(guarded.request("GET", f"/v1/audit?subject={first.json()['id']}", guarded.root))) == 1
    problem(guarded.http.post("/v1/tokens", json={**document, "name": "other"}, headers=headers), 422)


def test_a_revoked_token_is_refused_within_seconds(guarded: AuthenticatedService, problem: Problem) -> None:
    token, secret = guarded.create_token("ci", "viewer")
    assert guarded.request("GET", "/v1/jobs", secret).status_code == 200
    assert guarded.request("DELETE", f"/v1/tokens/{token.id}", guarded.root).json()["revoked_at_s"] is not None
    guarded.clock.move_to(guarded.clock.now_s() + TOKEN_CACHE_S)
    problem(guarded.request("GET", "/v1/jobs", secret), 401)
    problem(guarded.request("DELETE", "/v1/tokens/tok-none", guarded.root), 404)


def test_an_expired_token_is_refused_at_once(guarded: AuthenticatedService, problem: Problem) -> None:
    secret = guarded.token("ci", "viewer", life_s=2.0)
    assert guarded.request("GET", "/v1/jobs", secret).status_code == 200
    guarded.clock.move_to(guarded.clock.now_s() + 2.0)
    problem(guarded.request("GET", "/v1/jobs", secret), 401)


def test_last_use_is_recorded_once_a_minute(guarded: AuthenticatedService) -> None:
    token, secret = guarded.create_token("ci", "viewer")

    def used_after(seconds: float) -> float | None:
        guarded.clock.move_to(guarded.clock.now_s() + seconds)
        guarded.request("GET", "/v1/jobs", secret)
        found = guarded.request("GET", f"/v1/tokens/{token.id}", guarded.root).json()["last_used_at_s"]
        return None if found is None else float(found) - token.created_at_s

    assert [used_after(each) for each in (0.0, 10.0, 40.0, 10.0)] == [0.0, 0.0, 0.0, 60.0]


def test_tokens_are_listed_page_by_page(guarded: AuthenticatedService) -> None:
    for number in range(4):
        guarded.token(f"t{number}", "viewer")
    names, cursor = [], ""
    while True:
        page = guarded.request("GET", f"/v1/tokens?limit=2&cursor={cursor}", guarded.root).json()
        names += [token["name"] for token in page["items"]]
        if not (cursor := page["next"] or ""):
            break
    assert sorted(names) == ["root", "t0", "t1", "t2", "t3"]


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"name": "", "grants": ["viewer"]}, "name"),
        ({"name": "a b", "grants": ["viewer"]}, "name"),
        ({"name": "a", "grants": []}, "grants"),
        ({"name": "a", "grants": ["veiwer"]}, "grants.0"),
        ({"name": "a", "grants": ["admin:research"]}, "grants.0"),
        ({"name": "a", "grants": ["viewer:"]}, "grants.0"),
        ({"name": "a", "grants": ["viewer"], "expires_in_s": 0}, "expires_in_s"),
    ],
)
def test_a_malformed_token_document_is_refused(
    guarded: AuthenticatedService, problem: Problem, document: dict[str, Any], field: str
) -> None:
    answer = problem(guarded.request("POST", "/v1/tokens", guarded.root, document), 422)
    assert [error["field"] for error in answer["errors"]] == [field]


def test_a_misspelt_role_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'viewer'"):
        Grant.parse("veiwer:research")
    assert Grant.parse("queue-admin:research") == Grant(Role.QUEUE_ADMIN, "research")


def test_jobs_of_other_queues_are_hidden(guarded: AuthenticatedService, problem: Problem) -> None:
    anna, bert = guarded.token("anna", "submitter:research"), guarded.token("bert", "submitter:vision")
    hers, his = guarded.job(anna, "research"), guarded.job(bert, "vision")
    assert [job["id"] for job in items(guarded.request("GET", "/v1/jobs", anna))] == [hers]
    assert [queue["name"] for queue in items(guarded.request("GET", "/v1/queues", anna))] == ["research"]
    for method, path in (
        ("GET", ""), ("GET", "/plan"), ("GET", "/events"), ("GET", "/history"), ("GET", "/explanation"),
        ("GET", "/progress"), ("DELETE", ""), ("POST", ":suspend"), ("POST", ":resume"),
    ):  # fmt: skip
        problem(guarded.request(method, f"/v1/jobs/{his}{path}", anna), 404)
    problem(guarded.request("PATCH", f"/v1/jobs/{his}", anna, {"gpus": {"min": 1}}), 404)
    problem(guarded.request("GET", "/v1/queues/vision", anna), 404)
    problem(guarded.request("GET", "/v1/snapshots/latest", anna), 403)


def test_submitters_change_their_own_jobs_and_queue_admins_all_of_their_queue(
    guarded: AuthenticatedService, problem: Problem
) -> None:
    anna, carl = guarded.token("anna", "submitter:research"), guarded.token("carl", "submitter:research")
    boss = guarded.token("boss", "queue-admin:research")
    job = guarded.job(anna, "research")
    refused = problem(guarded.request("DELETE", f"/v1/jobs/{job}", carl), 403)["detail"]
    assert refused.startswith("this needs the role queue-admin on queue research; you are carl with submitter:research")
    assert guarded.request("POST", f"/v1/jobs/{job}:suspend", anna).status_code == 202
    assert guarded.request("DELETE", f"/v1/jobs/{job}", boss).status_code == 202
    assert guarded.request("PATCH", "/v1/queues/research", boss, {"user_jobs_max": 2}).status_code == 202
    problem(guarded.request("PATCH", "/v1/queues/vision", boss, {"user_jobs_max": 2}), 404)
    problem(guarded.request("POST", "/v1/lending:pause", boss), 403)


def test_submitting_needs_the_role_on_the_queue(guarded: AuthenticatedService, problem: Problem) -> None:
    anna = guarded.token("anna", "submitter:research", "viewer:vision")
    document = {**JOB, "name": "x", "queue": "vision", "steps": 9}
    for path in ("/v1/jobs", "/v1/jobs:dry-run"):
        detail = problem(guarded.request("POST", path, anna, document), 403)["detail"]
        assert (
            detail
            == "this needs the role submitter on queue vision; you are anna with submitter:research, viewer:vision"
        )


def test_idempotency_keys_are_per_principal(guarded: AuthenticatedService) -> None:
    document = {**JOB, "name": "x", "queue": "research", "steps": 9}
    ids = set()
    anna, carl = guarded.token("anna", "submitter"), guarded.token("carl", "submitter")
    for token in (anna, carl, anna):
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "k"}
        ids.add(guarded.http.post("/v1/jobs", json=document, headers=headers).json()["id"])
    assert len(ids) == 2


def test_hidden_job_ids_are_redacted_everywhere(guarded: AuthenticatedService) -> None:
    anna, bert = guarded.token("anna", "submitter:research"), guarded.token("bert", "submitter:vision")
    his = guarded.job(bert, "vision", "secret")
    guarded.tick()
    guarded.tick()
    hers = guarded.job(anna, "research")
    guarded.tick()
    paths = ("/v1/events", "/v1/decisions", "/v1/nodes", "/v1/nodes/t0", f"/v1/jobs/{hers}/explanation", "/v1/queues")
    responses = {path: guarded.request("GET", path, anna) for path in paths}
    document = {**JOB, "name": "x", "queue": "research", "steps": 9}
    responses["dry run"] = guarded.request("POST", "/v1/jobs:dry-run", anna, document)
    for path, answer in responses.items():
        assert answer.status_code == 200
        assert his not in answer.text, path
        assert "secret" not in answer.text, path
    assert HIDDEN_JOB in responses["/v1/nodes/t0"].json()["jobs"]
    assert hers in responses["/v1/events"].text
    assert his in guarded.request("GET", "/v1/decisions", guarded.root).text


def test_pages_of_visible_items_are_complete(guarded: AuthenticatedService) -> None:
    anna, bert = guarded.token("anna", "submitter:research"), guarded.token("bert", "submitter:vision")
    for at in range(3):
        guarded.job(anna, "research", f"a{at}")
        guarded.job(bert, "vision", f"b{at}")
    guarded.tick()
    whole = items(guarded.request("GET", "/v1/events", anna))
    paged: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = guarded.request("GET", f"/v1/events?limit=1&cursor={cursor}", anna).json()
        paged += page["items"]
        if not (cursor := page["next"] or ""):
            break
    assert paged == whole
    assert whole


def test_changes_are_audited_with_changed_fields(guarded: AuthenticatedService) -> None:
    anna = guarded.token("anna", "submitter:research")
    job = guarded.job(anna, "research")
    headers = {"Authorization": f"Bearer {anna}", "X-Request-Id": "trace-7"}
    guarded.http.patch(f"/v1/jobs/{job}", json={"gpus": {"max": 1}}, headers=headers)
    submitted, scaled = items(guarded.request("GET", f"/v1/audit?subject={job}", guarded.root))
    assert (submitted["actor"], submitted["action"], submitted["before"]) == ("anna", "SubmitJob", None)
    assert submitted["after"]["queue"] == "research"
    assert scaled["action"] == "ScaleJob"
    assert (scaled["before"], scaled["after"]) == ({"gpus": {"min": 1, "max": 2}}, {"gpus": {"min": 1, "max": 1}})
    assert scaled["request_id"] == "trace-7"
    assert scaled["outcome"] == "accepted"
    assert scaled["token_id"].startswith("tok-")


def test_a_forbidden_change_is_audited(guarded: AuthenticatedService) -> None:
    vera = guarded.token("vera", "viewer")
    job = guarded.job(guarded.token("anna", "submitter"), "research")
    guarded.request("GET", "/v1/tokens", vera)
    guarded.request("DELETE", f"/v1/jobs/{job}", vera)
    guarded.request("POST", "/v1/lending:pause", vera)
    found = items(guarded.request("GET", "/v1/audit?actor=vera", guarded.root))
    assert [(each["action"], each["outcome"]) for each in found] == [
        (f"DELETE /v1/jobs/{job}", "forbidden"), ("POST /v1/lending:pause", "forbidden"),
    ]  # fmt: skip


def test_token_creation_and_revocation_are_audited(guarded: AuthenticatedService) -> None:
    made = guarded.request("POST", "/v1/tokens", guarded.root, {"name": "ci", "grants": ["viewer"]}).json()
    for _ in range(2):
        guarded.request("DELETE", f"/v1/tokens/{made['id']}", guarded.root)
    found = items(guarded.request("GET", f"/v1/audit?subject={made['id']}", guarded.root))
    assert [each["action"] for each in found] == ["CreateToken", "RevokeToken"]


def test_the_audit_log_is_filtered_by_time_and_paged(guarded: AuthenticatedService) -> None:
    guarded.clock.move_to(guarded.clock.now_s() + 100.0)
    since_s = guarded.clock.now_s()
    for verb in ("pause", "resume", "pause"):
        guarded.request("POST", f"/v1/lending:{verb}", guarded.root)
    first = guarded.request("GET", f"/v1/audit?since_s={since_s}&limit=2", guarded.root).json()
    rest = guarded.request("GET", f"/v1/audit?since_s={since_s}&cursor={first['next']}", guarded.root).json()
    actions = [each["action"] for each in (*first["items"], *rest["items"])]
    assert actions == ["PauseLending", "ResumeLending", "PauseLending"]
    assert rest["next"] is None


def test_the_audit_log_is_listed_newest_first(guarded: AuthenticatedService, problem: Problem) -> None:
    since_s = guarded.clock.now_s() + 100.0
    guarded.clock.move_to(since_s)
    for verb in ("pause", "resume", "pause"):
        guarded.request("POST", f"/v1/lending:{verb}", guarded.root)
    url = f"/v1/audit?since_s={since_s}&order=newest"
    first = guarded.request("GET", f"{url}&limit=2", guarded.root).json()
    rest = guarded.request("GET", f"{url}&cursor={first['next']}", guarded.root).json()
    numbers = [each["number"] for each in (*first["items"], *rest["items"])]
    assert (numbers, rest["next"]) == (sorted(numbers, reverse=True), None)
    assert len(numbers) == 3
    oldest = guarded.request("GET", f"/v1/audit?since_s={since_s}&cursor={first['next']}", guarded.root)
    assert problem(oldest, 422)["errors"][0]["field"] == "cursor"


def test_the_rate_limit_applies_per_caller(problem: Problem) -> None:
    with (guarded := AuthenticatedService(rate_burst=3, rate_per_s=0.001)).http:
        busy, calm = guarded.token("busy", "viewer"), guarded.token("calm", "viewer")
        for _ in range(3):
            assert guarded.request("GET", "/v1/whoami", busy).status_code == 200
        refused = guarded.request("GET", "/v1/whoami", busy)
        assert problem(refused, 429)["type"].endswith(":rate-limited")
        assert int(refused.headers["Retry-After"]) > 1
        assert guarded.request("GET", "/v1/whoami", calm).status_code == 200


def test_unauthenticated_requests_are_limited_by_address(problem: Problem) -> None:
    with (guarded := AuthenticatedService(rate_burst=3, rate_per_s=0.001)).http:
        assert guarded.request("GET", "/v1/whoami", guarded.root).status_code == 200
        for number in range(3):
            problem(guarded.request("GET", "/v1/whoami", f"ebk_guess{number}"), 401)
        problem(guarded.request("GET", "/v1/whoami", "ebk_guess"), 429)
        problem(guarded.http.get("/v1/jobs"), 429)
        assert guarded.request("GET", "/v1/whoami", guarded.root).status_code == 200


def test_agents_are_limited_individually(problem: Problem) -> None:
    with (guarded := AuthenticatedService(report_rate_burst=2, report_rate_per_s=0.5)).http:
        token, statement = issue_agent_token(SECRET, "train"), {"pod": "p", "address": "10.1.0.2"}
        for _ in range(2):
            problem(guarded.request("POST", "/v1/jobs/train/agents/t0", token, statement), 404)
        refused = guarded.request("POST", "/v1/jobs/train/agents/t0", token, statement)
        assert problem(refused, 429)["type"].endswith(":rate-limited")
        assert 1 <= int(refused.headers["Retry-After"]) <= 3
        problem(guarded.request("POST", "/v1/jobs/train/agents/t1", token, statement), 404)
        problem(guarded.request("POST", "/v1/jobs/train/agents/t0", issue_agent_token(SECRET, "other"), statement), 403)


def test_workers_are_rate_limited(problem: Problem) -> None:
    with (guarded := AuthenticatedService(report_rate_burst=1, report_rate_per_s=0.5)).http:
        token, report = issue_worker_token(SECRET, "train", 1), {"generation": 1, "step": 3}
        problem(guarded.request("POST", "/v1/jobs/train/progress", token, report), 404)
        problem(guarded.request("POST", "/v1/jobs/train/progress", token, report), 429)
        problem(guarded.request("POST", "/v1/jobs/train/progress", issue_worker_token(SECRET, "train", 2), report), 403)


def test_guessing_agent_tokens_is_limited_by_address(problem: Problem) -> None:
    with (guarded := AuthenticatedService(rate_burst=3, rate_per_s=0.001)).http:
        place, token = "/v1/jobs/train/agents/t0", issue_agent_token(SECRET, "train")
        statement = {"pod": "p", "address": "10.1.0.2"}
        problem(guarded.request("POST", place, token, statement), 404)
        problem(guarded.request("POST", place, "eba_guess", {}), 422)
        for number in range(2):
            problem(guarded.request("POST", place, f"eba_guess{number}", statement), 403)
        problem(guarded.request("POST", place, "eba_guess", statement), 429)
        problem(guarded.request("POST", place, token, statement), 404)


def test_every_response_has_a_request_id(guarded: AuthenticatedService) -> None:
    for path in ("/healthz", "/v1/jobs", "/nowhere", "/v1/jobs/%ff"):
        assert guarded.http.get(path, headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
        made = guarded.http.get(path, headers={"X-Request-Id": "not { one"}).headers["X-Request-Id"]
        assert re.fullmatch("[0-9a-f]{16}", made)
