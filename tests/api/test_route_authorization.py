"""Authorization of every route: each rejects callers without permission and malformed requests before anything else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter

from api.identity.authorization import Caller, RouteRule, list_route_rules
from api.identity.principals import Role
from scheduler.domain.machine import JOIN_TOKEN_PREFIX, MACHINE_CREDENTIAL_PREFIX
from scheduler.domain.worker_token import issue_agent_token, issue_worker_token
from scheduler.settings import Settings
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.authenticated_service import MADE as _ENTRY
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import SECRET, ApiService, Problem

ROUTE_RULES = list_route_rules(ApiService().app.routes)
ROUTES = sorted(route for route in ROUTE_RULES if not route.startswith("HEAD "))  # its responses have no body
PROTECTED_ROUTES = [route for route in ROUTES if ROUTE_RULES[route].caller is not Caller.PUBLIC]
USER_ROUTES = [route for route in ROUTES if ROUTE_RULES[route].caller is Caller.USERS]
TOKENS = {
    Caller.WORKERS: "ebt_x",
    Caller.AGENTS: "eba_x",
    Caller.MACHINES: "ebm_x",
    Caller.JOINING_MACHINES: "ebj_x",
}
"""Tokens of the right form, by kind of caller other than users."""
WRITE_ROUTES = [route for route in ROUTES if not route.startswith("GET ")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlStore]:
    url = f"sqlite:///{tmp_path_factory.mktemp('refusals') / 'state.sqlite'}"
    migrate(url)
    made = SqlStore(url)
    yield made
    made.close()


@pytest.fixture(scope="module")
def guarded(store: SqlStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuthenticatedService]:
    limits = {"simulation_body_bytes": 1 << 20, "archive_bytes_max": 1 << 20}
    made = AuthenticatedService(store, archive_dir=tmp_path_factory.mktemp("archives"), **limits).with_fleet()
    yield made
    made.http.close()


@pytest.fixture(scope="module")
def unguarded(store: SqlStore) -> Iterator[ApiService]:
    made = ApiService(Settings(auth="off", allowed_hosts="x, GPU-box"), store)
    with made.http:
        yield made


def call(service: ApiService, route: str, names: str = "any", **request: Any) -> httpx.Response:
    method, path = route.split(" ", 1)
    if names == "any":
        path = path.replace("{digest}", f"sha256:{'0' * 64}")
    return service.http.request(method, re.sub(r"{\w+}", names, path), **request)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_only_probes_the_console_its_sign_in_and_the_reference_are_public() -> None:
    public = {route for route in ROUTES if ROUTE_RULES[route].caller is Caller.PUBLIC}
    assert public == {
        "GET /",
        "GET /console/{version}/{path:path}",
        "GET /docs",
        "GET /docs/runbook",
        "GET /sign-in",
        "POST /sign-in",
        "GET /sign-in/oidc",
        "GET /sign-in/oidc/callback",
        "POST /sign-out",
        "GET /healthz",
        "GET /readyz",
        "GET /openapi.json",
    }


def test_an_endpoint_without_a_rule_is_rejected() -> None:
    router = APIRouter()

    @router.get("/v1/secrets")
    def get_secrets() -> None:
        raise NotImplementedError

    with pytest.raises(ValueError, match=r"GET /v1/secrets has no rule"):
        list_route_rules(router.routes)


@pytest.mark.parametrize("route", PROTECTED_ROUTES)
def test_a_token_is_required(guarded: AuthenticatedService, problem: Problem, route: str) -> None:
    answer = call(guarded, route)
    assert problem(answer, 401)["type"].endswith(":unauthenticated")
    assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("route", USER_ROUTES)
def test_a_malformed_token_is_refused(guarded: AuthenticatedService, problem: Problem, route: str) -> None:
    for given in (
        b"Bearer ebk_invented",
        b"Bearer a.b.c",
        b"Bearer \xff\xfe",
        b"Basic cm9vdA==",
        b"Bearer ' OR 1=1 --",
    ):
        problem(call(guarded, route, headers={"Authorization": given}), 401)


@pytest.mark.parametrize("route", USER_ROUTES)
def test_a_revoked_or_expired_token_is_refused(guarded: AuthenticatedService, problem: Problem, route: str) -> None:
    for grant in ("admin", "viewer"):
        token, secret = guarded.create_token("gone", grant)
        guarded.store.tokens.revoke(token.id, guarded.clock.now_s(), _ENTRY)
        assert "was revoked" in problem(call(guarded, route, headers=bearer(secret)), 401)["detail"]
        expired = guarded.token("late", grant, life_s=0.0)
        assert "has expired" in problem(call(guarded, route, headers=bearer(expired)), 401)["detail"]


@pytest.mark.parametrize("route", USER_ROUTES)
def test_worker_and_agent_tokens_are_refused_on_user_routes(
    guarded: AuthenticatedService, problem: Problem, route: str
) -> None:
    tokens = {Caller.WORKERS: issue_worker_token(SECRET, "any", 1), Caller.AGENTS: issue_agent_token(SECRET, "any")}
    for caller, token in tokens.items():
        if caller not in ROUTE_RULES[route].or_callers:
            detail = problem(call(guarded, route, headers=bearer(token)), 403)["detail"]
            assert "can only report on its own job" in detail
    for caller, prefix in ((Caller.MACHINES, MACHINE_CREDENTIAL_PREFIX), (Caller.JOINING_MACHINES, JOIN_TOKEN_PREFIX)):
        is_known_kind = caller in ROUTE_RULES[route].or_callers
        problem(call(guarded, route, headers=bearer(prefix + "x")), 401 if is_known_kind else 403)


@pytest.mark.parametrize("route", [route for route in ROUTES if ROUTE_RULES[route].caller in TOKENS])
def test_an_admin_token_is_refused_on_worker_routes(
    guarded: AuthenticatedService, problem: Problem, route: str
) -> None:
    problem(call(guarded, route, headers=bearer(guarded.root), json={}), 403)


def needs_more_than_viewer(rule: RouteRule) -> bool:
    return rule.role > Role.VIEWER or rule.on_all_queues


@pytest.mark.parametrize("route", [route for route in USER_ROUTES if needs_more_than_viewer(ROUTE_RULES[route])])
def test_a_viewer_of_one_queue_learns_the_missing_role(
    guarded: AuthenticatedService, problem: Problem, route: str
) -> None:
    viewer = guarded.token("vera", "viewer:research")
    detail = problem(call(guarded, route, headers=bearer(viewer)), 403)["detail"]
    assert detail.startswith(f"this needs the role {ROUTE_RULES[route].role.label}")
    assert detail.endswith("you are vera with viewer:research")


@pytest.mark.parametrize("route", WRITE_ROUTES)
@pytest.mark.parametrize("has_content_length", [True, False], ids=["with its length", "in chunks"])
def test_a_body_of_ten_megabytes_is_refused(
    guarded: AuthenticatedService, problem: Problem, route: str, has_content_length: bool
) -> None:
    rule = ROUTE_RULES[route]
    token = TOKENS.get(rule.caller, guarded.root)
    body = b'{"a": "' + b"x" * 10_000_000 + b'"}'
    content = body if has_content_length else iter([body[:5_000_000], body[5_000_000:]])
    answer = call(guarded, route, headers={**bearer(token), "Content-Type": "application/json"}, content=content)
    if not has_content_length and answer.status_code in (202, 404, 409):
        return  # the route takes no body and did not read it
    assert problem(answer, 413)["type"].endswith(":body-too-large")


@pytest.mark.parametrize("route", [route for route in ROUTES if "{" in route])
def test_hostile_path_parameters_cause_no_internal_error(guarded: AuthenticatedService, route: str) -> None:
    for names in ("%ff%fe", "no%00body", "'; DROP TABLE jobs; --", "..%2f..%2fetc%2fpasswd", "a" * 3000, "1 OR 1=1"):
        answer = call(guarded, route, names, headers=bearer(guarded.root))
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("route", WRITE_ROUTES)
def test_a_body_that_is_not_utf8_is_refused(guarded: AuthenticatedService, route: str) -> None:
    token = TOKENS.get(ROUTE_RULES[route].caller, guarded.root)
    headers = {**bearer(token), "Content-Type": "application/json"}
    answer = call(guarded, route, headers=headers, content=b'{"name": "\xff\xfe"}')
    takes_no_body = answer.status_code == 202 or route in ("POST /sign-out", "POST /v1/login-codes")
    assert takes_no_body or 400 <= answer.status_code < 500, answer.text


@pytest.mark.parametrize("route", [route for route in USER_ROUTES if route.startswith("GET ") and "{" not in route])
def test_hostile_queries_cause_no_internal_error(guarded: AuthenticatedService, route: str) -> None:
    for query in ("cursor=%ff", "state=%00", "limit='", "cursor=1%20OR%201=1", "after=-1"):
        answer = guarded.request("GET", f"{route.partition(' ')[2]}?{query}", guarded.root)
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text


@pytest.mark.parametrize("route", ROUTES)
def test_while_auth_is_off_a_foreign_host_is_refused_on_loopback(
    unguarded: ApiService, problem: Problem, route: str
) -> None:
    for host in ("evil.example", "evil.example:8787", "127.0.0.1.evil.example", "", "[::2]:8787"):
        answer = call(unguarded, route, headers={"Host": host})
        assert problem(answer, 421)["type"].endswith(":misdirected")


def test_while_auth_is_off_local_host_names_are_accepted(unguarded: ApiService) -> None:
    for host in ("127.0.0.1:8787", "localhost", "[::1]:8787", "gpu-box:1", "LOCALHOST:9"):
        assert unguarded.http.get("/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_while_auth_is_off_foreign_origins_are_refused(unguarded: ApiService, problem: Problem, route: str) -> None:
    waiting = unguarded.store.count_pending_commands()
    for origin in ("http://evil.example", "null", "http://127.0.0.1:3000", "https://gpu-box.evil.example"):
        answer = call(unguarded, route, headers={"Host": "127.0.0.1:8787", "Origin": origin})
        assert problem(answer, 421)["type"].endswith(":misdirected")
    assert unguarded.store.count_pending_commands() == waiting


def test_while_auth_is_off_own_origins_are_accepted(unguarded: ApiService) -> None:
    for host, origin in (
        ("127.0.0.1:9", "http://127.0.0.1:9"),
        ("[::1]:9", "http://[::1]:9"),
        ("x", "https://GPU-box"),
    ):
        headers = {"Host": host, "Origin": origin}
        assert unguarded.http.post("/v1/lending:pause", headers=headers).status_code == 202


def test_with_authentication_any_origin_is_accepted(guarded: AuthenticatedService) -> None:
    headers = {**bearer(guarded.root), "Origin": "https://ours.example"}
    assert guarded.http.post("/v1/lending:pause", headers=headers).status_code == 202


def test_public_routes_need_no_token(guarded: AuthenticatedService) -> None:
    for path in ("/healthz", "/openapi.json", "/"):
        assert guarded.http.get(path).status_code == 200


def test_metrics_need_a_viewer_of_all_queues_or_the_open_setting(
    guarded: AuthenticatedService, problem: Problem
) -> None:
    viewer, of_one = guarded.token("v", "viewer"), guarded.token("w", "viewer:research")
    assert guarded.request("GET", "/metrics", viewer).status_code == 200
    problem(guarded.request("GET", "/metrics", of_one), 403)
    with (open_to_all := AuthenticatedService(metrics_open=True)).http:
        assert open_to_all.http.get("/metrics").status_code == 200


def test_an_unknown_path_is_a_404_for_every_caller(guarded: AuthenticatedService, problem: Problem) -> None:
    problem(guarded.http.get("/v1/secrets"), 404)
    problem(guarded.http.put("/v1/jobs"), 405)
