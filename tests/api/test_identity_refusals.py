"""Every route refuses whoever may not call it, and whatever is no request, before it looks at anything else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter

from api.identity.authorization import Caller, RouteRule, list_route_rules
from scheduler.domain.worker_token import issue_agent_token, issue_worker_token
from scheduler.settings import Settings
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.conftest import SECRET, ApiService, Problem
from tests.api.guarded import MADE as _ENTRY
from tests.api.guarded import Guarded

ROUTE_RULES = list_route_rules(ApiService().app.routes)
ROUTES = sorted(ROUTE_RULES)
GUARDED = [route for route in ROUTES if ROUTE_RULES[route].caller is not Caller.PUBLIC]
PEOPLE = [route for route in ROUTES if ROUTE_RULES[route].caller is Caller.USERS]
CHANGES = [route for route in ROUTES if not route.startswith("GET ")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlStore]:
    url = f"sqlite:///{tmp_path_factory.mktemp('refusals') / 'state.sqlite'}"
    migrate(url)
    made = SqlStore(url)
    yield made
    made.close()


@pytest.fixture(scope="module")
def guarded(store: SqlStore) -> Iterator[Guarded]:
    made = Guarded(store, simulation_body_bytes=1 << 20).with_fleet()
    yield made
    made.http.close()


@pytest.fixture(scope="module")
def unguarded(store: SqlStore) -> Iterator[ApiService]:
    made = ApiService(Settings(auth="off", allowed_hosts="x, GPU-box"), store)
    with made.http:
        yield made


def call(service: ApiService, route: str, names: str = "any", **request: Any) -> httpx.Response:
    method, path = route.split(" ", 1)
    return service.http.request(method, re.sub(r"{\w+}", names, path), **request)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_only_probes_the_console_and_the_openapi_document_are_public() -> None:
    public = {route for route in ROUTES if ROUTE_RULES[route].caller is Caller.PUBLIC}
    assert public == {
        "GET /",
        "GET /console/{version}/{path:path}",
        "GET /healthz",
        "GET /readyz",
        "GET /openapi.json",
    }


def test_an_endpoint_without_a_rule_is_rejected() -> None:
    routes = APIRouter()
    routes.get("/v1/secrets")(lambda: {})
    with pytest.raises(ValueError, match=r"GET /v1/secrets has no rule"):
        list_route_rules(routes.routes)


@pytest.mark.parametrize("route", GUARDED)
def test_nobody_passes_without_a_token(guarded: Guarded, problem: Problem, route: str) -> None:
    answer = call(guarded, route)
    assert problem(answer, 401)["type"].endswith(":unauthenticated")
    assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("route", PEOPLE)
def test_nobody_passes_with_a_malformed_token(guarded: Guarded, problem: Problem, route: str) -> None:
    for given in (
        b"Bearer ebk_invented",
        b"Bearer a.b.c",
        b"Bearer \xff\xfe",
        b"Basic cm9vdA==",
        b"Bearer ' OR 1=1 --",
    ):
        problem(call(guarded, route, headers={"Authorization": given}), 401)


@pytest.mark.parametrize("route", PEOPLE)
def test_nobody_passes_with_a_token_that_is_over(guarded: Guarded, problem: Problem, route: str) -> None:
    for grant in ("admin", "viewer"):
        token, secret = guarded.made_token("gone", grant)
        guarded.store.tokens.revoke(token.id, guarded.clock.now_s(), _ENTRY)
        assert "was revoked" in problem(call(guarded, route, headers=bearer(secret)), 401)["detail"]
        expired = guarded.token("late", grant, life_s=0.0)
        assert "has expired" in problem(call(guarded, route, headers=bearer(expired)), 401)["detail"]


@pytest.mark.parametrize("route", PEOPLE)
def test_tokens_of_workers_and_agents_open_no_route_of_people(guarded: Guarded, problem: Problem, route: str) -> None:
    for token in (issue_worker_token(SECRET, "any", 1), issue_agent_token(SECRET, "any")):
        assert "can only report on its own job" in problem(call(guarded, route, headers=bearer(token)), 403)["detail"]


@pytest.mark.parametrize(
    "route", [route for route in ROUTES if ROUTE_RULES[route].caller in (Caller.WORKERS, Caller.AGENTS)]
)
def test_an_admin_is_no_worker(guarded: Guarded, problem: Problem, route: str) -> None:
    problem(call(guarded, route, headers=bearer(guarded.root), json={}), 403)


@pytest.mark.parametrize("route", [route for route in PEOPLE if ROUTE_RULES[route] != RouteRule()])
def test_a_viewer_of_one_queue_is_told_what_is_missing(guarded: Guarded, problem: Problem, route: str) -> None:
    viewer = guarded.token("vera", "viewer:research")
    detail = problem(call(guarded, route, headers=bearer(viewer)), 403)["detail"]
    assert detail.startswith(f"this needs the role {ROUTE_RULES[route].role.label}")
    assert detail.endswith("you are vera with viewer:research")


@pytest.mark.parametrize("route", CHANGES)
@pytest.mark.parametrize("says_its_length", [True, False], ids=["with its length", "in chunks"])
def test_a_body_of_ten_megabytes_is_refused(
    guarded: Guarded, problem: Problem, route: str, says_its_length: bool
) -> None:
    rule = ROUTE_RULES[route]
    token = {Caller.WORKERS: "ebt_x", Caller.AGENTS: "eba_x"}.get(rule.caller, guarded.root)
    body = b'{"a": "' + b"x" * 10_000_000 + b'"}'
    content = body if says_its_length else iter([body[:5_000_000], body[5_000_000:]])
    answer = call(guarded, route, headers={**bearer(token), "Content-Type": "application/json"}, content=content)
    if not says_its_length and answer.status_code in (202, 404, 409):
        return  # it takes no body and did not read this one
    assert problem(answer, 413)["type"].endswith(":body-too-large")


@pytest.mark.parametrize("route", [route for route in ROUTES if "{" in route])
def test_no_name_makes_a_mistake_of_the_service(guarded: Guarded, route: str) -> None:
    for names in ("%ff%fe", "no%00body", "'; DROP TABLE jobs; --", "..%2f..%2fetc%2fpasswd", "a" * 3000, "1 OR 1=1"):
        answer = call(guarded, route, names, headers=bearer(guarded.root))
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("route", CHANGES)
def test_a_body_that_is_no_text_is_refused(guarded: Guarded, route: str) -> None:
    token = {Caller.WORKERS: "ebt_x", Caller.AGENTS: "eba_x"}.get(ROUTE_RULES[route].caller, guarded.root)
    headers = {**bearer(token), "Content-Type": "application/json"}
    answer = call(guarded, route, headers=headers, content=b'{"name": "\xff\xfe"}')
    assert answer.status_code == 202 or 400 <= answer.status_code < 500, answer.text


@pytest.mark.parametrize("route", [route for route in PEOPLE if route.startswith("GET ") and "{" not in route])
def test_no_query_makes_a_mistake_of_the_service(guarded: Guarded, route: str) -> None:
    for query in ("cursor=%ff", "state=%00", "limit='", "cursor=1%20OR%201=1", "after=-1"):
        answer = guarded.ask("GET", f"{route.partition(' ')[2]}?{query}", guarded.root)
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text


@pytest.mark.parametrize("route", ROUTES)
def test_while_auth_is_off_a_foreign_host_is_refused_on_loopback(
    unguarded: ApiService, problem: Problem, route: str
) -> None:
    for host in ("evil.example", "evil.example:8787", "127.0.0.1.evil.example", "", "[::2]:8787"):
        answer = call(unguarded, route, headers={"Host": host})
        assert problem(answer, 421)["type"].endswith(":misdirected")


def test_while_auth_is_off_names_of_this_machine_are_taken(unguarded: ApiService) -> None:
    for host in ("127.0.0.1:8787", "localhost", "[::1]:8787", "gpu-box:1", "LOCALHOST:9"):
        assert unguarded.http.get("/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_while_auth_is_off_no_page_of_another_site_is_served(
    unguarded: ApiService, problem: Problem, route: str
) -> None:
    waiting = unguarded.store.count_pending_commands()
    for origin in ("http://evil.example", "null", "http://127.0.0.1:3000", "https://gpu-box.evil.example"):
        answer = call(unguarded, route, headers={"Host": "127.0.0.1:8787", "Origin": origin})
        assert problem(answer, 421)["type"].endswith(":misdirected")
    assert unguarded.store.count_pending_commands() == waiting


def test_while_auth_is_off_ones_own_pages_are_served(unguarded: ApiService) -> None:
    for host, origin in (
        ("127.0.0.1:9", "http://127.0.0.1:9"),
        ("[::1]:9", "http://[::1]:9"),
        ("x", "https://GPU-box"),
    ):
        headers = {"Host": host, "Origin": origin}
        assert unguarded.http.post("/v1/lending:pause", headers=headers).status_code == 202


def test_who_has_to_say_who_asks_may_do_so_from_any_page(guarded: Guarded) -> None:
    headers = {**bearer(guarded.root), "Origin": "https://ours.example"}
    assert guarded.http.post("/v1/lending:pause", headers=headers).status_code == 202


def test_open_routes_ask_nobody(guarded: Guarded) -> None:
    for path in ("/healthz", "/openapi.json", "/"):
        assert guarded.http.get(path).status_code == 200


def test_metrics_are_for_viewers_of_everything_or_for_all(guarded: Guarded, problem: Problem) -> None:
    viewer, of_one = guarded.token("v", "viewer"), guarded.token("w", "viewer:research")
    assert guarded.ask("GET", "/metrics", viewer).status_code == 200
    problem(guarded.ask("GET", "/metrics", of_one), 403)
    with (open_to_all := Guarded(metrics_open=True)).http:
        assert open_to_all.http.get("/metrics").status_code == 200


def test_an_unknown_path_is_a_404_for_everybody(guarded: Guarded, problem: Problem) -> None:
    problem(guarded.http.get("/v1/secrets"), 404)
    problem(guarded.http.put("/v1/jobs"), 405)
