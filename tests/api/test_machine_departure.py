"""Temporary machines: they announce that they leave, their node is drained, and they give up their credential."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from api.http.errors import TYPE_PREFIX
from api.openapi import load_examples
from scheduler.package_version import get_package_version
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import NOW_S, Problem


@pytest.fixture
def guarded() -> AuthenticatedService:
    return AuthenticatedService().with_fleet()


def join(guarded: AuthenticatedService, **fields: object) -> str:
    """Join machine m0 and return its credential."""
    token = guarded.request("POST", "/v1/machines/tokens", guarded.root, {"pool": "training"}).json()["secret"]
    document: dict[str, Any] = {**load_examples()["JoinDocument"], "name": "m0", "clock_s": NOW_S, **fields}
    document["version"] = get_package_version()
    joined = guarded.request("POST", "/v1/machines:join", token, document)
    assert joined.status_code == 201, joined.text
    return str(joined.json()["credential"])


def report(guarded: AuthenticatedService, credential: str, **fields: object) -> httpx.Response:
    return guarded.request("POST", "/v1/machines/m0/report", credential, {"runs": [], **fields})


def is_draining(guarded: AuthenticatedService) -> bool:
    return bool(guarded.request("GET", "/v1/nodes/m0", guarded.root).json()["draining"])


def test_announced_departure_drains_the_node_once(guarded: AuthenticatedService) -> None:
    credential = join(guarded, temporary=True)
    assert report(guarded, credential).status_code == 200
    assert not is_draining(guarded)
    for _ in range(2):
        assert report(guarded, credential, leaving="the time limit is near").status_code == 200
    assert is_draining(guarded)
    entries = guarded.request("GET", "/v1/audit", guarded.root).json()["items"]
    assert [entry["actor"] for entry in entries if entry["action"] == "CordonNode"] == ["machine m0"]


def test_machine_that_has_left_is_revoked(guarded: AuthenticatedService, problem: Problem) -> None:
    credential = join(guarded, temporary=True)
    left = guarded.request("POST", "/v1/machines/m0/leave", credential)
    assert left.status_code == 200
    assert (left.json()["temporary"], left.json()["revoked_at_s"]) == (True, NOW_S)
    again = problem(guarded.request("POST", "/v1/machines/m0/leave", credential), 401)
    assert again["type"] == TYPE_PREFIX + "machine-revoked"


def test_permanent_machine_cannot_leave_by_itself(guarded: AuthenticatedService, problem: Problem) -> None:
    credential = join(guarded)
    assert (
        problem(guarded.request("POST", "/v1/machines/m0/leave", credential), 409)["type"] == TYPE_PREFIX + "conflict"
    )
    assert report(guarded, credential).status_code == 200
