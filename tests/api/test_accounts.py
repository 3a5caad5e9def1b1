"""Service accounts: tokens that overlap during a rotation, expiry, disabling, deletion, retries and the audit log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.identity.authentication import TOKEN_CACHE_S
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import Problem

CI = {"name": "ci", "grants": ["submitter:research"]}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[AuthenticatedService]:
    url = f"sqlite:///{tmp_path / 'state.sqlite'}"
    migrate(url)
    store = SqlStore(url)
    with (made := AuthenticatedService(store)).http:
        yield made.with_fleet()
    store.close()


def create(guarded: AuthenticatedService, path: str = "", document: Any = CI, key: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {guarded.root}", **({"Idempotency-Key": key} if key else {})}
    return guarded.http.post(f"/v1/accounts{path}", json=document, headers=headers)


def status(guarded: AuthenticatedService, secret: str, *, after_s: float = 0.0) -> int:
    guarded.clock.move_to(guarded.clock.now_s() + after_s)
    return guarded.request("GET", "/v1/jobs", secret).status_code


def test_a_rotation_overlaps_and_keeps_the_owner(guarded: AuthenticatedService, problem: Problem) -> None:
    first = create(guarded).json()["token"]["secret"]
    job = guarded.job(first, "research")
    guarded.clock.move_to(guarded.clock.now_s() + 1.0)
    rotated = create(guarded, "/ci:rotate", {"overlap_s": 100.0}).json()
    second = rotated["token"]["secret"]
    assert rotated["overlap_until_s"] == guarded.clock.now_s() + 100.0
    assert [token["expires_at_s"] for token in rotated["account"]["tokens"]] == [rotated["overlap_until_s"], None]
    assert (status(guarded, first), status(guarded, second)) == (200, 200)
    assert (status(guarded, first, after_s=100.0), status(guarded, second)) == (401, 200)
    assert guarded.request("POST", f"/v1/jobs/{job}:suspend", second).status_code == 202
    account = guarded.request("GET", "/v1/accounts/ci", guarded.root).json()
    assert (len(account["tokens"]), account["last_used_at_s"]) == (1, guarded.clock.now_s())
    assert guarded.request("GET", f"/v1/jobs/{job}", second).json()["owner_id"] == account["owner_id"]
    problem(create(guarded, "/nobody:rotate", {}), 404)
    problem(create(guarded, "/ci:rotate", {"overlap_s": 31 * 86_400}), 422)


def test_disabling_expiry_and_deletion_reject_all_tokens(guarded: AuthenticatedService, problem: Problem) -> None:
    secret = create(guarded, "", {**CI, "expires_in_s": 1000.0}).json()["token"]["secret"]
    assert status(guarded, secret) == 200
    for is_enabled, expected in ((False, 401), (True, 200)):
        assert guarded.request("PATCH", "/v1/accounts/ci", guarded.root, {"enabled": is_enabled}).status_code == 200
        assert status(guarded, secret, after_s=TOKEN_CACHE_S) == expected
    assert status(guarded, secret, after_s=1000.0) == 401
    assert guarded.request("PATCH", "/v1/accounts/ci", guarded.root, {"expires_in_s": 9.0}).status_code == 200
    assert status(guarded, secret) == 200
    assert guarded.request("DELETE", "/v1/accounts/ci", guarded.root).status_code == 204
    assert status(guarded, secret, after_s=TOKEN_CACHE_S) == 401
    again = create(guarded).json()
    assert status(guarded, secret) == 401, "another account of the name does not revive the token"
    assert status(guarded, again["token"]["secret"]) == 200
    problem(create(guarded), 409)
    problem(guarded.request("PATCH", "/v1/accounts/ci", guarded.root, {}), 422)


def test_changed_grants_apply_to_existing_tokens(guarded: AuthenticatedService) -> None:
    secret = create(guarded).json()["token"]["secret"]
    guarded.request("PATCH", "/v1/accounts/ci", guarded.root, {"grants": ["viewer"]})
    assert guarded.request("GET", "/v1/whoami", secret).json()["grants"] == ["viewer"]


def test_retries_return_the_same_token_without_its_secret(guarded: AuthenticatedService, problem: Problem) -> None:
    created = [create(guarded, key="k1") for _ in range(2)]
    rotated = [create(guarded, "/ci:rotate", {}, key="k2") for _ in range(2)]
    for first, repeated in (created, rotated):
        assert (first.status_code, repeated.status_code) == (201, 200)
        assert first.json()["token"]["id"] == repeated.json()["token"]["id"]
        assert ("secret" in first.json()["token"], "secret" in repeated.json()["token"]) == (True, False)
    assert rotated[0].json()["overlap_until_s"] == rotated[1].json()["overlap_until_s"]
    assert len(guarded.request("GET", "/v1/accounts", guarded.root).json()["items"][0]["tokens"]) == 2
    problem(create(guarded, "", {**CI, "grants": ["viewer"]}, key="k1"), 422)


def test_each_change_has_one_audit_entry(guarded: AuthenticatedService) -> None:
    create(guarded, key="k")
    create(guarded, key="k")
    create(guarded, "/ci:rotate", {})
    guarded.request("PATCH", "/v1/accounts/ci", guarded.root, {"enabled": False})
    guarded.request("DELETE", "/v1/accounts/ci", guarded.root)
    entries = guarded.request("GET", "/v1/audit?subject=ci", guarded.root).json()["items"]
    assert [each["action"] for each in entries] == ["CreateAccount", "RotateAccount", "ChangeAccount", "DeleteAccount"]
    assert {each["actor_id"] for each in entries} == {
        guarded.request("GET", "/v1/whoami", guarded.root).json()["owner_id"]
    }
