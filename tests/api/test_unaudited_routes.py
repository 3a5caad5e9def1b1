"""The middleware audits an accepted change of a route that writes no entry itself."""

from __future__ import annotations

from typing import Any

import pytest

from api import app
from api.http.dependencies import PrincipalDep, create_router
from api.identity.authorization import ADMIN, RouteRule, requires
from api.identity.principals import Role
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.protocol import UnavailableError
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import Problem

router = create_router("things")


@router.post("/things/{thing}")
@requires(ADMIN)
def change_thing(thing: str, _: PrincipalDep) -> dict[str, Any]:
    return {"thing": thing}


@router.post("/things:compute")
@requires(RouteRule(role=Role.ADMIN, changes_state=False))
def compute_thing(_: PrincipalDep) -> dict[str, Any]:
    return {}


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> AuthenticatedService:
    monkeypatch.setattr(app, "_ROUTERS", (*app._ROUTERS, router))
    return AuthenticatedService()


def list_entries(guarded: AuthenticatedService) -> list[tuple[str, str, str]]:
    entries = guarded.request("GET", "/v1/audit", guarded.root).json()["items"]
    return [(entry["actor"], entry["action"], entry["subject"]) for entry in entries if entry["actor"] != "tests"]


def test_change_without_own_entry_has_a_plain_one(guarded: AuthenticatedService) -> None:
    for _ in range(2):
        assert guarded.http.post("/v1/things/t1", headers={"Authorization": f"Bearer {guarded.root}"}).is_success
    assert guarded.http.post("/v1/things:compute", headers={"Authorization": f"Bearer {guarded.root}"}).is_success
    assert list_entries(guarded) == [("root", "ChangeThing", "t1")] * 2


def test_change_is_not_confirmed_without_its_entry(
    guarded: AuthenticatedService, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: AuditEntry) -> None:
        raise UnavailableError("the disk is full")

    monkeypatch.setattr(guarded.store.audit_log, "append", fail)
    answer = guarded.http.post("/v1/things/t1", headers={"Authorization": f"Bearer {guarded.root}"})
    assert problem(answer, 503)["type"].endswith(":store-unavailable")
