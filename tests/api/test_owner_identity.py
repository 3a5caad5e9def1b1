"""Ownership follows stable ids: callers with the same display name never gain each other's jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from api.identity.claims import build_principal
from api.identity.principals import Grant, Role
from api.openapi import load_examples
from scheduler.settings import Settings
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import JOB, Problem


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[AuthenticatedService]:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    store = SqlStore(url)
    with (made := AuthenticatedService(store)).http:
        yield made.with_fleet()
    store.close()


def test_a_token_of_the_same_name_owns_nothing_of_another(guarded: AuthenticatedService, problem: Problem) -> None:
    first, second = (guarded.token("anna", "submitter:research") for _ in range(2))
    job = guarded.job(first, "research")
    for method, path, body in (
        ("DELETE", "", None), ("POST", ":suspend", None), ("PATCH", "", {"priority": 1}),
        ("PATCH", "", {"gpus": {"max": 1}}),
    ):  # fmt: skip
        problem(guarded.request(method, f"/v1/jobs/{job}{path}", second, body), 403)
    assert guarded.request("POST", f"/v1/jobs/{job}:suspend", first).status_code == 202
    view = guarded.request("GET", f"/v1/jobs/{job}", second).json()
    ids = [guarded.request("GET", "/v1/whoami", token).json()["owner_id"] for token in (first, second)]
    assert (view["owner"], view["owner_id"]) == ("anna", ids[0])
    assert ids[0] != ids[1]
    mine = [guarded.request("GET", "/v1/jobs?owner_id=me", token).json()["items"] for token in (first, second)]
    assert [[each["id"] for each in items] for items in mine] == [[job], []]
    assert len(guarded.request("GET", f"/v1/jobs?owner_id={ids[0]}", second).json()["items"]) == 1


def test_usage_and_audit_tell_callers_of_one_name_apart(guarded: AuthenticatedService) -> None:
    tokens = [guarded.token("anna", "submitter:research") for _ in range(2)]
    ids = [guarded.request("GET", "/v1/whoami", token).json()["owner_id"] for token in tokens]
    jobs = [guarded.job(token, "research") for token in tokens]
    guarded.tick()
    guarded.clock.move_to(guarded.clock.now_s() + 60.0)
    rows = guarded.request("GET", "/v1/usage?by=owner", guarded.root).json()["items"]
    assert [(row["owner"], row["owner_id"]) for row in rows] == [("anna", owner_id) for owner_id in sorted(ids)]
    assert {row["gpu_s"] for row in rows} == {60.0}
    for owner_id, job in zip(ids, jobs, strict=True):
        entries = guarded.request("GET", f"/v1/audit?actor_id={owner_id}", guarded.root).json()["items"]
        assert [(entry["subject"], entry["actor"]) for entry in entries] == [(job, "anna")]


def test_limits_and_idempotency_keys_are_per_owner_not_per_name(guarded: AuthenticatedService) -> None:
    guarded.request("PATCH", "/v1/queues/research", guarded.root, {"user_jobs_max": 1})
    document, ids = {**JOB, "name": "x", "queue": "research", "steps": 9}, set()
    for token in (guarded.token("anna", "submitter:research") for _ in range(2)):
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "k"}
        ids |= {guarded.http.post("/v1/jobs", json=document, headers=headers).json()["id"] for _ in range(2)}
        assert guarded.request("POST", "/v1/jobs", token, document).status_code == 409
    assert len(ids) == 2


def test_simulations_are_hidden_from_a_caller_of_the_same_name(guarded: AuthenticatedService, problem: Problem) -> None:
    first, second = (guarded.token("anna", "submitter") for _ in range(2))
    made = guarded.request("POST", "/v1/simulations", first, load_examples()["SimulationDocument"]).json()
    assert made["owner_id"] == guarded.request("GET", "/v1/whoami", first).json()["owner_id"]
    problem(guarded.request("GET", f"/v1/simulations/{made['id']}", second), 404)
    lists = [guarded.request("GET", "/v1/simulations", token).json()["items"] for token in (first, second)]
    assert [len(items) for items in lists] == [1, 0]


def test_a_principal_of_an_issuer_is_its_subject_and_gets_the_grants_of_its_groups() -> None:
    settings = Settings(
        oidc_issuer="https://idp.example",
        oidc_name_claim="preferred_username",
        oidc_groups={"ml": ("submitter:research", "viewer"), "ops": ("admin",)},
    )
    claims = {"sub": "u-17", "preferred_username": "anna", "groups": ["ml", "unknown", 7], "ebbtide": "viewer"}
    principal = build_principal(claims, settings)
    assert (principal.name, principal.subject) == ("anna", "oidc:https://idp.example#u-17")
    assert principal.grants == (Grant(Role.VIEWER), Grant(Role.SUBMITTER, "research"))
    other = build_principal({**claims, "sub": "u-18"}, settings)
    assert not other.owns(principal.subject)
    assert not other.owns("")
    for broken in ({"sub": None}, {"sub": ""}, {"sub": "a\nb"}, {"sub": "x" * 256}, {"preferred_username": 7}):
        with pytest.raises(ValueError, match=next(iter(broken))):
            build_principal({**claims, **broken}, settings)
